"""What is remembered of earlier checks: every peer's clean times at every recipe, in bounded memory. Pure."""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from scout_core.timing.times import Times, usable_times

Row = TypeVar("Row")

CLEAN_SAMPLES = 8
"""Clean times a peer must have before its own history counts: fewer make no stable median."""

DEFAULT_MAX_SAMPLES = 1 << 20
"""Bound on remembered times: 8 MiB, enough for 4096 recipes of 8 peers in a window of 32."""


class StragglerHistory:
    """Recent clean times of every peer at every recipe.

    One slot per check: a check in which a peer was flagged or had no usable time leaves its slot blank. Blank slots
    push old times out of the window as others do. So a peer that stays slow loses its history in the end, and is
    then judged by its peers alone: a drift slow enough to take its own baseline along cannot hide for ever.

    At most `max_samples` times are kept; beyond that the recipe that was observed longest ago is forgotten.

    Raises ValueError when `window` or `max_samples` is below 1.
    """

    def __init__(self, window: int = 32, max_samples: int = DEFAULT_MAX_SAMPLES) -> None:
        self._recent: RecentRows[array[float]] = RecentRows(window, max_samples)

    def __len__(self) -> int:
        """The number of recipes remembered."""
        return len(self._recent)

    def observe(self, recipe: Hashable, times_ms: Times, flagged: Sequence[bool]) -> None:
        """Remember one check's times, in peer-local order; those of flagged peers are not clean and stay out.

        Raises ValueError when the two differ in length.
        """
        if len(flagged) != len(times_ms):
            raise ValueError(f"flagged has {len(flagged)} peers but times_ms has {len(times_ms)}")
        slots = [
            math.nan if time is None or bad else time for time, bad in zip(usable_times(times_ms), flagged, strict=True)
        ]
        self._recent.append(recipe, len(slots), array("d", slots))

    def baselines_ms(self, recipe: Hashable, peers: int) -> tuple[float | None, ...]:
        """The median of each peer's clean times, None where there are fewer than 8."""
        rows = self._recent.rows(recipe, peers)
        if len(rows) < CLEAN_SAMPLES:
            return (None,) * peers
        columns = (sorted(time for time in column if not math.isnan(time)) for column in zip(*rows, strict=True))
        return tuple(_median_of_sorted(clean) if len(clean) >= CLEAN_SAMPLES else None for clean in columns)


class RecentRows(Generic[Row]):
    """The last `window` rows of each recipe, for as many of the recipes last used as `max_samples` allows."""

    def __init__(self, window: int, max_samples: int) -> None:
        if window < 1 or max_samples < 1:
            raise ValueError(f"window and max_samples must be at least 1, not {window} and {max_samples}")
        self._window = window
        self._max_samples = max_samples
        self._rows: OrderedDict[tuple[Hashable, int], deque[Row]] = OrderedDict()
        self._reserved = 0

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, recipe: Hashable, peers: int) -> Sequence[Row]:
        return self._rows.get((recipe, peers), ())

    def append(self, recipe: Hashable, peers: int, row: Row) -> None:
        # The number of peers is part of the key: after a resize, position r is another rank.
        key = (recipe, peers)
        if key not in self._rows:
            self._rows[key] = deque(maxlen=self._window)
            self._reserved += peers * self._window
        self._rows[key].append(row)
        self._rows.move_to_end(key)
        while self._reserved > self._max_samples and len(self._rows) > 1:
            (_, evicted_peers), _ = self._rows.popitem(last=False)
            self._reserved -= evicted_peers * self._window


def _median_of_sorted(values: Sequence[float]) -> float:
    return (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2
