"""The adapter for plain PyTorch: DDP, FSDP2, HSDP, and whatever a DeviceMesh describes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from scout_core.adapter import FrameworkAdapter, Layout, OptimizerSlice, Surfaces
from scout_core.config import ReplayHarnessConfig
from scout_core.peers import Coordinates
from scout_core.pytorch.discovery import ModuleNames, find_surfaces, unwrap
from scout_core.pytorch.gathered import GatheredModules
from scout_core.pytorch.optimizer import SliceableOptimizer
from scout_core.pytorch.topology import Topology, find_topology, layout_on, shared_names
from scout_core.pytorch.training_state import TrainingState
from scout_core.replay.local_tensors import local_part


class PyTorchAdapter(FrameworkAdapter):
    """Peers follow from the job's DeviceMesh, given or found on the parameters; without one they are the ranks of the
    DDP process group, or of the whole job for a model that is replicated otherwise.

    Boundaries are the optimizer's own step hooks; a step that a gradient scaler skips on every rank alike is none.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        config: ReplayHarnessConfig,
        stateful: Mapping[str, Any] | None = None,
        mesh: Any = None,
    ) -> None:
        """`stateful`: caller-owned objects with `state_dict()` and `load_state_dict()`, by name.

        Raises `ConfigError` for a `mesh` whose dimensions it cannot tell.
        """
        self._model = model
        self._optimizer = optimizer
        self._config = config
        self._ddp = _find_ddp(model)
        plain = unwrap(model)
        ignored = set(getattr(self._ddp, "parameters_to_ignore", ()) or ())
        self._parameters = {name: p for name, p in plain.named_parameters() if name not in ignored}
        self._slices = SliceableOptimizer(optimizer, {id(p): name for name, p in self._parameters.items()})
        self._state = TrainingState(plain, optimizer, stateful or {})
        self._gathered = GatheredModules(plain)
        self._topology = find_topology(self._parameters.values(), mesh, sharded=self._gathered.any)
        self._shared = (
            shared_names(self._parameters, self._topology) if isinstance(self._topology, Topology) else frozenset()
        )
        self._steps = 0
        self._closure = False
        self._handles: list[RemovableHandle] = []

    def layout(self) -> Layout:
        if not (dist.is_available() and dist.is_initialized()):
            return Layout(coordinates=Coordinates(), peers=(0,))
        ddp = self._ddp.process_group if self._ddp is not None else None
        if isinstance(self._topology, str):
            return Layout(coordinates=Coordinates(), peers=(dist.get_rank(),), notes=(self._topology,))
        if self._topology is not None:
            return layout_on(self._topology, ddp)
        group = ddp if ddp is not None else dist.group.WORLD
        peers = tuple(dist.get_process_group_ranks(group))
        replica = peers.index(dist.get_rank())
        return Layout(coordinates=Coordinates(dp_replicate=replica), peers=peers, data_group=group)

    def surfaces(self) -> Surfaces:
        config = self._config
        names = ModuleNames(
            embedding=config.embedding_module, hidden=config.hidden_modules, output=config.output_module
        )
        found = find_surfaces(self._model, names)
        if isinstance(self._topology, Topology) and self._topology.grid.size("pp") > 1:
            found = self._count_over_stages(found, self._topology.group("pp"))
        return found

    def _count_over_stages(self, found: Surfaces, stages: dist.ProcessGroup) -> Surfaces:
        """Layer numbers that go on from stage to stage, where each stage counts from 0. One gather over the stages."""
        told: list[Any] = [None] * dist.get_world_size(stages)
        dist.all_gather_object(told, sorted(found.hidden), group=stages)
        numbers = [number for layers in told for number in layers]
        if len(set(numbers)) == len(numbers):
            return found
        offset = sum(len(layers) for layers in told[: dist.get_rank(stages)])
        return replace(found, hidden={offset + i: found.hidden[n] for i, n in enumerate(sorted(found.hidden))})

    def is_shared(self, name: str) -> bool:
        return name in self._shared or name.rpartition(".")[0] in self._shared

    def forward_only(self) -> AbstractContextManager[None]:
        return self._gathered.forward_only() if self._gathered.any else super().forward_only()

    def materialize(self, module: nn.Module) -> AbstractContextManager[None]:
        return self._gathered.whole(module) if self._gathered.any else nullcontext()

    def on_boundary(self, before_update: Callable[[], None], boundary: Callable[[Callable[[], bool]], None]) -> None:
        def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            # torch passes the optimizer itself as the first positional argument
            self._closure = any(callable(value) for value in (*args[1:], *kwargs.values()))
            before_update()

        def after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._steps += 1
            # a fused optimizer under a gradient scaler is called for a skipped step too, and skips in its kernel
            found_inf = getattr(optimizer, "found_inf", None)
            boundary(lambda: found_inf is None or not bool(found_inf.item()))

        self._handles += [
            self._optimizer.register_step_pre_hook(before),
            self._optimizer.register_step_post_hook(after),
        ]

    def capture_optimizer_slice(
        self, cursor: int, budget: int, *, draw_missing_gradients: bool = False
    ) -> OptimizerSlice | str:
        if draw_missing_gradients:
            return self._slices.capture(cursor, budget, step=self._steps, draw_missing=True)
        if self._closure:
            return "optimizer.step(closure) computes its gradients inside the step"
        return self._slices.capture(cursor, budget, step=self._steps + 1)

    def apply_optimizer_slice(self, part: OptimizerSlice) -> list[torch.Tensor]:
        return self._slices.apply(part)

    def live_slice(self, part: OptimizerSlice) -> list[torch.Tensor]:
        return self._slices.live(part)

    def state_tensors(self) -> list[tuple[str, str, torch.Tensor]]:
        parameters = [("parameter_state", name, local_part(p)) for name, p in self._parameters.items()]
        return [*parameters, *self._slices.state_tensors()]

    def training_state(self) -> Any:
        return self._state.take(self._steps)

    def load_training_state(self, state: Any) -> None:
        self._state.put_back(state)
        self._steps = int(state["steps"])

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """The DDP wrapper, which may stand outside or inside a `torch.compile` wrapper."""
    while not isinstance(model, DistributedDataParallel):
        inner = getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return None
        model = inner
    return model
