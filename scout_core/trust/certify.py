"""From one rank's check to the job's outcome: every rank says its own, all judge the same rows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scout_core.consensus.c3 import C3Status
from scout_core.replay.result import ReplayResult
from scout_core.trust.states import Outcome, worst

_CODES = (Outcome.CLEAN, Outcome.STRAGGLER, Outcome.INCONCLUSIVE, Outcome.SDC)


def outcome_of(result: ReplayResult | None) -> Outcome:
    """What a check means for trust. A check that broke off (None), or saw a NaN, shows nothing that may be trusted.

    Collectives that paired wrongly leave a state as wrong as a broken device does, and often the same one on all peers.
    """
    if result is None:
        return Outcome.INCONCLUSIVE
    if result.status is C3Status.ATTRIBUTED or any(result.sdc_bitmap) or result.sdc_sources or result.desynchronized:
        return Outcome.SDC
    if not result.trustworthy:
        return Outcome.INCONCLUSIVE
    return Outcome.STRAGGLER if any(result.straggler_bitmap) else Outcome.CLEAN


def nonfinite_alike(result: ReplayResult) -> bool:
    """Whether at least half of the peers see a NaN, or nobody can be told to have had it first."""
    first = len(result.nonfinite_ranks)
    return result.nonfinite and (first == 0 or first * 2 >= len(result.peer_ranks))


@dataclass(frozen=True, kw_only=True)
class Vote:
    """One rank's word at a boundary. `busy`: its last capture is not complete yet; `cycle`: its catalog cycle is.

    `broken` says that its check broke off, so that no further collective may count on this rank. `kept` is the newest
    step whose copies, own and held, it has put on disk, -1 for none; `trouble`: some of that went wrong.
    """

    step: int
    outcome: Outcome
    cycle: bool = True
    busy: bool = False
    broken: bool = False
    nonfinite_alike: bool = False
    trouble: bool = False
    kept: int = -1

    def encode(self) -> list[int]:
        """As integers for one all-gather."""
        flags = (self.cycle, self.busy, self.broken, self.nonfinite_alike, self.trouble)
        return [self.step, _CODES.index(self.outcome), sum(1 << i for i, flag in enumerate(flags) if flag), self.kept]

    @classmethod
    def decode(cls, row: Sequence[int]) -> Vote:
        """From `encode`."""
        flags = [bool(row[2] >> i & 1) for i in range(5)]
        return cls(
            step=row[0],
            outcome=_CODES[row[1]],
            cycle=flags[0],
            busy=flags[1],
            broken=flags[2],
            nonfinite_alike=flags[3],
            trouble=flags[4],
            kept=row[3],
        )


@dataclass(frozen=True, kw_only=True)
class JobVerdict:
    """What all ranks came to. `kept` is the step that every rank has on disk, None if they differ or have none."""

    outcome: Outcome
    cycle: bool
    may_capture: bool
    broken_ranks: tuple[int, ...]
    nonfinite_alike: bool
    trouble: bool = False
    kept: int | None = None


def agree(votes: Sequence[Vote]) -> JobVerdict:
    """The job's verdict: the worst group's; ranks at different steps agree on nothing."""
    outcome = worst([vote.outcome for vote in votes])
    if len({vote.step for vote in votes}) != 1:
        outcome = worst([outcome, Outcome.INCONCLUSIVE])
    broken = tuple(rank for rank, vote in enumerate(votes) if vote.broken)
    return JobVerdict(
        outcome=outcome,
        cycle=all(vote.cycle for vote in votes),
        may_capture=outcome.accepts and not any(vote.busy for vote in votes) and not broken,
        broken_ranks=broken,
        nonfinite_alike=all(vote.nonfinite_alike for vote in votes),
        trouble=any(vote.trouble for vote in votes),
        kept=votes[0].kept if votes[0].kept >= 0 and len({vote.kept for vote in votes}) == 1 else None,
    )
