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

__all__ = [
    "FaultKind",
    "HardwareHealthMonitor",
    "HealthConfig",
    "HealthEvent",
    "HealthReading",
    "HealthSeverity",
    "HealthSource",
    "NvmlSource",
    "OrchestrationHooks",
    "SCOUTFaultReport",
    "XidSource",
]


@dataclass(frozen=True, kw_only=True)
class OrchestrationHooks:
    """Callbacks into an external manager.

    `report_fault` is called once per report: for checks on the first rank of the peers concerned, in the training
    thread; for hardware on the rank whose device it is, on the health monitor's thread. An exception in it is logged
    and changes nothing.
    """

    report_fault: Callable[[SCOUTFaultReport], None] | None = None
