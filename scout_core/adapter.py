"""The one contract a framework plugin fills. The core never asks which framework it runs under.

The calls come in this order; the table says who makes them and whether they may communicate.

| # | call | made by | collectives |
|---|------|---------|-------------|
| 1 | `layout()` | every rank, once at attach | allowed on the job's own groups |
| 2 | `surfaces()` | every rank, once at attach | allowed on the job's own groups |
| 3 | `on_boundary()` | every rank, once at attach | none |
| 4 | `capture_optimizer_slice()` | every rank, before the update of a step that checks | none |
| 5 | `materialize()` | every peer in lockstep, once readiness agreed | on the recipe's lockstep ranks |
| 6 | `apply_optimizer_slice()` | every peer, once readiness agreed | none |
| 7 | `training_state()` | every rank, at a boundary that was accepted | none |
| 8 | `load_training_state()` | every rank, at attach, before training | none |
| 9 | `durable_callbacks()` | every rank, once at attach | none |
| 10 | `first_step()` | every rank, once at attach | none |
| 11 | `close()` | every rank, whatever was raised before | none |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from scout_core.peers import Coordinates

if TYPE_CHECKING:
    from scout_core.trust.durable import DurableCallbacks


@dataclass(frozen=True, kw_only=True)
class Layout:
    """This rank's place and the ranks it is checked with.

    `peers` are ordered by their place along the replicated dimension, `data_group` is the job's own group over them.
    `lockstep` are the ranks whose collectives a replay runs, ordered by place and this one included; together with the
    peers they must form a table: the partners of my peers are the peers of my partners. `shard_peers`: peers hold
    different shards, so replays are compared on gathered parameters, and owned state cannot be.
    `connected` are all ranks that depend on each other through any group of the job, in the same order on each of them,
    whose observers confer; empty: the peers. `stage` are those of them that go through the same layers; empty: all.
    `gathers`: parameters are sharded and gathered for use (FSDP). `notes` says what the layout does not allow.
    """

    coordinates: Coordinates
    peers: tuple[int, ...]
    data_group: dist.ProcessGroup | None = None
    lockstep: tuple[int, ...] = ()
    shard_peers: bool = False
    notes: tuple[str, ...] = ()
    connected: tuple[int, ...] = ()
    stage: tuple[int, ...] = ()
    gathers: bool = False


@dataclass(frozen=True, kw_only=True)
class Surfaces:
    """The modules that can be replayed.

    `hidden` maps *global* layer ids to modules, so that pipeline stages count alike. `root` is the module whose call
    is one forward pass; `plain_root` is it without wrappers, safe to call outside training. `notes` says, one
    sentence each, what could not be found and what to set instead.
    """

    root: nn.Module
    plain_root: nn.Module
    embedding: tuple[str, nn.Module] | None = None
    hidden: Mapping[int, tuple[str, nn.Module]] = field(default_factory=dict)
    output: tuple[str, nn.Module] | None = None
    compiled: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SlicePart:
    """One contiguous run of one parameter: flat elements `start:stop`, as copies of their values before the update.

    `group` and `index` are the parameter's place in the optimizer.
    """

    name: str
    start: int
    stop: int
    parameter: torch.Tensor
    gradient: torch.Tensor
    state: Mapping[str, Any]
    group: int
    index: int = 0


@dataclass(frozen=True, kw_only=True)
class OptimizerSlice:
    """A bounded part of one optimizer update: copied inputs and the hyperparameters of every parameter group."""

    parts: tuple[SlicePart, ...]
    hyperparameters: Sequence[Mapping[str, Any]]
    identity: int
    step: int


class FrameworkAdapter(ABC):
    """What SCOUT needs to know of one training framework."""

    @abstractmethod
    def layout(self) -> Layout:
        """This rank's coordinates and peers."""

    @abstractmethod
    def surfaces(self) -> Surfaces:
        """The modules to replay on this rank."""

    @abstractmethod
    def on_boundary(self, before_update: Callable[[], None], boundary: Callable[[Callable[[], bool]], None]) -> None:
        """Subscribe to optimizer steps.

        `before_update()` is called when the effective gradients are final and nothing is updated yet;
        `boundary(applied)` once after each optimizer step. `applied()` is False when the update was skipped on every
        rank alike; it is asked at steps that check only, since the answer may wait for the device.
        """

    @abstractmethod
    def capture_optimizer_slice(
        self, cursor: int, budget: int, *, draw_missing_gradients: bool = False
    ) -> OptimizerSlice | str:
        """Copy up to `budget` elements from flat element `cursor` on, wrapping around; or say why it cannot.

        Called within `before_update`; or, with `draw_missing_gradients`, at a check off schedule, where gradients that
        are gone are replaced by noise that is the same on every peer. The copies must not alias live state.
        """

    @abstractmethod
    def apply_optimizer_slice(self, part: OptimizerSlice) -> list[torch.Tensor]:
        """The updated parameters and state of `part`, by the framework's own kernel, on copies of the slice."""

    def live_slice(self, part: OptimizerSlice) -> list[torch.Tensor]:
        """What the live update made of this rank's own `part`, in the order of `apply_optimizer_slice`. No copies.

        Asked where parameters are held once, so that the owner's result can be compared with the peers' recomputation.
        """
        raise NotImplementedError(f"{type(self).__name__} has shards without copies, but does not show their updates")

    @abstractmethod
    def state_tensors(self) -> list[tuple[str, str, torch.Tensor]]:
        """Replicated live state as `(surface, name, tensor)`, in the same order on every peer.

        `surface` is `parameter_state` or `optimizer_state`. Nothing is copied.
        """

    def is_shared(self, name: str) -> bool:
        """Whether all lockstep partners hold the state of this name alike (a norm's weight under tensor parallelism).

        `name` is one that `state_tensors` gives. The safe answer is no.
        """
        return False

    def whole_shape(self, parameter: torch.Tensor) -> tuple[int, ...]:
        """The shape of a live parameter once `materialize` made it whole: what peers must have alike. Local."""
        return tuple(parameter.shape)

    def materialize(self, module: nn.Module) -> AbstractContextManager[None]:
        """A context in which all parameters of `module` are whole and no wrapper's hooks stand on it.

        They always are by default. Entering it may communicate, in the sequence that all ranks of the group have.
        """
        return nullcontext()

    def forward_only(self) -> AbstractContextManager[None]:
        """The context of a forward pass of the whole model that no backward follows. Gradients are on by default."""
        return torch.enable_grad()

    @abstractmethod
    def training_state(self) -> Any:
        """Everything a restart needs but the step: model, optimizer, scheduler, input position, RNG.

        Dicts, lists, tuples, tensors, arrays, numbers and strings only. Tensors may be live: they are copied before
        the next optimizer step writes; what forward passes change (buffers) must be copied here.
        """

    @abstractmethod
    def load_training_state(self, state: Any) -> None:
        """Put back what `training_state` gave, bit for bit. Called before the first step.

        `ValueError` says that it does not fit and that nothing was changed; after any other error, all is taken to be.
        """

    def first_step(self) -> int:
        """Optimizer steps before attach, where the framework loaded its own checkpoint: recipes go on rotating there.

        Asked once, at attach. Equal on every rank.
        """
        return 0

    def durable_callbacks(self) -> DurableCallbacks | None:
        """The framework's own durable checkpoints, used when the caller gives none; None: there are none."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Remove every hook this adapter made. Never raises for a hook that is already gone."""
