"""What one check found: identical on every peer, JSON-ready."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from scout_core.consensus.c3 import C3Result, C3Status
from scout_core.consensus.readiness import DIGEST_FIELDS, Reason
from scout_core.replay.verdict import RecipeVerdict

if TYPE_CHECKING:  # the clock of live steps reads replay's own
    from scout_core.timing.live import LiveVerdict


@dataclass(frozen=True, kw_only=True)
class Detail:
    """What a closer look at a dispute found: which tensors of a surface differ, and how the first does.

    `differing` and `largest_difference` are per peer, against the first peer outside the bitmap; None if not measured.
    """

    surface: str
    tensors: tuple[str, ...]
    elements: int | None = None
    differing: tuple[int, ...] | None = None
    largest_difference: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """The result of one check on one set of peers.

    Bitmaps have one entry per peer, True for a rank that stands out; `peer_ranks` maps positions to global ranks.
    `c3_results` and `sdc_sources` are keyed `recipe/surface`. `status` is Attributed if any recipe is, else
    Inconclusive if any exact comparison is, else Agree. `complete` is True when everything that was due led to an
    exact verdict.
    `live` is the judgement of the training steps since the last check; None where none was timed.
    `nonfinite_ranks` saw a NaN or an infinity in their own data before any reduction; `nonfinite` says that replayed
    values or live state hold one anywhere.
    """

    step: int
    peer_ranks: tuple[int, ...]
    status: C3Status
    complete: bool
    sdc_bitmap: tuple[bool, ...]
    straggler_bitmap: tuple[bool, ...]
    sdc_sources: tuple[str, ...] = ()
    c3_results: Mapping[str, C3Result] = field(default_factory=dict)
    checked_recipe_ids: tuple[str, ...] = ()
    inconclusive_reasons: tuple[Reason, ...] = ()
    verdicts: Mapping[str, RecipeVerdict] = field(default_factory=dict)
    details: Mapping[str, Detail] = field(default_factory=dict)
    times_ms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    waits_ms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    straggler_recipes: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)
    collective_timings: tuple[Mapping[str, Any], ...] = ()
    cross_pg_result: Mapping[str, Any] | None = None
    live: LiveVerdict | None = None
    nonfinite: bool = False
    nonfinite_ranks: tuple[int, ...] = ()
    source_rank: int | None = None
    manual: bool = False
    elapsed_ms: float = 0.0

    @property
    def sdc_ranks(self) -> tuple[int, ...]:
        """Global ranks with attributed corruption."""
        return tuple(rank for rank, bad in zip(self.peer_ranks, self.sdc_bitmap, strict=True) if bad)

    @property
    def straggler_ranks(self) -> tuple[int, ...]:
        """Global ranks confirmed slow."""
        return tuple(rank for rank, slow in zip(self.peer_ranks, self.straggler_bitmap, strict=True) if slow)

    @property
    def trustworthy(self) -> bool:
        """Whether the state at this boundary may be certified: complete, agreed, and all values finite.

        A straggler does not taint state. Agreement alone is not health: peers can agree on a NaN.
        """
        return self.complete and self.status is C3Status.AGREE and not self.nonfinite

    @property
    def desynchronized(self) -> bool:
        """Whether ranks took part in other collectives since the last check: nothing they computed is to be trusted."""
        return any(reason.field in DIGEST_FIELDS for reason in self.inconclusive_reasons)

    def to_json(self) -> dict[str, Any]:
        """A plain dict for strict JSON."""
        return {
            "type": "check",
            "step": self.step,
            "status": self.status.value,
            "complete": self.complete,
            "trustworthy": self.trustworthy,
            "peer_ranks": list(self.peer_ranks),
            "source_rank": self.source_rank,
            "manual": self.manual,
            "sdc_bitmap": list(self.sdc_bitmap),
            "sdc_sources": list(self.sdc_sources),
            "straggler_bitmap": list(self.straggler_bitmap),
            "checked_recipe_ids": list(self.checked_recipe_ids),
            "inconclusive_reasons": [reason.message for reason in self.inconclusive_reasons],
            "c3_results": {key: result.to_json() for key, result in self.c3_results.items()},
            "times_ms": {key: list(times) for key, times in self.times_ms.items()},
            "collective_timings": [dict(timing) for timing in self.collective_timings],
            "cross_pg_result": self.cross_pg_result,
            "live": None if self.live is None else self.live.to_json(),
            "nonfinite": self.nonfinite,
            "nonfinite_ranks": list(self.nonfinite_ranks),
            "elapsed_ms": round(self.elapsed_ms, 3),
        }


def without_peers(step: int, rank: int, recipe_ids: Sequence[str]) -> ReplayResult:
    """What a check says on a rank that has nobody to be compared with, recipe by recipe."""
    text = "no other rank holds the same part of the model at the same place, so there is nothing to compare it with"
    return ReplayResult(
        step=step,
        peer_ranks=(rank,),
        status=C3Status.INCONCLUSIVE,
        complete=False,
        sdc_bitmap=(False,),
        straggler_bitmap=(False,),
        inconclusive_reasons=tuple(
            Reason(recipe=recipe, field="peers", ranks=(), message=f"{recipe}: {text}") for recipe in recipe_ids
        ),
    )
