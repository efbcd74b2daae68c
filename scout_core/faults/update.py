"""A fault in the optimizer's arithmetic: correct inputs, a wrong result."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.optim import Optimizer

from scout_core.faults.bits import bit_width, flip_bit, own_part
from scout_core.faults.fault import Fault, Schedule


def corrupt_optimizer_update(
    optimizer: Optimizer, element: int, bit: int, *, every: int = 1, times: int | None = None
) -> Fault:
    """Flip one bit of the first parameter that each `step()` updates, as the update kernel leaves it.

    The optimizer object gets a class of its own, derived from the one it has, so that replay, which calls the class's
    `step` on copies, runs the same faulty kernel. Step hooks see the wrong result. Element and bit are taken modulo
    what the parameter has. Several such faults on one optimizer must be removed in the reverse order.
    """
    return _UpdateFault(optimizer, element, bit, Schedule(every, times))


class _UpdateFault(Fault):
    def __init__(self, optimizer: Optimizer, element: int, bit: int, schedule: Schedule) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._kind = kind = type(optimizer)
        step: Any = kind.step
        # the hooks are the outermost layer of `step`; the fault belongs under them
        kernel: Any = step.__wrapped__ if getattr(step, "hooked", False) else step

        @functools.wraps(kernel)
        def faulty(replica: Optimizer, *args: Any, **kwargs: Any) -> Any:
            loss = kernel(replica, *args, **kwargs)
            if schedule.due():
                self._fired += 1
                _flip_first(replica, element, bit)
            return loss

        faulty_step: Any = Optimizer.profile_hook_step(faulty)
        faulty_step.hooked = True
        # name and module stay: they tell whether the update is elementwise
        body = {"step": faulty_step, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
        optimizer.__class__ = type(kind.__name__, (kind,), body)
        self._shadow = vars(optimizer).get("step")
        if self._shadow is not None:
            # a learning-rate scheduler keeps the class's step in a wrapper on the instance
            vars(optimizer)["step"] = functools.wraps(self._shadow)(functools.partial(faulty_step, optimizer))

    def remove(self) -> None:
        if not self.active:
            return
        super().remove()
        self._optimizer.__class__ = self._kind
        if self._shadow is not None:
            vars(self._optimizer)["step"] = self._shadow


def _flip_first(optimizer: Optimizer, element: int, bit: int) -> None:
    """Flip in the first parameter that has a gradient and elements here: the first one the update writes."""
    parameters: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
    owned = (own_part(p) for p in parameters if p.grad is not None)
    first = next((part for part in owned if part.numel()), None)
    if first is not None:
        flip_bit(first, element % first.numel(), bit % bit_width(first))
