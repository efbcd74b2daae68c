"""Layouts that training frameworks write themselves, with collectives of their own: tensor, context, experts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tests.distributed.layouts.job import Wiring
from tests.distributed.layouts.model import (
    ColumnParallel,
    ContextAttention,
    Experts,
    RowParallel,
    TinyLM,
    VocabularyParallel,
)
from tests.distributed.layouts.wiring import average, averaging, loss_of, whole_pass


def tensor_parallel_by_hand(model: nn.Module, mesh: DeviceMesh) -> Wiring:
    """Plain tensors: every rank holds its rows and columns as parameters of their own, as Megatron's ranks do."""
    assert isinstance(model, TinyLM)
    group = mesh.get_group("tp")
    for block in model.blocks.values():
        for owner, names in ((block.attention, "qkv"), (block.feed, ("up",))):
            for name in names:
                setattr(owner, name, ColumnParallel(getattr(owner, name), group))
        block.attention.o = RowParallel(block.attention.o, group)
        block.feed.down = RowParallel(block.feed.down, group)
    model.embedding = VocabularyParallel(model.embedding, group)  # type: ignore[arg-type]
    model.head = ColumnParallel(model.head, group, gather=True)  # type: ignore[arg-type]
    return Wiring(root=model, plain=model, compute=whole_pass(model), synchronize=averaging(model, mesh))


def context_parallel(model: nn.Module, mesh: DeviceMesh) -> Wiring:
    """Every rank has its part of each sequence; parameters are whole, gradients are averaged over all ranks."""
    assert isinstance(model, TinyLM)
    group = mesh.get_group("cp")
    part, parts = mesh.get_local_rank("cp"), mesh["cp"].size()
    model.part = part
    for block in model.blocks.values():
        block.attention = ContextAttention(block.attention, group)

    def compute(batch: torch.Tensor) -> torch.Tensor:
        inputs, targets = (ids.chunk(parts, dim=1)[part] for ids in (batch[:, :-1], batch[:, 1:]))
        loss = loss_of(model(inputs), targets)
        loss.backward()
        return loss

    parameters, everyone = list(model.parameters()), dist.group.WORLD
    assert everyone is not None
    return Wiring(root=model, plain=model, compute=compute, synchronize=lambda: average(parameters, everyone))


def expert_parallel(model: nn.Module, mesh: DeviceMesh) -> Wiring:
    """Experts spread over `ep`, whose ranks have data of their own. Dense gradients are averaged over all ranks, those
    of experts, which already hold the sum over `ep`, summed over the replicas of the expert."""
    assert isinstance(model, TinyLM)
    for block in model.blocks.values():
        assert isinstance(block.feed, Experts)
        block.feed.spread(mesh.get_group("ep"))
    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    dense = [p for name, p in model.named_parameters() if ".experts." not in name]
    everyone, replicas = dist.group.WORLD, mesh.get_group("dp_replicate")
    assert everyone is not None

    def synchronize() -> None:
        average(dense, everyone)
        average(experts, replicas, divisor=dist.get_world_size())

    return Wiring(root=model, plain=model, compute=whole_pass(model), synchronize=synchronize)
