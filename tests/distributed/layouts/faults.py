"""Faults of one rank in a layout's job, from the next step on until removed, and where a check has to show them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn

from scout_core import faults
from scout_core.faults.bits import own_copy, own_part
from scout_core.faults.fault import Fault, Forward, ForwardFault, Schedule
from tests.distributed.layouts.job import Job, LayoutCase
from tests.distributed.layouts.model import LAYERS

Kind = Literal["before", "after", "gradient", "weight", "moment", "update", "embedding", "head"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_BIT = 18  # of a float32: a change of about 3%


@dataclass(frozen=True, kw_only=True)
class LayoutFault:
    """One fault on one rank.

    `before`: the last local product before a collective of block `layer`. `after`: what the block returns, after its
    last collective. `gradient`: the gradient of the weight that the rank owns, in no output. `weight`, `moment`: memory
    of that weight or of its optimizer state goes bad, one more element at the start of each step. `update`: the
    optimizer's arithmetic. `embedding`, `head`: the local product there.
    """

    kind: Kind
    rank: int
    layer: int = 1
    element: int = 5

    @property
    def recipe(self) -> str:
        """The recipe that covers it."""
        if self.kind in ("before", "after", "gradient"):
            return f"hidden:{self.layer}"
        return {"embedding": "embedding", "head": "output", "update": "optimizer"}.get(self.kind, "state")


def layer_on(case: LayoutCase, rank: int) -> int:
    """A block that lives on `rank`."""
    stages = dict(case.dims).get("pp", 1)
    return rank // (case.ranks // stages) * (LAYERS // stages) + 1


def kinds_on(case: LayoutCase, rank: int) -> tuple[Kind, ...]:
    """Faults that `rank` can have: no embedding beyond the first pipeline stage, no head before the last."""
    stages = dict(case.dims).get("pp", 1)
    stage = rank // (case.ranks // stages)
    absent = {"before"} if case.before is None else set()
    absent |= {"embedding"} if stage > 0 else set()
    absent |= {"head"} if stage < stages - 1 else set()
    return tuple(kind for kind in KINDS if kind not in absent)


def inject(fault: LayoutFault, job: Job) -> Fault:
    """Put `fault` in on its rank, and nothing on the others. Local; every rank may call."""
    if dist.get_rank() != fault.rank:
        return Fault()
    case, block = job.case, job.block(fault.layer) if fault.layer in job.layers else None
    if fault.kind == "update":
        return faults.corrupt_optimizer_update(job.optimizer, fault.element, _BIT)
    if fault.kind in ("embedding", "head"):
        return bend(job.plain.get_submodule(getattr(case, fault.kind)), fault.element)
    assert block is not None, f"block {fault.layer} is not on rank {fault.rank}"
    if fault.kind == "after":
        return bend(block, fault.element)
    if fault.kind == "before":
        return bend(block.get_submodule(str(case.before)), fault.element)
    owner = block.get_submodule(case.owned)
    if fault.kind == "gradient":
        return faults.corrupt_parameter_gradient(owner, "weight", fault.element, _BIT)
    weight = owner.get_parameter("weight")
    return _BadMemory(job, lambda: _cell(job, weight, fault.kind == "moment"), fault.element)


def bend(module: nn.Module, element: int) -> Fault:
    """Add 1/16 to one element of what `module` returns, on this rank, before anything is made of it.

    Unlike a flipped bit this shows in zeros too, and never makes an infinity.
    """

    def act(forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return _Bend.apply(forward(*args, **kwargs), element)  # type: ignore[no-untyped-call]

    return ForwardFault(module, act, Schedule())


class _Bend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, element: int) -> torch.Tensor:
        whole, own = own_copy(tensor)
        if own.numel():
            own.view(-1)[element % own.numel()] += 0.0625
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


def _cell(job: Job, weight: torch.Tensor, moment: bool) -> torch.Tensor:
    """The memory that goes bad; looked up at each step, since FSDP swaps parameters."""
    return own_part(job.optimizer.state[weight]["exp_avg"] if moment else weight)


class _BadMemory(Fault):
    """Flips a bit of one more element at the start of every step, so that no later flip takes an earlier one back."""

    def __init__(self, job: Job, memory: Callable[[], torch.Tensor], element: int) -> None:
        super().__init__()
        self._memory, self._element = memory, element
        job.before_step.append(self._act)

    def _act(self) -> None:
        if self.active:
            memory = self._memory()
            faults.flip_bit(memory, (self._element + self._fired) % memory.numel(), _BIT)
            self._fired += 1
