"""From the judgement of live steps to the reports it deserves. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scout_core.consensus.readiness import name_ranks
from scout_core.replay.result import ReplayResult
from scout_core.report.fault_report import FaultKind, RecommendedAction, SCOUTFaultReport
from scout_core.report.places import Places
from scout_core.timing.pace import PaceFinding

SURFACE = "live_steps"
COLLECTIVES = "live_collectives"
KINDS = {
    "compute_straggler": FaultKind.COMPUTE_STRAGGLER,
    "data_imbalance": FaultKind.DATA_IMBALANCE,
    "dataloader_stall": FaultKind.DATALOADER_STALL,
}
_NOTES = {
    "input_bound": (FaultKind.DATALOADER_STALL, "the job waits for its loaders; no rank stands out"),
    "host_contention": (
        FaultKind.HOST_CONTENTION,
        "ranks wait for a core of their hosts; fewer threads a rank (OMP_NUM_THREADS) or fewer processes would help; "
        "no rank stands out",
    ),
}
"""What is said of the job where no rank is to blame."""


def live_reports(result: ReplayResult, places: Places) -> list[SCOUTFaultReport]:
    """One report for each rank found slow in live steps, one for what all slow collectives have in common, and one that
    names nobody for a job that waits for data.

    A rank whose replays are slow too is left to that report, which rests on equal work.
    """
    reports = _communication(result, places)
    if result.live is None:
        return reports
    findings = [f for f in result.live.findings if result.peer_ranks[f.position] not in result.straggler_ranks]
    reports += [_finding(result, finding, places) for finding in findings]
    if result.live.note in _NOTES:
        reports.append(_note(result, result.live.note))
    return reports


def collector_report(
    rank: int, step: int, found: Mapping[str, Any], where: Mapping[str, tuple[str, ...]]
) -> SCOUTFaultReport:
    """Python's collector of garbage pauses this rank again and again; `found` as `CollectorWatch` tells it."""
    return SCOUTFaultReport(
        kind=FaultKind.PROCESS_STALL,
        severity="warning",
        status="Attributed",
        scope="rank",
        ranks=(rank,),
        **where,
        surface="collector",
        phase="train",
        step=step,
        first_seen_step=step,
        basis="direct",
        evidence=dict(found),
        recommended_action="observe",
        message=f"{name_ranks((rank,))}: Python's garbage collector paused it {found['pauses']} times in "
        f"{found['steps']} steps, {found['paused_ms'] / 1e3:.1f} s in all, while peers waited; call gc.freeze() after "
        "start-up, or gc.disable() and collect at the same steps on all ranks",
    )


def _finding(result: ReplayResult, finding: PaceFinding, places: Places) -> SCOUTFaultReport:
    assert result.live is not None
    rank = result.peer_ranks[finding.position]
    excluded = finding.decision == "exclude_at_next_restart"
    action: RecommendedAction = "restart_excluding" if excluded else "observe"
    cause = "its host has no core free for it" if finding.position in result.live.crowded else None
    evidence: dict[str, Any] = {
        "peer_ranks": list(result.peer_ranks),
        "excess": round(finding.excess, 4),
        "episodes": finding.episodes,
        "decision": finding.decision,
        "own_ms": [None if value is None else round(value, 3) for value in result.live.own_ms],
        "core_wait": [None if value is None else round(value, 3) for value in result.live.core_wait],
    }
    if cause is not None:
        evidence["cause"] = "cpu_contention"
    text = f"{name_ranks((rank,))}: {finding.excess:.1%} more time per step since step {finding.onset_step}; "
    return SCOUTFaultReport(
        kind=KINDS[finding.kind],
        severity="warning",
        status="Attributed",
        scope="rank",
        ranks=(rank,),
        **places.of((rank,)),
        surface=SURFACE,
        phase="train",
        step=result.step,
        first_seen_step=finding.onset_step,
        basis="majority" if len(result.peer_ranks) > 2 else "self",
        evidence=evidence,
        exonerating={"not_slow": [r for r in result.peer_ranks if r != rank]},
        recommended_action=action if finding.kind == "compute_straggler" else "observe",
        message=text + (finding.reason if cause is None else f"{finding.reason}; {cause}"),
    )


def _communication(result: ReplayResult, places: Places) -> list[SCOUTFaultReport]:
    """What makes collectives slow, where it has a name. Told by the peers of the rank, or of the first one affected."""
    found = result.cross_pg_result
    if found is None or found["finding"] not in ("rank", "shared_resource"):
        return []
    rank = found["rank"]
    affected = [r for group in found["supporting"] for r in group["ranks"]]
    if (rank if rank is not None else min(affected)) not in result.peer_ranks:
        return []
    ranks = () if rank is None else (rank,)
    where = places.of(ranks)
    if found["host"] is not None:
        where["hosts"] = (found["host"],)
    excluded = rank is not None and found["decision"] == "exclude_at_next_restart"
    return [
        SCOUTFaultReport(
            kind=FaultKind.COMMUNICATION_STRAGGLER,
            severity="warning",
            status="Attributed",
            scope="host" if rank is None and found["resource"] is None else "rank" if ranks else "group",
            ranks=ranks,
            **where,
            surface=COLLECTIVES if rank is not None else f"{COLLECTIVES}/{found['resource'] or found['host']}",
            phase="train",
            step=result.step,
            first_seen_step=result.step,
            confidence=found["confidence"],
            basis="direct",
            evidence={key: found[key] for key in ("supporting", "finding", "resource", "decision")},
            exonerating={"not_slow": sorted(set(affected) - set(ranks))} if ranks else {},
            recommended_action="restart_excluding" if excluded else "observe",
            message=f"collectives are slow: {found['reason']}",
        )
    ]


def _note(result: ReplayResult, note: str) -> SCOUTFaultReport:
    kind, text = _NOTES[note]
    assert result.live is not None
    evidence: dict[str, Any] = {"note": note}
    if kind is FaultKind.HOST_CONTENTION:
        evidence["core_wait"] = [None if value is None else round(value, 3) for value in result.live.core_wait]
    return SCOUTFaultReport(
        kind=kind,
        severity="info",
        status="Inconclusive",
        scope="job",
        surface=SURFACE,
        phase="train",
        step=result.step,
        first_seen_step=result.step,
        evidence=evidence,
        recommended_action="continue",
        message=text,
    )
