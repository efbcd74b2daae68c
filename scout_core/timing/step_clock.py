"""What each training step takes a rank itself: its time from boundary to boundary, without waiting for others.

A step that is over has a beginning, an end, and spans in between that were no work of its own: collectives, loaders,
checkpoints. On a GPU every mark is an event on the current stream, so a span counts for as long as the device stood
still; nothing is waited for before a check, and then only for steps that ended two steps earlier.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from scout_core.threads import TrainingThread

MOST_SPANS = 64
"""Spans of a step up to which every step is timed on a GPU, where each takes two events; with more, one step in two,
four, ... is."""
MOST_OBSERVATIONS = 64
"""Observations that one check hands over; with a longer interval, each is the mean of several steps."""

_CODES = (1 << 16) - 2
_SCALE = _CODES / math.log1p(1 << 36)
"""16 bits for 0 to 2^36, in steps of 0.04%: a day in microseconds, or 69 thousand million tokens."""


def code_of(value: float) -> int:
    """1 to 2^16 - 1 for a value of 0 to 2^36, within 0.04%; 0 is left for what is unknown."""
    return 1 + min(round(math.log1p(max(value, 0.0)) * _SCALE), _CODES)


def value_of(code: int) -> float:
    """The value that `code_of` gave the code of."""
    return math.expm1((code - 1) / _SCALE)


Mark = Any
"""A moment: nanoseconds, or a CUDA event that will know them."""


class GroupCall(NamedTuple):
    """A collective that this rank waited in: global ranks of its group, what all of them must give alike (a 64-bit
    fingerprint and the operator's name), bytes put in, and whether it ran beside other work, so that the wait is only
    what of it was left."""

    ranks: tuple[int, ...]
    fingerprint: int
    operator: str
    size: int
    overlapped: bool = False


@dataclass(frozen=True, kw_only=True)
class Pace:
    """One observation of one rank, in milliseconds: its own time, and of it waiting for data; tokens; and the time it
    was ready to run without a core, which its own time leaves out. None is unknown."""

    own_ms: float | None = None
    loader_ms: float | None = None
    tokens: float | None = None
    core_wait_ms: float | None = None

    def encode(self) -> int:
        """One signed 64-bit word."""
        parts = (self.own_ms, self.loader_ms, self.tokens, self.core_wait_ms)
        scales = (1e3, 1e3, 1.0, 1e3)
        word = 0
        for value, scale in zip(parts, scales, strict=True):
            word = word << 16 | (0 if value is None else code_of(value * scale))
        return word - (1 << 64) if word >= 1 << 63 else word

    @classmethod
    def decode(cls, word: int) -> Pace:
        """The observation that `encode` made the word of, within 0.04%."""
        codes = [word >> shift & 0xFFFF for shift in (48, 32, 16, 0)]
        own, loader, tokens, wait = (None if code == 0 else value_of(code) for code in codes)
        return cls(
            own_ms=None if own is None else own / 1e3,
            loader_ms=None if loader is None else loader / 1e3,
            tokens=tokens,
            core_wait_ms=None if wait is None else wait / 1e3,
        )


def mean_pace(paces: Sequence[Pace]) -> Pace:
    """Each value's mean over the observations that know it."""
    columns = zip(*((p.own_ms, p.loader_ms, p.tokens, p.core_wait_ms) for p in paces), strict=True)
    known = [[value for value in column if value is not None] for column in columns]
    own, loader, tokens, wait = (statistics.fmean(column) if column else None for column in known)
    return Pace(own_ms=own, loader_ms=loader, tokens=tokens, core_wait_ms=wait)


class Clock:
    """What is told of a step's spans. This one keeps nothing: for jobs whose live steps are not timed."""

    def mark(self) -> Mark:
        """This moment; None while no step is timed."""
        return None

    def waited(self, since: Mark, call: GroupCall | None = None) -> None:
        """From `since` until now this rank waited in a collective, in `call` where its group is known."""

    def loaded(self, since: Mark) -> None:
        """From `since` until now this rank waited for its data."""

    def count(self, tokens: int) -> None:
        """The step under way works on so many tokens more."""

    def spoil(self) -> None:
        """The step under way has something in it that other steps have not, an evaluation or a checkpoint."""

    def begin(self) -> None:
        """A step begins: after the boundary and whatever SCOUT did there."""

    def end(self, number: int) -> None:
        """Step `number` is over: at its boundary, before anything else."""


NO_CLOCK = Clock()


@dataclass(kw_only=True)
class _Step:
    """One step under way, or over and not read yet. Spans are pairs of marks, on `stream` where there is one."""

    begun: Mark
    delay_ns: int
    ran_ns: int
    stream: Any = None
    number: int = 0
    ended: Mark = None
    tokens: int = 0
    others: list[tuple[Mark, Mark]] = field(default_factory=list)
    loader: list[tuple[Mark, Mark]] = field(default_factory=list)
    calls: dict[tuple[int, ...], tuple[GroupCall, Mark, Mark]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Read:
    """What is kept of a step: own time, loader, tokens and wait for a core; its largest collectives and their ms."""

    number: int
    values: tuple[float, float, float, float]
    calls: list[tuple[GroupCall, float]]


class StepClock(Clock):
    """Times the steps of one rank. Local; costs a mark at each end of a span and of a step.

    `interval` is the number of steps between checks, `core_wait_ns` reads how long this thread has waited for a core.
    Spans count on the thread that makes the clock and on autograd's, and on a GPU on the stream that the step began on:
    what runs on others goes on beside the step. `kind` differs where rows of words differ in length.
    """

    def __init__(self, device: torch.device, interval: int, core_wait_ns: Callable[[], int]) -> None:
        self._cuda = device.type == "cuda"
        self.kind = 2 if self._cuda else 1
        self._core_wait_ns = core_wait_ns
        self._training = TrainingThread()
        self._behind = 2 if self._cuda else 0
        self.steps_each = max(math.ceil(interval / MOST_OBSERVATIONS), 1)
        self.observations = max(math.ceil((interval or 1) / self.steps_each), 1) + math.ceil(
            self._behind / self.steps_each
        )
        self._over: deque[_Step] = deque()
        self._read: deque[_Read] = deque(maxlen=self.observations * self.steps_each + self._behind)
        self._now: _Step | None = None
        self._stride = 1
        self._last = 0

    def mark(self) -> Mark:
        return self._moment() if self._counts() else None

    def _counts(self) -> bool:
        if self._now is None or not self._training.here():
            return False
        return not self._cuda or torch.cuda.current_stream() == self._now.stream

    def _moment(self) -> Mark:
        # of the host, or of the current stream
        if not self._cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def begin(self) -> None:
        if (self._last + 1) % self._stride == 0:
            stream = torch.cuda.current_stream() if self._cuda else None
            delay, ran = self._core_wait_ns(), time.thread_time_ns()
            self._now = _Step(begun=self._moment(), delay_ns=delay, ran_ns=ran, stream=stream)

    def end(self, number: int) -> None:
        step, self._now, self._last = self._now, None, number
        if step is None:
            return
        step.number, step.ended = number, self._moment()
        step.delay_ns = self._core_wait_ns() - step.delay_ns
        step.ran_ns = time.thread_time_ns() - step.ran_ns
        self._over.append(step)
        if self._cuda:
            spans = len(step.others) + len(step.loader)
            self._stride = 1 << max(math.ceil(spans / MOST_SPANS) - 1, 0).bit_length()
        while len(self._over) > self._behind and (not self._cuda or self._over[0].ended.query()):
            self._take(self._over.popleft())

    def waited(self, since: Mark, call: GroupCall | None = None) -> None:
        if since is None or self._now is None or not self._counts():
            return
        until = self._moment()
        self._now.others.append((since, until))
        if call is not None:
            largest = self._now.calls.get(call.ranks)
            if largest is None or call.size >= largest[0].size:  # of equal ones the last: only it reduces gradients
                self._now.calls[call.ranks] = call, since, until

    def loaded(self, since: Mark) -> None:
        if since is not None and self._now is not None and self._counts():
            self._now.loader.append((since, self._moment()))

    def count(self, tokens: int) -> None:
        if self._now is not None:
            self._now.tokens += tokens

    def spoil(self) -> None:
        self._now = None

    def newest(self, step: int) -> int:
        """The newest observation that a check at `step` hands over; i ends with step `(i + 1) * steps_each`."""
        return (step - self._behind) // self.steps_each - 1

    def collectives(self, step: int) -> list[tuple[GroupCall, float]]:
        """Of the newest step that a check at `step` may look at: each group's largest collective, and its ms."""
        self._read_until(step)
        newest = step - self._behind - (step - self._behind) % self._stride
        return next((one.calls for one in reversed(self._read) if one.number == newest), [])

    def words(self, step: int) -> list[int]:
        """The last `observations` ones, oldest first, one word each."""
        self._read_until(step)
        newest = self.newest(step)
        by_number: dict[int, list[_Read]] = {}
        for one in self._read:
            by_number.setdefault((one.number - 1) // self.steps_each, []).append(one)
        wanted = range(newest - self.observations + 1, newest + 1)
        return [_mean(by_number.get(index, [])).encode() for index in wanted]

    def _read_until(self, step: int) -> None:
        while self._over and self._over[0].number <= step - self._behind:
            self._take(self._over.popleft())

    def _take(self, step: _Step) -> None:
        if self._cuda:
            step.ended.synchronize()  # two steps back: it has ended, unless the host ran far ahead
        own, loader = self._between(step.begun, step.ended) - self._sum(step.others), self._sum(step.loader)
        # what the thread waited for a core on waking in a collective kept it from no work of its own
        core_wait = 0.0 if self._cuda else min(step.delay_ns, max(own * 1e6 - step.ran_ns, 0.0)) / 1e6
        calls = [(call, self._between(since, until)) for call, since, until in step.calls.values()]
        values = max(own - core_wait, 0.0), loader, float(step.tokens), core_wait
        self._read.append(_Read(number=step.number, values=values, calls=calls))

    def _sum(self, spans: Sequence[tuple[Mark, Mark]]) -> float:
        return sum(self._between(*span) for span in spans)

    def _between(self, begun: Mark, ended: Mark) -> float:
        """Milliseconds."""
        return float(begun.elapsed_time(ended)) if self._cuda else (ended - begun) / 1e6


def _mean(steps: Sequence[_Read]) -> Pace:
    if not steps:
        return Pace()
    own, loader, tokens, wait = (
        sum(column) / len(steps) for column in zip(*(one.values for one in steps), strict=True)
    )
    return Pace(own_ms=own, loader_ms=loader, tokens=tokens or None, core_wait_ms=wait)
