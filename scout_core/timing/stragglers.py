"""Replay stragglers: which peer is slow at work that all of them did alike.

A peer is reported when it passes four filters, each against another kind of noise:

1. against the peers: slower than the median of the others by a ratio AND by milliseconds, as a strict minority;
2. against itself: also slower than it was itself while clean, so that a peer is not blamed for its usual pace;
3. confirmation: in the first round and again in every confirmation round, so that one hiccup is no fault;
4. persistence: in this check and in most checks before it, so that a burst that moves on is no fault.

Nothing here reads a clock or communicates. Times are gathered from all peers, so every peer that judges the same
times in the same order holds the same state and reaches the same verdict.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

from scout_core.config import ReplayHarnessConfig
from scout_core.timing.straggler_history import DEFAULT_MAX_SAMPLES, RecentRows, StragglerHistory
from scout_core.timing.times import Times, medians_of_others, usable_times

StragglerReason = Literal[
    "reported", "not_persistent", "not_confirmed", "no_majority", "no_history", "too_few_times", "clean"
]


@dataclass(frozen=True, kw_only=True)
class StragglerThresholds:
    """When a replay time counts as slow, and how often it must be so.

    relative: a slow time is more than this multiple of its baseline (> 1).
    absolute_ms: and more than this many milliseconds above it (>= 0).
    confirmations: rounds after the first in which the peer must be slow again (>= 0).
    window: checks of one recipe that are remembered (>= 1). Own history needs 8 clean checks: a smaller window
        turns it off.
    persistence: checks within the window in which the peer must have been confirmed slow, this one included
        (1 .. window). Choose it larger than the number of checks that a passing disturbance lasts.

    Raises ValueError for anything outside these ranges.
    """

    relative: float = 1.3
    absolute_ms: float = 2.0
    confirmations: int = 2
    window: int = 32
    persistence: int = 2

    def __post_init__(self) -> None:
        if not (math.isfinite(self.relative) and self.relative > 1):
            raise ValueError(f"relative must be finite and above 1, not {self.relative}")
        if not (math.isfinite(self.absolute_ms) and self.absolute_ms >= 0):
            raise ValueError(f"absolute_ms must be finite and at least 0, not {self.absolute_ms}")
        if self.confirmations < 0:
            raise ValueError(f"confirmations must be at least 0, not {self.confirmations}")
        if self.window < 1:
            raise ValueError(f"window must be at least 1 check, not {self.window}")
        if not 1 <= self.persistence <= self.window:
            raise ValueError(f"persistence must be 1 to window ({self.window}), not {self.persistence}")

    @classmethod
    def of(cls, config: ReplayHarnessConfig) -> StragglerThresholds:
        """The configured ones."""
        return cls(
            relative=config.straggler_relative,
            absolute_ms=config.straggler_absolute_ms,
            confirmations=config.straggler_confirmations,
            window=config.straggler_window,
            persistence=config.straggler_persistence,
        )

    def exceeded(self, time_ms: float, baseline_ms: float) -> bool:
        """Whether a time exceeds both thresholds against a baseline."""
        return time_ms > self.relative * baseline_ms and time_ms - baseline_ms > self.absolute_ms

    def half_exceeded(self, time_ms: float, baseline_ms: float) -> bool:
        """Whether a time exceeds half of both excesses: by default 1.15 times the baseline and 1 ms above it.

        The second opinion from a peer's own history. At full height it would multiply with the comparison between
        peers: a peer that was 10% slow while clean would have to become 43% slow to be named.
        """
        relative = 1 + (self.relative - 1) / 2
        return time_ms > relative * baseline_ms and time_ms - baseline_ms > self.absolute_ms / 2


@dataclass(frozen=True, kw_only=True)
class StragglerVerdict:
    """What one check of one recipe says about its peers. All tuples are in peer-local order.

    bitmap: peers reported as stragglers: confirmed in this check, and persistent.
    candidate_bitmap: peers that were slow in the first round.
    confirmed_bitmap: those that were slow in every confirmation round too.
    ratio: each peer's time over its baseline, the smallest of the rounds: at least so slow was it throughout.
        None where no round allows a judgement.
    baseline_ms: what the first-round time was compared with: the median of the other peers or, when only two peers
        have a time, the median of the peer's own clean history. None where there is neither.
    reason: `reported`; `not_persistent` and `not_confirmed`: the filter at which the last candidate fell;
        `no_majority`: so many peers are slower than the rest that none can be blamed; `no_history`: only two peers
        have a time and cannot be told apart yet; `too_few_times`: fewer than two have one; `clean`: none is slow.
    """

    bitmap: tuple[bool, ...]
    candidate_bitmap: tuple[bool, ...]
    confirmed_bitmap: tuple[bool, ...]
    ratio: tuple[float | None, ...]
    baseline_ms: tuple[float | None, ...]
    reason: StragglerReason


def candidates(times_ms: Times, thresholds: StragglerThresholds, history: Times | None = None) -> tuple[bool, ...]:
    """The peers that are slow in one round.

    `times_ms` has one time per peer. None, negative and non-finite times are not judged and judge nobody.
    `history` has the median of each peer's own clean times, None where there are too few (see
    `StragglerHistory.baselines_ms`).

    With three or more times, a candidate exceeds both thresholds against the median of the *other* peers and, where
    it has a history, half of both thresholds against that. Without a history the peers alone decide, so a peer that
    is slow from the first check on is found. If half of the peers or more stand out, nobody is a candidate.

    With two times neither side has a majority. A peer is a candidate only if it exceeds both thresholds against its
    own history while the other does not even exceed half of them against its own; so both need one.

    Raises ValueError when `history` has another length than `times_ms`.
    """
    times = usable_times(times_ms)
    own = usable_times(history) if history is not None else [None] * len(times)
    if len(own) != len(times):
        raise ValueError(f"history has {len(own)} peers but times_ms has {len(times)}")
    if _present(times) == 2:
        return _slow_of_two(times, own, thresholds)
    standing_out = _slow_against_peers(times, thresholds)
    if 2 * sum(standing_out) >= _present(times):
        return (False,) * len(times)
    return tuple(
        slow and time is not None and (usual is None or thresholds.half_exceeded(time, usual))
        for slow, time, usual in zip(standing_out, times, own, strict=True)
    )


def confirm(rounds: Sequence[Times], thresholds: StragglerThresholds, history: Times | None = None) -> tuple[bool, ...]:
    """The peers that are candidates in the first round and in every confirmation round.

    `rounds[0]` are the times of the check itself, the others those of its repetitions. Fewer rounds than
    `1 + thresholds.confirmations` confirm nobody, which is what a check without candidates hands in.

    Raises ValueError without a round, or when rounds differ in their number of peers.
    """
    peers = _number_of_peers(rounds)
    if len(rounds) < 1 + thresholds.confirmations:
        return (False,) * peers
    bitmaps = [candidates(times_ms, thresholds, history) for times_ms in rounds]
    return tuple(all(bitmap[peer] for bitmap in bitmaps) for peer in range(peers))


class StragglerJudge:
    """Judges the checks of one peer group, one after the other, and remembers what the next judgement needs.

    Every peer holds a judge of its own and calls it with the same gathered times in the same order. First ask
    `candidates` about the check's own times; if it names anybody, run the confirmation rounds; then hand all rounds
    to `judge`, also when nobody was named, since clean checks make the history. A `recipe` is any key under which
    times are comparable: layers of one shape may share one, and are then judged the sooner.

    Between two peers, where own history is all there is to tell them apart, a check in which one is slow is not
    remembered at all: the baseline stays as it was until the slowness ends.
    """

    def __init__(
        self, thresholds: StragglerThresholds | None = None, *, max_samples: int = DEFAULT_MAX_SAMPLES
    ) -> None:
        self.thresholds = thresholds or StragglerThresholds()
        self._history = StragglerHistory(self.thresholds.window, max_samples)
        self._confirmed: RecentRows[frozenset[int]] = RecentRows(self.thresholds.window, max_samples)

    def candidates(self, recipe: Hashable, times_ms: Times) -> tuple[bool, ...]:
        """The peers that need confirmation rounds. Remembers nothing."""
        return candidates(times_ms, self.thresholds, self._baselines_ms(recipe, [times_ms]))

    def judge(self, recipe: Hashable, rounds: Sequence[Times]) -> StragglerVerdict:
        """Judge one check, given the times of its first round and of its confirmation rounds, and remember it.

        Raises ValueError without a round, or when rounds differ in their number of peers.
        """
        peers = _number_of_peers(rounds)
        own = self._baselines_ms(recipe, rounds)
        first = usable_times(rounds[0])
        candidate = candidates(first, self.thresholds, own)
        confirmed = confirm(rounds, self.thresholds, own)
        standing_out = _slow_against_peers(first, self.thresholds) if _present(first) > 2 else candidate

        if _present(first) > 2 or not any(candidate):
            self._history.observe(recipe, first, standing_out)
        self._confirmed.append(recipe, peers, frozenset(peer for peer in range(peers) if confirmed[peer]))
        recent = self._confirmed.rows(recipe, peers)
        reported = tuple(confirmed[peer] and _persists(recent, peer, self.thresholds) for peer in range(peers))

        baselines = [_references(usable_times(times), own) for times in rounds]
        return StragglerVerdict(
            bitmap=reported,
            candidate_bitmap=candidate,
            confirmed_bitmap=confirmed,
            ratio=_smallest_ratios([usable_times(times) for times in rounds], baselines),
            baseline_ms=tuple(baselines[0]),
            reason=_reason(first, own, standing_out, candidate, confirmed, reported),
        )

    def _baselines_ms(self, recipe: Hashable, rounds: Sequence[Times]) -> tuple[float | None, ...]:
        """Own baselines if a judgement of these rounds looks at them; in most checks none does."""
        for times_ms in rounds:
            times = usable_times(times_ms)
            if _present(times) == 2 or any(_slow_against_peers(times, self.thresholds)):
                return self._history.baselines_ms(recipe, len(times))
        return (None,) * len(rounds[0])


def _persists(recent: Sequence[frozenset[int]], peer: int, thresholds: StragglerThresholds) -> bool:
    """Whether `peer` was slow often and densely enough, going back from the newest check.

    Some stretch of checks that ends now must hold `persistence` checks in which the peer was confirmed, and these
    must be most of the stretch. The stretch ends where another peer was slow and this one was not: slowness that
    moves between peers belongs to none of them.
    """
    slow_checks = 0
    for length, slow_peers in enumerate(reversed(recent), start=1):
        if peer in slow_peers:
            slow_checks += 1
            if slow_checks >= thresholds.persistence and 2 * slow_checks > length:
                return True
        elif slow_peers:
            return False
    return False


def _slow_against_peers(times: Times, thresholds: StragglerThresholds) -> tuple[bool, ...]:
    return tuple(
        time is not None and others is not None and thresholds.exceeded(time, others)
        for time, others in zip(times, medians_of_others(times), strict=True)
    )


def _slow_of_two(times: Times, own: Times, thresholds: StragglerThresholds) -> tuple[bool, ...]:
    slow = [False] * len(times)
    one, other = (peer for peer, time in enumerate(times) if time is not None)
    for peer, witness in ((one, other), (other, one)):
        time, usual, witness_time, witness_usual = times[peer], own[peer], times[witness], own[witness]
        if time is None or usual is None or witness_time is None or witness_usual is None:
            continue
        innocent_witness = not thresholds.half_exceeded(witness_time, witness_usual)
        slow[peer] = innocent_witness and thresholds.exceeded(time, usual)
    return tuple(slow)


def _references(times: Times, own: Times) -> list[float | None]:
    if _present(times) == 2:
        return [None if time is None else usual for time, usual in zip(times, own, strict=True)]
    return medians_of_others(times)


def _smallest_ratios(rounds: Sequence[Times], baselines: Sequence[Times]) -> tuple[float | None, ...]:
    ratios: list[float | None] = [None] * len(rounds[0])
    for times, references in zip(rounds, baselines, strict=True):
        for peer, (time, reference) in enumerate(zip(times, references, strict=True)):
            if time is not None and reference is not None and reference > 0:
                known = ratios[peer]
                ratios[peer] = time / reference if known is None else min(known, time / reference)
    return tuple(ratios)


def _reason(
    first: Times,
    own: Times,
    standing_out: Sequence[bool],
    candidate: Sequence[bool],
    confirmed: Sequence[bool],
    reported: Sequence[bool],
) -> StragglerReason:
    if any(reported):
        return "reported"
    if any(confirmed):
        return "not_persistent"
    if any(candidate):
        return "not_confirmed"
    if _present(first) < 2:
        return "too_few_times"
    if _present(first) == 2:
        known = all(usual is not None for time, usual in zip(first, own, strict=True) if time is not None)
        return "clean" if known else "no_history"
    return "no_majority" if 2 * sum(standing_out) >= _present(first) else "clean"


def _present(times: Times) -> int:
    return sum(time is not None for time in times)


def _number_of_peers(rounds: Sequence[Times]) -> int:
    if not rounds:
        raise ValueError("a judgement needs at least the times of the first round")
    if len({len(times) for times in rounds}) > 1:
        raise ValueError(f"all rounds need the same peers, but have {[len(times) for times in rounds]}")
    return len(rounds[0])
