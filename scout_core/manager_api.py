"""What a job manager needs: the reports SCOUT makes, and the hooks that receive them.

SCOUT recommends; restart, placement and quarantine stay with the manager.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scout_core.report.fault_report import FaultKind, SCOUTFaultReport

__all__ = ["FaultKind", "OrchestrationHooks", "SCOUTFaultReport"]


@dataclass(frozen=True, kw_only=True)
class OrchestrationHooks:
    """Callbacks into an external manager.

    `report_fault` is called once per report, on the first rank of the peers concerned, in the training thread; an
    exception in it is logged and changes nothing.
    """

    report_fault: Callable[[SCOUTFaultReport], None] | None = None
