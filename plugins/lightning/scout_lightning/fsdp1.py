"""`FSDPStrategy`, torch's first FSDP: parameters flattened and sharded, made whole for the replay of one module.

Between steps each original parameter is a flat view of this rank's shard, which replicas hold alike. The modules
themselves are called inside their wrappers, so the inner ones are what is hooked and replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.optim import Optimizer

from scout_core.adapter import Layout, Surfaces
from scout_core.config import ReplayHarnessConfig
from scout_core.peers import Coordinates
from scout_core.pytorch.optimizer import SliceableOptimizer
from scout_lightning.adapter import LightningAdapter

_PREFIX = "_fsdp_wrapped_module."
_HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)


def units(module: nn.Module) -> list[FullyShardedDataParallel]:
    """The FSDP1 wrappers in `module`, outermost first. Local."""
    return [part for part in module.modules() if isinstance(part, FullyShardedDataParallel)]


def refusal(model: nn.Module) -> str | None:
    """Why replays of this model are impossible, with what to set instead; None: they are possible. Local."""
    if all(unit._use_orig_params for unit in units(model)):
        return None
    return "FSDP1 with use_orig_params=False hides the parameters of layers; leave Lightning's default, True"


class FlatShardsAdapter(LightningAdapter):
    """Of a model that FSDP1 wraps with `use_orig_params=True`, Lightning's default.

    With `use_orig_params=False` no rank has peers: the out-of-band path watches, and nothing is replayed.

    Hybrid shard: replicas are peers, shard groups work in lockstep. Full shard: the ranks of a shard group are peers,
    compared on gathered parameters. `NO_SHARD`: all ranks of the group are peers.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, config: ReplayHarnessConfig, *, first_step: int = 0
    ) -> None:
        super().__init__(_inner(model), optimizer, config, first_step=first_step)
        self._refusal = refusal(model)
        self._units = units(model)
        self._outer = model if isinstance(model, FullyShardedDataParallel) else None
        self._parameters = {name.replace(_PREFIX, ""): p for name, p in self._parameters.items()}
        self._slices = SliceableOptimizer(optimizer, {id(p): name for name, p in self._parameters.items()})
        self._shapes = {
            id(parameter): tuple(shape)  # torch 2.10 to 2.13
            for unit in self._units
            if (flat := unit._flat_param) is not None and flat._params is not None
            for parameter, shape in zip(flat._params, flat._shapes, strict=True)
        }
        self._owner: dict[int, FullyShardedDataParallel] = {}
        for unit in self._units:  # outermost first, so that the innermost owner stays
            self._owner |= {id(part): unit for part in unit.modules()}

    def layout(self) -> Layout:
        """Of the outermost unit's process groups, which Lightning gives to all units alike."""
        unit = self._units[0]
        if self._refusal is not None:
            world = tuple(range(dist.get_world_size()))
            note = f"{self._refusal}; hangs, loaders and checkpoint I/O are watched, nothing is checked or certified"
            return Layout(coordinates=Coordinates(), peers=(dist.get_rank(),), connected=world, notes=(note,))
        shards = tuple(dist.get_process_group_ranks(unit.process_group))
        rank, place = dist.get_rank(), shards.index(dist.get_rank())
        if unit.sharding_strategy in _HYBRID:
            group = unit._inter_node_pg  # torch 2.10 to 2.13; the public interface tells the shard group alone
            replicas = tuple(dist.get_process_group_ranks(group))
            return Layout(
                coordinates=Coordinates(dp_replicate=replicas.index(rank), dp_shard=place),
                peers=replicas,
                data_group=group,
                lockstep=shards,
                connected=tuple(range(dist.get_world_size())),
                gathers=True,
            )
        if unit.sharding_strategy is ShardingStrategy.NO_SHARD:
            return Layout(coordinates=Coordinates(dp_replicate=place), peers=shards, data_group=unit.process_group)
        note = (
            "FSDP1 shards parameters and holds them once: replays are compared after gathering, an owner's shard has "
            "no copy to be compared with; sharding_strategy='HYBRID_SHARD' has owned state compared"
        )
        return Layout(
            coordinates=Coordinates(dp_shard=place),
            peers=shards,
            data_group=unit.process_group,
            shard_peers=len(shards) > 1,
            gathers=True,
            notes=(note,) if len(shards) > 1 else (),
        )

    def surfaces(self) -> Surfaces:
        """The modules inside the wrappers, under the names that they have without."""
        found = super().surfaces()
        return replace(
            found,
            root=_inner(found.root),
            plain_root=_inner(found.plain_root),
            embedding=_named(found.embedding),
            output=_named(found.output),
            hidden={number: (_clean(name), _inner(module)) for number, (name, module) in found.hidden.items()},
        )

    def whole_shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        return self._shapes.get(id(parameter), tuple(parameter.shape))

    @contextmanager
    def materialize(self, module: nn.Module) -> Iterator[None]:
        """One all-gather on the shard group for each unit that owns parameters of `module`; every rank of it enters.

        Raises `AssertionError` of torch inside a forward or backward pass. What is written within is not kept.
        """
        owners = {id(o): o for part in module.modules() if (o := self._owning(part)) is not None}
        with ExitStack() as stack:
            for unit in owners.values():
                stack.enter_context(self._whole(unit))
            for unit in units(module):
                stack.enter_context(_passing_through(unit))
            yield

    def forward_only(self) -> AbstractContextManager[None]:
        return self._whole_pass()

    @contextmanager
    def _whole_pass(self) -> Iterator[None]:
        """The outermost unit is gathered here, since its own call is left out; units inside gather themselves."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self._outer is not None:
                stack.enter_context(self._whole(self._outer))
            yield

    @contextmanager
    def _whole(self, unit: FullyShardedDataParallel) -> Iterator[None]:
        """The unit's own parameters, in the type that its forward pass computes with."""
        with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False), ExitStack() as stack:
            kind = unit.mixed_precision.param_dtype
            for part in unit.modules() if kind is not None else ():
                if self._owner[id(part)] is unit:
                    stack.enter_context(_cast(part, kind))
            yield

    def _owning(self, part: nn.Module) -> FullyShardedDataParallel | None:
        return self._owner.get(id(part)) if part._parameters else None


def _inner(module: nn.Module) -> nn.Module:
    return module.module if isinstance(module, FullyShardedDataParallel) else module


def _clean(name: str) -> str:
    return f"{name}.".replace(_PREFIX, "").rstrip(".")


def _named(found: tuple[str, nn.Module] | None) -> tuple[str, nn.Module] | None:
    return None if found is None else (_clean(found[0]), _inner(found[1]))


@contextmanager
def _passing_through(unit: FullyShardedDataParallel) -> Iterator[None]:
    """A call of the wrapper is a call of what it wraps. Into the dictionary: a module that is set becomes a child."""
    unit.__dict__["forward"] = unit.module
    try:
        yield
    finally:
        del unit.__dict__["forward"]


@contextmanager
def _cast(part: nn.Module, kind: Any) -> Iterator[None]:
    """Floating-point parameters as copies of another type; the registered ones come back."""
    kept = dict(part._parameters)
    for name, parameter in kept.items():
        if parameter is not None and parameter.is_floating_point():
            part._parameters[name] = nn.Parameter(parameter.detach().to(kind), parameter.requires_grad)
    try:
        yield
    finally:
        part._parameters.update(kept)
