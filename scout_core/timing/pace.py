"""Stragglers in live steps: ranks whose own work takes longer than it used to, beside the others of the same step.

A replay compares equal work, but only now and then and for one layer. Live steps come all the time and of all the work,
with what that brings along: ranks differ by role, work differs by batch, and passing disturbances are many. So a rank
is compared with its own baseline beside the others, per token where tokens are known, over windows of steps; and what
is found leads to watching first, and to a proposal to exclude the rank only when it lasts or comes back.

Pure: no clock, no communication. Every rank that judges the same rows in the same order comes to the same verdicts.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scout_core.timing.pace_episodes import Episode, Episodes
from scout_core.timing.pace_series import PaceSeries, Shift
from scout_core.timing.times import Times, medians_of_others, usable_times

PaceKind = Literal["compute_straggler", "data_imbalance", "dataloader_stall"]
Decision = Literal["observe", "exclude_at_next_restart"]
JobNote = Literal["input_bound", "pauses", "slow_as_a_whole", "host_contention"]


@dataclass(frozen=True, kw_only=True)
class PaceThresholds:
    """When a change of pace counts, and what it leads to. Counts are observations, one a step if each is observed.

    relative: the least change that counts, as a share (0.03: 3%); noise raises it (see `errors`).
    absolute_ms: and the least in milliseconds.
    errors: standard errors that a change must exceed.
    warm_up, baseline: observations dropped, and then taken as what is normal.
    windows: lengths over which a change is looked for. The shortest decides how soon, and bursts of less than a third
        of it are ignored; longer ones find what noise hides from it.
    imbalance: how much more time than the others, as a share, a rank with more tokens must take to be told.
    persistent: observations after which an episode that lasts leads to a proposal to exclude.
    job_share: share of the job's time in its loaders, or in pauses of all ranks at once, that is noted.
    job_slow: change of the whole job's pace, as a share, that is noted.

    Raises ValueError for values outside their range.
    """

    relative: float = 0.03
    absolute_ms: float = 0.5
    errors: float = 5.0
    warm_up: int = 5
    baseline: int = 64
    windows: tuple[int, ...] = (20, 160)
    imbalance: float = 0.1
    persistent: int = 100
    job_share: float = 0.2
    job_slow: float = 0.2

    def __post_init__(self) -> None:
        for name in ("relative", "imbalance", "job_slow", "job_share"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")
        for name in ("absolute_ms", "errors", "warm_up"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")
        if not self.windows or min(self.windows) < 4:
            raise ValueError(f"windows must be of at least 4 observations, not {self.windows}")
        if self.baseline < 8 or self.persistent < min(self.windows):
            raise ValueError(
                f"baseline must be at least 8 observations and persistent at least the shortest window, not "
                f"{self.baseline} and {self.persistent}"
            )


@dataclass(frozen=True, kw_only=True)
class PaceFinding:
    """One rank that is slower than it should be, while it is.

    `position` is the rank's place in the rows. `onset_step` is when it began; `excess` how much more time it takes, as
    a share; `episodes` how often it has come, this time included. Only a compute straggler is ever to be excluded: more
    tokens and a slow loader are no fault of a device.
    """

    kind: PaceKind
    position: int
    onset_step: int
    excess: float
    episodes: int = 1
    decision: Decision = "observe"
    reason: str


@dataclass(frozen=True, kw_only=True)
class PaceVerdict:
    """What the newest observation says: findings that hold now, and a note on the job that blames no rank.

    `input_bound`: the job waits for its loaders; `pauses`: all ranks pause at once now and then; `slow_as_a_whole`: all
    have become slower alike.
    """

    step: int
    findings: tuple[PaceFinding, ...] = ()
    note: JobNote | None = None


class PaceJudge:
    """Judges live steps, one row of all ranks after the other, and remembers what the next judgement needs.

    Three ranks or more are compared with each other; of two, a rank is found only if it has become slower in itself
    while the other has not. A rank that is slow from the first step on is at its baseline and not found here; replays
    find it. When the number of ranks changes, everything starts anew.
    """

    def __init__(self, thresholds: PaceThresholds | None = None) -> None:
        self.thresholds = thresholds or PaceThresholds()
        self._per_token = False
        self._typical_ms = 0.0
        self._start_anew(0)

    def observe(
        self,
        step: int,
        times_ms: Times,
        *,
        tokens: Times | None = None,
        loader_ms: Times | None = None,
    ) -> PaceVerdict:
        """Judge one step.

        `times_ms[r]` is what rank r itself spent on the step, from boundary to boundary without waiting in collectives:
        a rank that waits for a slow one is not slow. `tokens[r]` is its share of the batch, `loader_ms[r]` the part of
        the time in which it waited for its data. None is an unknown value; a rank without a time is not judged at this
        step, and in a job that gives tokens nobody's work is judged at a step without them.

        Raises ValueError when rows differ in length.
        """
        total = usable_times(times_ms)
        shares = usable_times(tokens) if tokens is not None else [None] * len(total)
        loader = usable_times(loader_ms) if loader_ms is not None else [None] * len(total)
        if not len(total) == len(shares) == len(loader):
            raise ValueError(f"times, tokens and loader are of {len(total)}, {len(shares)} and {len(loader)} ranks")
        if len(total) != len(self._work):
            self._start_anew(len(total))
        self._per_token = self._per_token or tokens is not None
        work = [_work(*row, per_token=self._per_token) for row in zip(total, loader, shares, strict=True)]
        for series, row in ((self._work, work), (self._total, total), (self._tokens, shares)):
            _add_relative(series, step, row)
        for own, value in zip(self._own, work, strict=True):
            _add(own, step, value)
        self._add_job(step, total, loader, work)
        self._typical_ms = statistics.median([time for time in total if time is not None] or [0.0])
        findings = self._stragglers()
        for position in range(len(total)):
            if position not in self._episodes.open:
                findings += self._other_causes(position, loader_known=loader[position] is not None)
        return PaceVerdict(step=step, findings=tuple(findings), note=self._note())

    def _start_anew(self, ranks: int) -> None:
        self._work, self._total, self._tokens, self._own = (
            [self._series() for _ in range(ranks)] for _ in ("work", "total", "tokens", "own")
        )
        self._job = self._series()
        self._job_times: deque[tuple[float, float]] = deque(maxlen=max(self.thresholds.windows))
        self._episodes = Episodes(persistent=self.thresholds.persistent, gap=min(self.thresholds.windows))
        self._per_token = False
        self._typical_ms = 0.0

    def _series(self) -> PaceSeries:
        given = self.thresholds
        return PaceSeries(warm_up=given.warm_up, baseline=given.baseline, windows=given.windows)

    def _shifts(self, series: PaceSeries) -> list[Shift]:
        return series.shifts(least=math.log1p(self.thresholds.relative), errors=self.thresholds.errors)

    def _stragglers(self) -> list[PaceFinding]:
        shifts = {position: self._shifts(series) for position, series in enumerate(self._work)}
        onsets: dict[int, int] = {}
        for position, series in enumerate(self._work):
            worst = next((shift for shift in shifts[position] if self._counts(shift)), None)
            if worst is not None and self._in_all_time(position, worst):
                onsets[position] = series.onset(series.usual + worst.value / 2)
        if len(shifts) == 2:
            onsets = {position: step for position, step in onsets.items() if self._itself(position)}
        elif 2 * len(onsets) >= len(shifts):
            onsets = {}  # so many are slower than the rest that none can be blamed
        self._episodes.observe(shifts, onsets)
        return [self._tell(episode) for _, episode in sorted(self._episodes.open.items()) if self._matters(episode)]

    def _counts(self, shift: Shift) -> bool:
        return shift.exceeded and math.expm1(shift.value) * self._typical_ms > self.thresholds.absolute_ms

    def _in_all_time(self, position: int, worst: Shift) -> bool:
        """Whether the rank takes more time altogether. With fewer tokens than before it takes more for each, since some
        of the work is the same for any number of them."""
        total = {shift.window: shift.value for shift in self._shifts(self._total[position])}
        return not self._per_token or total.get(worst.window, 0.0) > 0

    def _itself(self, position: int) -> bool:
        """Of two ranks: whether this one has become slower in itself, and the other has not."""
        own, other = self._shifts(self._own[position]), self._shifts(self._own[1 - position])
        return any(map(self._counts, own)) and all(shift.gone for shift in other)

    def _matters(self, episode: Episode) -> bool:
        return self._episodes.lasts(episode) or episode.earlier > 0 or not self._episodes.moves(episode)

    def _tell(self, episode: Episode) -> PaceFinding:
        lasts = self._episodes.lasts(episode)
        if lasts:
            reason = f"slower for {self.thresholds.persistent} observations and more"
        elif episode.earlier:
            reason = f"slower again, for the {episode.earlier + 1}. time, with no other rank in between"
        else:
            reason = "slower than its own baseline; it may pass"
        return PaceFinding(
            kind="compute_straggler",
            position=episode.position,
            onset_step=episode.onset_step,
            excess=math.expm1(episode.excess),
            episodes=episode.earlier + 1,
            decision="exclude_at_next_restart" if lasts or episode.earlier else "observe",
            reason=reason,
        )

    def _other_causes(self, position: int, *, loader_known: bool) -> list[PaceFinding]:
        """Why a rank takes longer whose own work does not."""
        if not (loader_known or self._per_token):
            return []  # all its time is its own work
        errors = self.thresholds.errors
        least = math.log1p(self.thresholds.imbalance)
        tokens = {level.window: level.value for level in self._tokens[position].levels(least=0.0, errors=0.0)}
        work = {shift.window: shift.value for shift in self._shifts(self._work[position])}
        series = self._total[position]
        for level in series.levels(least=least, errors=errors):
            if self._counts(level) and tokens.get(level.window, 0.0) >= level.value / 2:
                more = f"{math.expm1(tokens[level.window]):.0%} more tokens than the others, and no more time for each"
                onset = series.onset(level.value / 2)
                return [_cause("data_imbalance", position, onset, level, more)]
        for shift in self._shifts(series):
            explained = max(work.get(shift.window, 0.0), tokens.get(shift.window, 0.0))
            if loader_known and self._counts(shift) and explained < shift.value / 2:
                onset, text = series.onset(series.usual + shift.value / 2), "it waits longer for its data than before"
                return [_cause("dataloader_stall", position, onset, shift, text)]
        return []

    def _add_job(self, step: int, total: Times, loader: Times, work: Times) -> None:
        times, waits, works = ([value for value in row if value is not None] for row in (total, loader, work))
        if times:
            # of two ranks the lesser wait: a job that waits is one in which each rank does
            self._job_times.append((statistics.median(times), statistics.median_low(waits) if waits else 0.0))
        if works:
            _add(self._job, step, statistics.median(works))

    def _note(self) -> JobNote | None:
        if len(self._job_times) < min(self.thresholds.windows):
            return None
        times, waits = zip(*self._job_times, strict=True)
        if sum(waits) > self.thresholds.job_share * sum(times):
            return "input_bound"
        if statistics.median(times) * len(times) < (1 - self.thresholds.job_share) * sum(times):
            return "pauses"
        slow = self._job.shifts(least=math.log1p(self.thresholds.job_slow), errors=self.thresholds.errors)
        return "slow_as_a_whole" if any(shift.exceeded for shift in slow) else None


def _cause(kind: PaceKind, position: int, onset: int, shift: Shift, reason: str) -> PaceFinding:
    return PaceFinding(kind=kind, position=position, onset_step=onset, excess=math.expm1(shift.value), reason=reason)


def _work(time: float | None, loader: float | None, share: float | None, *, per_token: bool) -> float | None:
    """A rank's own work in a step, per token if it is to be."""
    if time is None or (per_token and not share):
        return None
    work = max(time - (loader or 0.0), 0.0)
    return work / share if per_token and share else work


def _add(series: PaceSeries, step: int, value: float | None) -> None:
    if value:
        series.add(step, math.log(value))


def _add_relative(series: Sequence[PaceSeries], step: int, row: Times) -> None:
    for one, value, others in zip(series, row, medians_of_others(row), strict=True):
        if value and others:
            one.add(step, math.log(value) - math.log(others))
