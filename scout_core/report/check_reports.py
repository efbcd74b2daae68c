"""From the result of a check to the fault reports it deserves. Pure: equal on every peer but for the incident ids."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from scout_core.consensus.c3 import C3Status
from scout_core.consensus.readiness import name_ranks
from scout_core.replay.evidence import SHARED_STATE
from scout_core.replay.result import ReplayResult
from scout_core.replay.verdict import RecipeVerdict
from scout_core.report.fault_report import FaultKind, RecommendedAction, SCOUTFaultReport, Severity
from scout_core.report.live_reports import live_reports
from scout_core.report.places import Places

_DENSE = 0.5  # a device flips few elements at once; when most differ, two histories have drifted apart


def reports_of(
    result: ReplayResult, *, hosts: Sequence[str] = (), devices: Sequence[str] = ()
) -> list[SCOUTFaultReport]:
    """Every fault `result` shows, most serious first. `hosts` and `devices` are by peer position, if known.

    Inconclusive readiness (missing or unequal captures) is no fault and gives no report: it only blocks certification.
    """
    places = Places(result, hosts, devices)
    found = [_corruption(result, verdict, places) for verdict in result.verdicts.values() if _disagrees(verdict)]
    reports = _merge(found)
    if result.nonfinite:
        reports.append(_numeric(result, places))
    reports += [_straggler(result, places)] if any(result.straggler_bitmap) else []
    reports += [_nondeterministic(result, v) for v in result.verdicts.values() if v.nondeterministic]
    return reports + live_reports(result, places)


def _disagrees(verdict: RecipeVerdict) -> bool:
    if verdict.nondeterministic or len(next(iter(verdict.surfaces.values())).bitmap) < 2:
        return False
    return verdict.status is C3Status.ATTRIBUTED or verdict.persistence is not None


def _corruption(result: ReplayResult, verdict: RecipeVerdict, places: Places) -> SCOUTFaultReport:
    ranks = tuple(r for r, bad in zip(result.peer_ranks, verdict.bitmap, strict=True) if bad)
    others = tuple(r for r in result.peer_ranks if r not in ranks)
    surface = f"{verdict.recipe_id}/{verdict.first_surface or SHARED_STATE}"
    kind = _corruption_kind(result, verdict)
    intermittent = verdict.persistence == "intermittent"
    action: RecommendedAction = "observe" if intermittent else "restart_excluding" if ranks else "stop"
    if kind is FaultKind.REPLICA_DIVERGENCE:
        action = "stop"
    detail = result.details.get(verdict.recipe_id)
    if ranks and verdict.basis == "reference":
        message = (
            f"{name_ranks(ranks)}: {surface} lies outside the error bound of a float64 reference, "
            f"{name_ranks(others)} inside"
        )
    elif ranks:
        message = f"{name_ranks(ranks)}: {surface} differs from {len(others)} agreeing peers ({verdict.persistence})"
    else:
        message = f"{surface} differs between peers and no rank can be blamed: {verdict.reason}"
    if detail is not None:
        message += f"; in {', '.join(detail.tensors)}"
    return SCOUTFaultReport(
        kind=kind,
        severity="warning" if intermittent else "fatal",
        status=verdict.status.value,
        scope="rank" if ranks else "group",
        ranks=ranks,
        **places.of(ranks),
        surface=surface,
        step=result.step,
        first_seen_step=result.step,
        basis=verdict.basis,
        evidence=_evidence(result, verdict),
        exonerating=_exonerating(verdict, others) if ranks else {},
        recommended_action=action,
        message=message,
    )


def _exonerating(verdict: RecipeVerdict, others: tuple[int, ...]) -> dict[str, Any]:
    """What clears the others: that they agree, or that a reference agrees with them."""
    return {"within_reference_bound" if verdict.basis == "reference" else "agreeing_ranks": list(others)}


def _corruption_kind(result: ReplayResult, verdict: RecipeVerdict) -> FaultKind:
    """Divergence rather than corruption: every replica is different, most elements of a state tensor are, or the
    optimizer was set up differently, which a flipped bit in a Python number hardly ever explains."""
    if verdict.first_surface in ("hyperparameters", None):
        return FaultKind.REPLICA_DIVERGENCE  # without a surface: peers agree, and lockstep partners do not
    surface = verdict.surfaces.get(verdict.first_surface or "")
    peers = len(result.peer_ranks)
    if surface is not None and peers > 2 and len(set(surface.evidence)) == peers:
        return FaultKind.REPLICA_DIVERGENCE
    detail = result.details.get(verdict.recipe_id)
    stateful = verdict.first_surface in ("parameter_state", "optimizer_state", "gradient", "hyperparameters")
    if stateful and detail is not None and detail.elements and detail.differing is not None and detail.elements > 1:
        share = max(detail.differing) / detail.elements
        return FaultKind.REPLICA_DIVERGENCE if share > _DENSE else FaultKind.SDC
    return FaultKind.SDC


def _evidence(result: ReplayResult, verdict: RecipeVerdict) -> dict[str, Any]:
    surfaces: Mapping[str, Any] = {
        name: [f"{word & (1 << 64) - 1:016x}" if isinstance(word, int) else word for word in r.evidence]
        for name, r in verdict.surfaces.items()
        if r.status is not C3Status.AGREE
    }
    evidence: dict[str, Any] = {
        "peer_ranks": list(result.peer_ranks),
        "signatures": surfaces,
        "persistence": verdict.persistence,
        "source_rank": result.source_rank,
    }
    if verdict.reference:
        # JSON has no infinity, which is what a NaN against a number gives
        evidence["deviation_over_bound"] = [min(ratio, sys.float_info.max) for ratio in verdict.reference]
    detail = result.details.get(verdict.recipe_id)
    if detail is not None:
        evidence["tensors"] = list(detail.tensors)
        evidence["elements"] = detail.elements
        evidence["differing_elements"] = None if detail.differing is None else list(detail.differing)
        evidence["largest_difference"] = None if detail.largest_difference is None else list(detail.largest_difference)
    return evidence


def _merge(found: list[SCOUTFaultReport]) -> list[SCOUTFaultReport]:
    """One report per kind and set of ranks: several surfaces of one fault are one incident."""
    merged: dict[tuple[FaultKind, tuple[int, ...], Severity], SCOUTFaultReport] = {}
    for report in sorted(found, key=lambda r: r.surface is None or "_state" not in r.surface):
        key = (report.kind, report.ranks, report.severity)
        first = merged.setdefault(key, report)
        if first is not report:
            also = [*first.evidence.get("also", ()), report.surface]
            merged[key] = first.model_copy(update={"evidence": {**first.evidence, "also": also}})
    return sorted(merged.values(), key=lambda r: r.severity != "fatal")


def _numeric(result: ReplayResult, places: Places) -> SCOUTFaultReport:
    named = result.nonfinite_ranks if len(result.nonfinite_ranks) * 2 < len(result.peer_ranks) else ()
    if named:
        message = f"{name_ranks(named)}: NaN or infinity in its own data before any reduction, while its peers had none"
    else:
        message = "NaN or infinity in replayed values or live state of the peers alike; the state is not certified"
    return SCOUTFaultReport(
        kind=FaultKind.NUMERIC,
        severity="warning",
        status="Attributed" if named else "Inconclusive",
        scope="rank" if named else "group",
        ranks=named,
        **places.of(named),
        step=result.step,
        first_seen_step=result.step,
        basis="direct" if named else "none",
        evidence={"nonfinite_ranks": list(result.nonfinite_ranks)},
        exonerating={"finite_ranks": [r for r in result.peer_ranks if r not in named]} if named else {},
        recommended_action="restart",
        message=message,
    )


def _straggler(result: ReplayResult, places: Places) -> SCOUTFaultReport:
    ranks = result.straggler_ranks
    recipes = {key: _times(result, key) for key in result.straggler_recipes}
    return SCOUTFaultReport(
        kind=FaultKind.COMPUTE_STRAGGLER,
        severity="warning",
        status="Attributed",
        scope="rank",
        ranks=ranks,
        **places.of(ranks),
        surface=next(iter(recipes), None),
        step=result.step,
        first_seen_step=result.step,
        basis="majority",
        evidence={"peer_ranks": list(result.peer_ranks), "times_ms": recipes},
        exonerating={"not_slow": [r for r in result.peer_ranks if r not in ranks]},
        recommended_action="observe",
        message=f"{name_ranks(ranks)}: slower than its peers at the same replayed work, in every confirmation round",
    )


def _times(result: ReplayResult, recipe: str) -> list[float]:
    """Times by peer of a recipe, or of the layer whose turn it was for all layers taken together (`hidden`)."""
    keys = [key for key in result.times_ms if key == recipe or key.startswith(f"{recipe}:")]
    return list(result.times_ms[keys[0]]) if keys else []


def _nondeterministic(result: ReplayResult, verdict: RecipeVerdict) -> SCOUTFaultReport:
    return SCOUTFaultReport(
        kind=FaultKind.NONDETERMINISTIC,
        severity="info",
        status="Inconclusive",
        scope="job",
        surface=verdict.recipe_id,
        step=result.step,
        first_seen_step=result.step,
        recommended_action="continue",
        message=f"{verdict.reason}; its results are not compared from now on and no rank is blamed",
    )
