"""One quantity of one rank over time: how far it has moved from its own baseline, and since when.

Values are logarithms of a ratio to the other ranks at the same step, so a change of the whole job cancels and 0.05 is
about 5%. The baseline is what the rank's place in the job makes normal: the rank that logs, or an edge of a pipeline,
is slower than others throughout and has changed in nothing.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

SIGMA_OF_MAD = 1.4826
"""Standard deviation over median absolute deviation, for a normal distribution."""

MEDIAN_EFFICIENCY = 1.2533
"""Standard error of a median over that of a mean, for a normal distribution: sqrt(pi / 2)."""

LEAST_FRESH = 0.05
"""Noise is not taken to linger for more than about 40 values: slower changes than that are what is looked for."""


@dataclass(frozen=True, kw_only=True)
class Shift:
    """A change against the baseline over one window of observations, and the least that counts as one."""

    window: int
    value: float
    limit: float

    @property
    def exceeded(self) -> bool:
        return self.value > self.limit

    @property
    def gone(self) -> bool:
        """Whether a change that was there has ended: less than half of what counts is left."""
        return self.value < self.limit / 2


class PaceSeries:
    """The baseline and the newest values.

    The first `warm_up` values are dropped and the next `baseline` make the baseline, once and for all: a baseline that
    moved along would never see a drift that is slow enough. Values after these are judged over `windows`, by their
    median, which bursts that fill less than half of it do not move beyond the noise.
    """

    def __init__(self, *, warm_up: int, baseline: int, windows: Sequence[int]) -> None:
        self._warm_up = warm_up
        self._baseline = baseline
        self._windows = tuple(sorted(windows))
        self._first: list[float] = []
        self._steps: deque[int] = deque(maxlen=self._windows[-1])
        self._values: deque[float] = deque(maxlen=self._windows[-1])
        self._changes: deque[float] = deque(maxlen=self._windows[-1] - 1)
        self._first_step = 0
        self._usual = 0.0
        self._noise = 0.0
        self._fresh = 1.0  # 1 - r: the share of the noise that is new at each value

    def add(self, step: int, value: float) -> None:
        """Take one value; the first ones make the baseline."""
        if self._warm_up > 0:
            self._warm_up -= 1
        elif len(self._first) < self._baseline:
            self._first_step = step if not self._first else self._first_step
            self._first.append(value)
            if len(self._first) == self._baseline:
                self._usual = statistics.median(self._first)
                self._learn_noise()
        else:
            if self._values:
                self._changes.append(abs(value - self._values[-1]))
            self._steps.append(step)
            self._values.append(value)

    def levels(self, *, least: float, errors: float) -> list[Shift]:
        """The median over each window that is full, as it is: against the other ranks, not against the baseline."""
        return [self._shift(window, 0.0, 1 / window, least, errors) for window in self._full()]

    def shifts(self, *, least: float, errors: float) -> list[Shift]:
        """The change over each window that is full. It counts above `least`, and above `errors` standard errors."""
        spread = 1 / self._baseline
        return [self._shift(window, self._usual, 1 / window + spread, least, errors) for window in self._full()]

    def onset(self, middle: float) -> int:
        """The step at which the newest values most likely rose above `middle`: where the newest run of values begins
        that mostly lie above it. The first step of all, if the baseline lies above it."""
        best, best_step, total = 0, self._steps[-1], 0
        for step, value in zip(reversed(self._steps), reversed(self._values), strict=True):
            total += 1 if value > middle else -1
            if total >= best:
                best, best_step = total, step
        return self._first_step if self._usual > middle else best_step

    @property
    def usual(self) -> float:
        """The baseline, once it has been taken."""
        return self._usual

    def _learn_noise(self) -> None:
        """Noise that lingers averages out more slowly than noise that is new each time. For noise of which a share r
        carries over to the next value, neighbours differ by a variance of 2 (1 - r) of its own, and the variance of a
        mean is (1 + r) / (1 - r) times what it would be without."""
        self._noise = SIGMA_OF_MAD * statistics.median(abs(one - self._usual) for one in self._first)
        changes = [abs(after - before) for before, after in itertools.pairwise(self._first)]
        if self._noise > 0:
            self._fresh = min(max((_sigma_of_changes(changes) / self._noise) ** 2, LEAST_FRESH), 1.0)

    def _full(self) -> list[int]:
        return [window for window in self._windows if len(self._values) >= window]

    def _shift(self, window: int, against: float, variance: float, least: float, errors: float) -> Shift:
        values = list(self._values)[-window:]
        # Noise now is taken from neighbouring values, so that a change of level within the window does not count.
        changes = list(self._changes)[1 - window :]
        sigma = max(self._noise, _sigma_of_changes(changes) / math.sqrt(self._fresh))
        inertia = (2 - self._fresh) / self._fresh
        limit = max(least, errors * MEDIAN_EFFICIENCY * sigma * math.sqrt(variance * inertia))
        return Shift(window=window, value=statistics.median(values) - against, limit=limit)


def _sigma_of_changes(changes: Sequence[float]) -> float:
    """The standard deviation of values without memory whose neighbours differ so much."""
    return SIGMA_OF_MAD * statistics.median(changes) / math.sqrt(2)
