"""Times of all peers in one round or step: which of them are times, and what each is compared with. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

Times = Sequence[float | None]
"""Milliseconds by peer position; None where unknown."""


def usable_times(times_ms: Times) -> list[float | None]:
    """The times, with None for those that are no times: negative and non-finite ones."""
    return [time if time is not None and math.isfinite(time) and time >= 0 else None for time in times_ms]


def medians_of_others(times: Times) -> list[float | None]:
    """For each peer with a time, the median of the other peers' times; sorts once for all of them."""
    ordered = sorted(time for time in times if time is not None)
    others = len(ordered) - 1

    def median_without(position: int) -> float:
        low, high = ((middle + (middle >= position)) for middle in ((others - 1) // 2, others // 2))
        return (ordered[low] + ordered[high]) / 2

    return [None if time is None or others < 1 else median_without(bisect_left(ordered, time)) for time in times]
