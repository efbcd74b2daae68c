"""Trust states of checkpoints and the one pure function that moves them. No file, clock or tensor in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeVar

LOAD_FAILURES_ALLOWED = 2
"""A checkpoint that failed this often is quarantined: the next try would fail for the same reason."""
_KEPT_OF_A_KIND = 2
_REMEMBERED = 256
Key = TypeVar("Key", int, tuple[int, int])


class TrustState(str, Enum):
    """How far a checkpoint may be trusted. Only `RECOVERY_VERIFIED` is loaded after corruption."""

    LATEST_GEMINI = "LATEST_GEMINI"
    CANDIDATE = "CANDIDATE"
    RECOVERY_VERIFIED = "RECOVERY_VERIFIED"
    REJECTED = "REJECTED"
    QUARANTINED = "QUARANTINED"


class Outcome(str, Enum):
    """What one boundary's check came to, over all comparison groups of the job."""

    CLEAN = "clean"
    STRAGGLER = "straggler"
    SDC = "sdc"
    INCONCLUSIVE = "inconclusive"

    @property
    def accepts(self) -> bool:
        """Whether the state of this boundary may be captured."""
        return self in (Outcome.CLEAN, Outcome.STRAGGLER)


_NEVER_LOADED = (TrustState.REJECTED, TrustState.QUARANTINED)
_GRAVITY = (Outcome.CLEAN, Outcome.STRAGGLER, Outcome.INCONCLUSIVE, Outcome.SDC)


def worst(outcomes: Sequence[Outcome]) -> Outcome:
    """The job's outcome: that of its worst comparison group. A job of which nobody spoke is inconclusive."""
    return max(outcomes, key=_GRAVITY.index, default=Outcome.INCONCLUSIVE)


@dataclass(frozen=True, kw_only=True)
class TrustRules:
    """`catalog` holds the recipe ids of one complete cycle; `dense` certifies an accepted check at once."""

    dense: bool = True
    catalog: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class TrustBook:
    """Checkpoints by step with their states, and how far the present catalog cycle has come.

    `covered` are recipes found clean in the cycle; `latest` the newest captured step. Of one run and lineage only.
    """

    states: Mapping[int, TrustState] = field(default_factory=dict)
    latest: int | None = None
    covered: frozenset[str] = frozenset()

    def verified(self) -> tuple[int, ...]:
        """Steps that are RECOVERY_VERIFIED, newest first."""
        return tuple(sorted((s for s, t in self.states.items() if t is TrustState.RECOVERY_VERIFIED), reverse=True))

    def candidates(self) -> tuple[int, ...]:
        """Steps that wait for the following complete clean cycle, oldest first."""
        return tuple(sorted(s for s, t in self.states.items() if t is TrustState.CANDIDATE))

    def unproven(self) -> tuple[int, ...]:
        """Steps that were captured and are not verified, oldest first."""
        waiting = (TrustState.CANDIDATE, TrustState.LATEST_GEMINI)
        return tuple(sorted(s for s, t in self.states.items() if t in waiting))


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """One boundary with a check: its outcome over all ranks and the recipes that were clean on every group."""

    step: int
    outcome: Outcome
    recipes: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Change:
    """What a boundary does: whether its state is captured, and which steps changed state, to what."""

    capture: bool
    state: TrustState | None = None
    promoted: tuple[int, ...] = ()
    rejected: tuple[int, ...] = ()


def advance(book: TrustBook, rules: TrustRules, boundary: Boundary) -> tuple[TrustBook, Change]:
    """The book after one boundary, and what is to be done about checkpoints.

    Dense rule: an accepted check certifies its own step. Dynamic rule: the step at which a cycle completes becomes a
    candidate, and the completion of the next one promotes it. SDC rejects all that no later cycle has proven, be it a
    candidate or captured between two; inconclusive evidence certifies nothing and begins the cycle anew, since a clean
    cycle is one without a gap.
    """
    states = _remembered(book.states)
    if not boundary.outcome.accepts:
        gone = book.unproven() if boundary.outcome is Outcome.SDC else ()
        states.update(dict.fromkeys(gone, TrustState.REJECTED))
        if states.get(boundary.step) is not TrustState.QUARANTINED:
            states[boundary.step] = TrustState.REJECTED
        after = replace(book, states=states, covered=frozenset())
        return after, Change(capture=False, rejected=(*gone, boundary.step))
    if rules.dense:
        states[boundary.step] = TrustState.RECOVERY_VERIFIED
        after = replace(book, states=states, latest=boundary.step, covered=frozenset())
        return after, Change(capture=True, state=TrustState.RECOVERY_VERIFIED)
    covered = book.covered | (boundary.recipes & rules.catalog)
    if not rules.catalog or covered < rules.catalog:
        states[boundary.step] = TrustState.LATEST_GEMINI
        states = _drop_older_gemini(states)
        after = replace(book, states=states, latest=boundary.step, covered=covered)
        return after, Change(capture=True, state=TrustState.LATEST_GEMINI)
    promoted = book.candidates()
    states.update(dict.fromkeys(promoted, TrustState.RECOVERY_VERIFIED))
    states[boundary.step] = TrustState.CANDIDATE
    after = replace(book, states=states, latest=boundary.step, covered=frozenset())
    return after, Change(capture=True, state=TrustState.CANDIDATE, promoted=promoted)


def retained(states: Mapping[Key, TrustState]) -> set[Key]:
    """What stays on disk of these captures, keyed by step or by step and attempt: the newest two, and the newest two
    verified ones and candidates. Pure.

    Two of each, since ranks prune at their own time: one that is ahead must not take away what another falls back to.
    """
    newest = sorted((k for k, state in states.items() if state not in _NEVER_LOADED), reverse=True)
    kept = set(newest[:_KEPT_OF_A_KIND])
    for kind in (TrustState.RECOVERY_VERIFIED, TrustState.CANDIDATE):
        kept.update([key for key in newest if states[key] is kind][:_KEPT_OF_A_KIND])
    return kept


def _remembered(states: Mapping[int, TrustState]) -> dict[int, TrustState]:
    """The newest entries of each state; a long run must not make the book long."""
    kept: dict[int, TrustState] = {}
    for kind in TrustState:
        kept |= dict.fromkeys(sorted(s for s, t in states.items() if t is kind)[-_REMEMBERED:], kind)
    return kept


def _drop_older_gemini(states: dict[int, TrustState]) -> dict[int, TrustState]:
    """Forget captures that no disk holds any more; those one may hold are to be rejected when corruption is found."""
    gemini = sorted(s for s, t in states.items() if t is TrustState.LATEST_GEMINI)
    return {s: t for s, t in states.items() if s not in gemini[: -2 * _KEPT_OF_A_KIND]}
