"""The result of a check, from what its rounds brought. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scout_core.consensus.c3 import C3Status
from scout_core.consensus.readiness import Reason
from scout_core.replay.cohorts import Joined
from scout_core.replay.evidence import Observation
from scout_core.replay.result import Detail, ReplayResult
from scout_core.replay.schedule import READING_CLASSES, Plan, Recipe
from scout_core.timing.stragglers import StragglerVerdict

Executions = dict[str, list[list[Observation]]]


@dataclass(frozen=True)
class Found:
    """What the rounds of one check brought."""

    executions: Executions = field(default_factory=dict)
    joined: dict[str, Joined] = field(default_factory=dict)
    stragglers: dict[str, StragglerVerdict] = field(default_factory=dict)
    collective_timings: Sequence[Mapping[str, Any]] = ()
    details: dict[str, Detail] = field(default_factory=dict)


def assemble(
    plan: Plan,
    ranks: tuple[int, ...],
    source: int,
    recipes: Sequence[Recipe],
    found: Found,
    reasons: Sequence[Reason],
    nondeterministic: Collection[str],
) -> ReplayResult:
    """Everything that the check of `plan` says about the peers `ranks`.

    `source` is the position of the peer whose invocation was replayed, `reasons` are those of readiness, and
    `nondeterministic` the recipes that are known not to repeat themselves.
    """
    reasons = list(reasons)
    executions, stragglers = found.executions, found.stragglers
    verdicts = {key: joined.verdict for key, joined in found.joined.items()}
    for key, verdict in verdicts.items():
        if verdict.reason is not None:
            apart = tuple(ranks[p] for p in verdict.apart)
            reasons.append(Reason(recipe=key, field="evidence", ranks=apart, message=verdict.reason))
    for recipe in recipes:
        if recipe.recipe_id in nondeterministic and verdicts[recipe.recipe_id].reason is None:
            text = f"{recipe.recipe_id}: known not to repeat itself; only what it reads was compared"
            reasons.append(Reason(recipe=recipe.recipe_id, field="nondeterministic", ranks=(), message=text))
    seen = [peer for runs in executions.values() for run in runs for peer in run]
    local = {p for runs in executions.values() for run in runs for p, o in enumerate(run) if o.flags.local_nonfinite}
    statuses = {verdict.status for verdict in verdicts.values()}
    attributed = C3Status.ATTRIBUTED in statuses
    incomplete = bool(reasons) or C3Status.INCONCLUSIVE in statuses
    exact = {f"{key}/{name}": r for key, v in verdicts.items() for name, r in v.surfaces.items()}
    return ReplayResult(
        step=plan.step,
        peer_ranks=ranks,
        status=C3Status.ATTRIBUTED if attributed else C3Status.INCONCLUSIVE if incomplete else C3Status.AGREE,
        complete=not incomplete,
        sdc_bitmap=_union([v.bitmap for v in verdicts.values() if v.bitmap], len(ranks)),
        straggler_bitmap=_union([v.bitmap for v in stragglers.values()], len(ranks)),
        sdc_sources=tuple(
            key
            for key, r in exact.items()
            if r.status is not C3Status.AGREE
            and not verdicts[key.rpartition("/")[0]].nondeterministic
            and not verdicts[key.rpartition("/")[0]].raised
            and len(ranks) > 1
        ),
        c3_results=exact,
        checked_recipe_ids=tuple(r.recipe_id for r in recipes if r.recipe_class not in READING_CLASSES),
        inconclusive_reasons=tuple(reasons),
        verdicts=verdicts,
        details=found.details,
        times_ms={key: tuple(o.elapsed.busy_us / 1e3 for o in runs[-1]) for key, runs in executions.items()},
        waits_ms={key: tuple(o.elapsed.wait_us / 1e3 for o in runs[-1]) for key, runs in executions.items()},
        collective_timings=tuple(found.collective_timings),
        straggler_recipes={key: v.bitmap for key, v in stragglers.items() if any(v.bitmap)},
        nonfinite=any(o.flags.local_nonfinite or o.flags.replay_nonfinite or o.flags.state_nonfinite for o in seen),
        nonfinite_ranks=tuple(ranks[p] for p in sorted(local)),
        source_rank=ranks[source],
        manual=plan.manual,
    )


def _union(bitmaps: Sequence[tuple[bool, ...]], size: int) -> tuple[bool, ...]:
    return tuple(any(bitmap[p] for bitmap in bitmaps) for p in range(size))
