"""Findings of the out-of-band path as fault reports. Pure."""

from __future__ import annotations

import xxhash

from scout_core.oob.findings import Finding
from scout_core.report.fault_report import FaultKind, RecommendedAction, SCOUTFaultReport, Severity

_ACTIONS: dict[str, RecommendedAction] = {
    "collective_desync": "stop",  # a fault of the program or its data: no device is to be excluded
    "collective_hang": "restart",
    "process_stall": "restart",
    "process_exit": "restart",
    "dataloader_stall": "restart",
    "checkpoint_io_stall": "observe",
    "environment_changed": "stop",  # nothing is wrong with training, but nobody is left to end it
}


def oob_report(finding: Finding, *, run: str = "", ordinal: int = 0, secondary_to: str = "") -> SCOUTFaultReport:
    """The report of one finding. `ordinal` tells a stall from an earlier one of the same kind and ranks.

    With `secondary_to`, the id of an incident that is still open, it is a consequence: information only.
    """
    mild = finding.kind in ("dataloader_stall", "checkpoint_io_stall", "environment_changed")
    severity: Severity = "warning" if mild else "fatal"
    evidence = dict(finding.evidence)
    if secondary_to:
        severity, evidence["secondary_to"] = "info", secondary_to
    text = f"{run}|{finding.kind}|{finding.ranks}|{finding.step}|{ordinal}"
    return SCOUTFaultReport(
        incident_id=xxhash.xxh3_128_hexdigest(text.encode()),
        kind=FaultKind(finding.kind),
        severity=severity,
        status="Attributed" if finding.ranks else "Inconclusive",
        scope="rank" if finding.ranks else "group",
        ranks=finding.ranks,
        hosts=finding.hosts,
        surface=finding.surface,
        phase=finding.phase,
        step=finding.step,
        first_seen_step=finding.step,
        basis=finding.basis,
        evidence=evidence,
        exonerating=dict(finding.exonerating),
        recommended_action="continue" if secondary_to else _ACTIONS[finding.kind],
        message=finding.message,
    )


def daemon_failure(rank: int, host: str, step: int, reason: str, policy: str) -> SCOUTFaultReport:
    """This rank's observer is lost: nobody watches the rank from outside any more."""
    return SCOUTFaultReport(
        kind=FaultKind.OOB_DAEMON_FAILURE,
        severity="warning",
        status="Inconclusive",
        scope="rank",
        step=step,
        first_seen_step=step,
        basis="direct",
        evidence={"unmonitored_rank": rank, "host": host, "policy": policy},
        recommended_action="observe" if policy == "warn" else "restart",
        message=f"the observer of rank {rank} on {host} is lost ({reason}); the rank is unmonitored from outside",
    )
