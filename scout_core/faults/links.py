"""A slow link: collectives that take longer for every member of a group."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from scout_core.faults.fault import Fault

_PLACES = {
    # where `group` stands among the positional arguments
    "all_reduce": 2,
    "broadcast": 2,
    "all_gather_into_tensor": 2,
    "reduce_scatter_tensor": 3,
    "all_to_all_single": 4,
}


class _SlowLinks(Fault):
    def __init__(self, affects: Callable[[tuple[int, ...]], bool], seconds: float) -> None:
        super().__init__()
        self._undo: list[tuple[Any, str, Any, Any]] = []
        for name, place in _PLACES.items():
            original = getattr(c10d, name)
            slow = self._slow(original, place, affects, seconds)
            for module in (c10d, dist):
                self._undo.append((module, name, slow, vars(module)[name]))
                setattr(module, name, slow)

    def _slow(
        self, original: Callable[..., Any], place: int, affects: Callable[[tuple[int, ...]], bool], seconds: float
    ) -> Callable[..., Any]:
        @functools.wraps(original)
        def slow(*args: Any, **kwargs: Any) -> Any:
            group = args[place] if len(args) > place else kwargs.get("group")
            result = original(*args, **kwargs)
            if self.active and affects(tuple(dist.get_process_group_ranks(group))):
                self._fired += 1
                time.sleep(seconds)
            return result

        return slow

    def remove(self) -> None:
        super().remove()
        for module, name, slow, original in self._undo:
            if vars(module)[name] is slow:
                setattr(module, name, original)
        self._undo.clear()


def slow_collectives(affects: Callable[[tuple[int, ...]], bool], seconds: float) -> Fault:
    """Make public collectives take `seconds` longer in the groups for whose global ranks `affects` says so.

    As a slow link does. Call it on every rank and before `attach()`: all members of a group are slow alike, whoever
    came last. The host sleeps after the call, so a module that SCOUT replays with such a call inside looks slow itself.
    What C++ issues, as the reducer of `DistributedDataParallel` does, is not slowed.
    """
    if not seconds > 0:
        raise ValueError(f"seconds={seconds} must be above 0")
    return _SlowLinks(affects, seconds)
