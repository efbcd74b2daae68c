"""The handle every injector returns, how often a fault acts, and how it gets into a module's forward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from torch import nn


class Fault:
    """A fault that was put in. `remove()`, or leaving it as a context manager, ends it; a second `remove()` is nothing.

    What it already did to weights or
    optimizer state stays, as it would on real hardware: reload the state to get rid of it.
    """

    def __init__(self) -> None:
        self.active = True
        self._fired = 0

    @property
    def fired(self) -> int:
        """How often it acted on this rank, SCOUT's replays included."""
        return self._fired

    def remove(self) -> None:
        """End the fault on this rank."""
        self.active = False

    def __enter__(self) -> Fault:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


class Schedule:
    """Which calls a fault acts on: every `every`-th (1: each), at most `times` of them (None: without end)."""

    def __init__(self, every: int = 1, times: int | None = None) -> None:
        if every < 1:
            raise ValueError(f"every={every} must be at least 1, which is each call")
        if times is not None and times < 1:
            raise ValueError(f"times={times} must be at least 1, or None for no limit")
        self._every = every
        self._left = times
        self._calls = 0

    def due(self) -> bool:
        """Count one call; whether the fault acts on it."""
        self._calls += 1
        if self._calls % self._every or self._left == 0:
            return False
        if self._left is not None:
            self._left -= 1
        return True


Forward = Callable[..., Any]
Act = Callable[[Forward, tuple[Any, ...], Mapping[str, Any]], Any]


class ForwardFault(Fault):
    """Stands in for `forward` of one module instance: `act(forward, args, kwargs)` is called in its place when due.

    The instance is patched, not its class, so one layer of many can be faulty; replay finds the patch because it calls
    the same instance. Patches stack and may be removed in any order. Install before `torch.compile`.
    """

    def __init__(self, module: nn.Module, act: Act, schedule: Schedule) -> None:
        super().__init__()
        self._module = module
        self._replaced = vars(module).get("forward")
        forward: Forward = module.forward

        @functools.wraps(forward)
        def faulty(*args: Any, **kwargs: Any) -> Any:
            if not self.active or not schedule.due():
                return forward(*args, **kwargs)
            self._fired += 1
            return act(forward, args, kwargs)

        vars(faulty)["fault"] = self
        vars(module)["forward"] = faulty

    def remove(self) -> None:
        super().remove()
        top = vars(self._module).get("forward")
        # a patch under another one stays as a pass-through until those above it are gone
        while isinstance(owner := getattr(top, "fault", None), ForwardFault) and not owner.active:
            top = owner._replaced
            if top is None:
                del vars(self._module)["forward"]
            else:
                vars(self._module)["forward"] = top
