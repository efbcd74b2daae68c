"""Where the reports of one rank go: kept on the handle, logged, written to the event log, handed to the manager."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scout_core.manager_api import OrchestrationHooks
from scout_core.replay.guard import attempt, logger
from scout_core.report.courier import Courier
from scout_core.report.event_log import EventLog
from scout_core.report.fault_report import SCOUTFaultReport
from scout_core.trust.decision import RecoveryDecision

_KEPT_REPORTS = 1024
_LAST_WORDS_S = 2.0
"""How long a process that leaves for a restart waits for the manager's hooks."""


class ReportDesk:
    """Takes the reports of one rank, from the training thread and from monitors beside it.

    What the peers found together is told by the `first` of them alone, so that one fault is told once; what concerns
    this rank itself is told by it. `run_dir` None writes nothing. Nothing that goes wrong here is raised.
    """

    def __init__(self, run_dir: Path | None, hooks: OrchestrationHooks, *, first: bool) -> None:
        self.reports: deque[SCOUTFaultReport] = deque(maxlen=_KEPT_REPORTS)
        self._run_dir = run_dir
        self._hooks = hooks
        self._courier = Courier()
        self._first = first
        self._lock = threading.Lock()
        self._log = EventLog(run_dir) if run_dir is not None and first else None

    def take_shared(self, reports: Sequence[SCOUTFaultReport], check: Mapping[str, Any] | None = None) -> None:
        """Reports that are equal on every peer, and the record of the check that led to them."""
        self.reports.extend(reports)
        if not self._first:
            return
        if check is not None:
            self._write(check)
        for report in reports:
            self._tell(report)

    def take_own(self, report: SCOUTFaultReport) -> None:
        """A report of this rank's own: its hardware, its observer, its checks. Any thread may call."""
        self.reports.append(report)
        self._tell(report)

    def take_written(self, report: SCOUTFaultReport, *, deliver: bool) -> None:
        """A report that an observer has written to the event log: kept and logged, or handed to the manager by the one
        rank that is told to `deliver` it. Any thread may call."""
        if deliver:
            self._hand_on(report)
        else:
            self.reports.append(report)
            self._say(report)

    def take_decision(self, decision: RecoveryDecision) -> None:
        """A recovery decision, to be delivered before the fault it answers, which may be dropped before it is."""
        logger.warning("SCOUT recommends %s (step %s): %s", decision.mode, decision.step, decision.reason)
        self._write(decision.model_dump(mode="json"))
        self._courier.send("report_recovery", self._hooks.report_recovery, decision, kept=True)

    def announce_restart(self, decision: RecoveryDecision) -> None:
        """The processes are about to end for a restart: the manager may prepare the hosts."""
        self._courier.send("restart_destination", self._hooks.restart_destination, decision, kept=True)

    def drain(self) -> None:
        """Wait for the manager's hooks, for a moment only."""
        self._courier.drain(_LAST_WORDS_S)

    def close(self) -> None:
        """Close the event log and deliver what is queued; reports that come later are kept and logged."""
        self._courier.close()
        with self._lock:
            self._run_dir = None
            if self._log is not None:
                self._log.close()

    def _tell(self, report: SCOUTFaultReport) -> None:
        self._say(report)
        self._write(report.model_dump(mode="json"))
        self._hand_on(report)

    def _say(self, report: SCOUTFaultReport) -> None:
        level = {"info": logger.info, "warning": logger.warning, "fatal": logger.error}[report.severity]
        level("SCOUT %s at step %s: %s", report.kind.value, report.step, report.message)

    def _hand_on(self, report: SCOUTFaultReport) -> None:
        self._courier.send("report_fault", self._hooks.report_fault, report)

    def _write(self, record: Mapping[str, Any]) -> None:
        with self._lock:
            run_dir = self._run_dir
            if run_dir is not None:
                attempt("writing the event log", lambda: self._opened(run_dir).append(record))

    def _opened(self, run_dir: Path) -> EventLog:
        if self._log is None:
            self._log = EventLog(run_dir)
        return self._log
