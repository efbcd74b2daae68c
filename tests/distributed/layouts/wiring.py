"""Layouts from torch's own parts: DDP, FSDP2, HSDP, tensor and sequence parallelism by DTensor, pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.layouts.job import Wiring
from tests.distributed.layouts.model import LAYERS, TinyLM

MICROBATCHES = 4
Pass = Callable[[torch.Tensor], torch.Tensor]


def loss_of(logits_btv: torch.Tensor, targets_bt: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten())


def whole_pass(model: nn.Module) -> Pass:
    """Forward and backward of a batch by a model that has it all."""

    def compute(batch: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(batch[:, :-1]), batch[:, 1:])
        loss.backward()
        return loss

    return compute


def average(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, divisor: int | None = None) -> None:
    """Sum gradients over the group in one all-reduce, divided by its size or `divisor`. Every rank of it calls."""
    own = []
    for parameter in parameters:
        gradient = parameter.grad
        assert gradient is not None
        if isinstance(gradient, DTensor):
            gradient = _complete(parameter, gradient).to_local()
        own.append(gradient)
    flat = torch.cat([gradient.flatten() for gradient in own])
    dist.all_reduce(flat, group=group)
    flat /= divisor or dist.get_world_size(group)
    for gradient, mean in zip(own, flat.split([gradient.numel() for gradient in own]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def _complete(parameter: nn.Parameter, gradient: DTensor) -> DTensor:
    """The gradient summed over the ranks that have a part of it each, as sequence-parallel norms do."""
    if any(place.is_partial() for place in gradient.placements):
        gradient = gradient.redistribute(placements=parameter.placements)  # type: ignore[attr-defined]
        parameter.grad = gradient
    return gradient


def averaging(model: nn.Module, mesh: DeviceMesh, dim: str = "dp_replicate") -> Callable[[], None]:
    group, parameters = mesh.get_group(dim), list(model.parameters())
    return lambda: average(parameters, group)


def ddp(model: nn.Module, mesh: DeviceMesh) -> Wiring:
    root = DistributedDataParallel(model, process_group=mesh.get_group())
    return Wiring(root=root, plain=model, compute=whole_pass(root))


def sharded(model: nn.Module, mesh: DeviceMesh) -> Wiring:
    """FSDP2 along `dp_shard`; HSDP with `dp_replicate` in the mesh. Whatever else is in it is done already."""
    names = [name for name in mesh.mesh_dim_names or () if name.startswith("dp_")]
    part = mesh[tuple(names)]
    for block in model.blocks.values():  # type: ignore[union-attr, operator]
        fully_shard(block, mesh=part)
    fully_shard(model, mesh=part)
    return Wiring(root=model, plain=model, compute=whole_pass(model))


def _split_blocks(model: nn.Module, mesh: DeviceMesh) -> None:
    columns = {f"attention.{name}" for name in "qkv"} | {"feed.up"}
    rows = {"attention.o", "feed.down"}
    for block in model.blocks.values():  # type: ignore[union-attr, operator]
        plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in rows}
        parallelize_module(block, mesh["tp"], plan)


def _split_ends(model: nn.Module, mesh: DeviceMesh) -> None:
    ends: dict[str, ParallelStyle] = {"head": ColwiseParallel(output_layouts=Replicate())}
    ends["embedding"] = RowwiseParallel(input_layouts=Replicate())
    parallelize_module(model, mesh["tp"], ends)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> Wiring:
    _split_blocks(model, mesh)
    _split_ends(model, mesh)
    return Wiring(root=model, plain=model, compute=whole_pass(model), synchronize=averaging(model, mesh))


def sequence_parallel(model: nn.Module, mesh: DeviceMesh) -> Wiring:
    """Tensor parallelism whose norms and residual stream hold a part of the sequence each."""
    for block in model.blocks.values():  # type: ignore[union-attr, operator]
        whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        plan: dict[str, ParallelStyle] = {
            "norm_attention": SequenceParallel(),
            "attention": PrepareModuleInput(**whole),
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
            "attention.o": RowwiseParallel(output_layouts=Shard(1)),
            "norm_feed": SequenceParallel(),
            "feed": PrepareModuleInput(**whole),
            "feed.up": ColwiseParallel(),
            "feed.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh["tp"], plan)
    ends: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], ends)
    return Wiring(root=model, plain=model, compute=whole_pass(model), synchronize=averaging(model, mesh))


def sharded_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> Wiring:
    _split_blocks(model, mesh)
    _split_ends(model, mesh)
    return sharded(model, mesh)


def keep_stage(model: nn.Module, mesh: DeviceMesh) -> None:
    """Leave on the model what lives on this rank's pipeline stage."""
    assert isinstance(model, TinyLM)
    stage, stages = mesh.get_local_rank("pp"), mesh["pp"].size()
    share = LAYERS // stages
    for number in range(LAYERS):
        if number // share != stage:
            del model.blocks[str(number)]
    if stage > 0:
        model.embedding = model.position = None
    if stage < stages - 1:
        model.norm = model.head = None


def pipeline(model: nn.Module, mesh: DeviceMesh, *, one_forward_one_backward: bool = False) -> Wiring:
    keep_stage(model, mesh)
    compute = stage_pass(model, mesh, one_forward_one_backward=one_forward_one_backward)
    return Wiring(root=model, plain=model, compute=compute, synchronize=averaging(model, mesh))


def pipeline_tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> Wiring:
    keep_stage(model, mesh)
    _split_blocks(model, mesh)
    compute = stage_pass(model, mesh, one_forward_one_backward=True)
    return Wiring(root=model, plain=model, compute=compute, synchronize=averaging(model, mesh))


def stage_pass(
    model: nn.Module, mesh: DeviceMesh, *, one_forward_one_backward: bool
) -> Callable[[torch.Tensor], torch.Tensor | None]:
    """One scheduled step of this rank's stage; the last stage gives the mean loss of the microbatches."""
    number, stages = mesh.get_local_rank("pp"), mesh["pp"].size()
    stage = PipelineStage(model, number, stages, torch.device("cpu"), group=mesh.get_group("pp"))
    kind = Schedule1F1B if one_forward_one_backward else ScheduleGPipe
    schedule = kind(stage, MICROBATCHES, loss_fn=loss_of)

    def compute(batch: torch.Tensor) -> torch.Tensor | None:
        losses: list[torch.Tensor] = []
        inputs = (batch[:, :-1].contiguous(),) if number == 0 else ()
        if number == stages - 1:
            schedule.step(*inputs, target=batch[:, 1:].contiguous(), losses=losses)
            return torch.stack(losses).mean()
        schedule.step(*inputs)
        return None

    return compute
