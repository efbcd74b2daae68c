"""Verdicts on what only one rank owns. Pure.

Peers hold no copy of it, so the evidence is the owner's own: its live result against the others' recomputation of the
same numbers, and its memory against what it was a moment before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from scout_core.consensus.c3 import C3Result, C3Status
from scout_core.consensus.readiness import name_ranks
from scout_core.replay.evidence import Observation
from scout_core.replay.verdict import RecipeVerdict

AT_REST_SURFACE = "state_at_rest"
OWNER_SURFACE = "owner_update"


def judge_at_rest(recipe_id: str, seen: Sequence[Observation], ranks: Sequence[int]) -> RecipeVerdict:
    """Judge `seen[p]`, whose word is 0 when nothing changed at rest on the peer at position p.

    A minority on which something did is blamed on its own evidence, one of two as well. When it happens on more ranks,
    the job writes there in a way that leaves no version behind, and nobody is blamed.
    """
    apart = tuple(bool(peer.words[0]) for peer in seen)
    evidence = tuple(peer.words[0] for peer in seen)
    nobody = (False,) * len(seen)
    if not any(apart):
        agreed = C3Result(status=C3Status.AGREE, bitmap=nobody, evidence=evidence)
        return RecipeVerdict(
            recipe_id=recipe_id, status=C3Status.AGREE, surfaces={AT_REST_SURFACE: agreed}, qualified=True
        )
    blamed = 2 * sum(apart) < len(seen) or (sum(apart) == 1 and len(seen) == 2)
    status = C3Status.ATTRIBUTED if blamed else C3Status.INCONCLUSIVE
    who = name_ranks([rank for rank, changed in zip(ranks, apart, strict=True) if changed])
    text = f"{recipe_id}: owned state of {who} changed between two optimizer steps, as when the job writes to it unseen"
    return RecipeVerdict(
        recipe_id=recipe_id,
        status=status,
        surfaces={AT_REST_SURFACE: C3Result(status=status, bitmap=apart if blamed else nobody, evidence=evidence)},
        bitmap=apart if blamed else nobody,
        basis="self" if blamed else "none",
        persistence="persistent",
        reason=None if blamed else text,
        qualified=True,
    )


def settle_owner(verdict: RecipeVerdict, source: int) -> RecipeVerdict:
    """The verdict on an owner's update. Between two peers the owner's own recomputation testifies: when it agrees with
    the other peer's and the live result does not, the owner contradicts itself."""
    divergent = [name for name, result in verdict.surfaces.items() if result.status is not C3Status.AGREE]
    result = verdict.surfaces.get(OWNER_SURFACE)
    undecided = verdict.status is C3Status.INCONCLUSIVE and not verdict.more and not verdict.nondeterministic
    if result is None or divergent != [OWNER_SURFACE] or not undecided or len(result.bitmap) != 2:
        return verdict
    bitmap = tuple(p == source for p in range(2))
    blamed = C3Result(status=C3Status.ATTRIBUTED, bitmap=bitmap, evidence=result.evidence)
    return replace(
        verdict,
        status=C3Status.ATTRIBUTED,
        surfaces={**verdict.surfaces, OWNER_SURFACE: blamed},
        bitmap=bitmap,
        basis="self",
        reason=None,
    )
