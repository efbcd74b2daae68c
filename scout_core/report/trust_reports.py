"""Problems with checkpoints as fault reports. Pure."""

from __future__ import annotations

from scout_core.report.fault_report import FaultKind, SCOUTFaultReport
from scout_core.trust.saver import Problem


def checkpoint_report(problem: Problem) -> SCOUTFaultReport:
    """The `checkpoint_bad` report of one problem: the checkpoint is at fault, and no device is to be left out."""
    where = f"checkpoint of step {problem.step}" if problem.step else "checkpoint records"
    return SCOUTFaultReport(
        kind=FaultKind.CHECKPOINT_BAD,
        severity="warning",
        status="Attributed" if problem.ranks else "Inconclusive",
        scope="checkpoint",
        ranks=problem.ranks,
        phase="checkpoint",
        step=problem.step,
        first_seen_step=problem.step,
        basis="direct",
        evidence={"checkpoint_id": problem.checkpoint_id},
        recommended_action="observe",
        message=f"{where}: {problem.message}",
    )
