"""Python's collector of garbage on one rank: pauses so many and so long that all peers wait for them again and again.

The interpreter stands still meanwhile, whichever thread's allocation began it, and the device is fine. A rank sees this
by itself and needs nobody to compare with; one long pause is nothing to report.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from typing import Any

LONG_MS = 50.0
"""Collections shorter than this are part of any Python program's life."""
_STEPS = 100
_PAUSED = 3
_SHARE = 0.05
"""Of the last `_STEPS` steps' time, in at least `_PAUSED` steps: a rank as slow as that is worth a look."""


class CollectorWatch:
    """Counts long collections by step. Local; costs a look at the clock for each collection, of any length."""

    def __init__(self) -> None:
        self._begun = 0.0
        self._pauses: list[float] = []
        self._steps: deque[tuple[float, list[float]]] = deque(maxlen=_STEPS)
        self._told = False
        gc.callbacks.append(self._collects)

    def close(self) -> None:
        """Count no more; may be called twice."""
        if self._collects in gc.callbacks:
            gc.callbacks.remove(self._collects)

    def end(self) -> dict[str, Any] | None:
        """At each step's end: how many pauses there were in the last steps, of how many ms in all, when that is much.

        Told once, and again only after it had passed.
        """
        paused, self._pauses = self._pauses, []
        self._steps.append((time.monotonic(), paused))
        if not paused and not self._told:
            return None  # only a step with a pause makes it much
        long = [ms for _, pauses in self._steps for ms in pauses]
        elapsed_ms = (self._steps[-1][0] - self._steps[0][0]) * 1e3
        much = sum(bool(pauses) for _, pauses in self._steps) >= _PAUSED and sum(long) > _SHARE * elapsed_ms
        told, self._told = self._told, much
        if told or not much:
            return None
        return {"cause": "gc", "pauses": len(long), "paused_ms": round(sum(long), 1), "steps": len(self._steps)}

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._begun = time.perf_counter()
            return
        paused_ms = (time.perf_counter() - self._begun) * 1e3
        if paused_ms >= LONG_MS:
            self._pauses.append(paused_ms)
