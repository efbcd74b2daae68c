"""What a job manager needs: the reports SCOUT makes, and the hooks that receive them.

SCOUT recommends; restart, placement and quarantine stay with the manager.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scout_core.health import (
    HardwareHealthMonitor,
    HealthConfig,
    HealthEvent,
    HealthReading,
    HealthSeverity,
    HealthSource,
    NvmlSource,
    XidSource,
)
from scout_core.report.fault_report import FaultKind, SCOUTFaultReport
from scout_core.trust.decision import RecoveryDecision
from scout_core.trust.run_record import RESTART_EXIT_CODE, STOP_EXIT_CODE

__all__ = [
    "RESTART_EXIT_CODE",
    "STOP_EXIT_CODE",
    "FaultKind",
    "HardwareHealthMonitor",
    "HealthConfig",
    "HealthEvent",
    "HealthReading",
    "HealthSeverity",
    "HealthSource",
    "NvmlSource",
    "OrchestrationHooks",
    "RecoveryDecision",
    "SCOUTFaultReport",
    "XidSource",
]


@dataclass(frozen=True, kw_only=True)
class OrchestrationHooks:
    """Callbacks into an external manager, called one after the other on a thread of SCOUT's own.

    `report_fault` is called once per report: for checks on the first rank of the peers concerned, for hardware on the
    rank whose device it is, for hangs and stalls on a rank that is not blocked. `report_recovery` is called once per
    decision, on rank 0, before the fault it answers; `restart_destination` once, on rank 0, before SCOUT ends the
    processes for a restart, with the decision: the manager prepares the hosts. An exception is logged and changes
    nothing; a slow hook delays only the deliveries behind it, and is not waited for.
    """

    report_fault: Callable[[SCOUTFaultReport], None] | None = None
    report_recovery: Callable[[RecoveryDecision], None] | None = None
    restart_destination: Callable[[RecoveryDecision], None] | None = None
