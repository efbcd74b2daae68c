"""Where the reports of one rank go: kept on the handle, logged, written to the event log, handed to the manager."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scout_core.replay.guard import attempt, logger
from scout_core.report.event_log import EventLog
from scout_core.report.fault_report import SCOUTFaultReport

_KEPT_REPORTS = 1024


class ReportDesk:
    """Takes the reports of one rank, from the training thread and from monitors beside it.

    What the peers found together is told by the `first` of them alone, so that one fault is told once; what concerns
    this rank itself is told by it. `run_dir` None writes nothing. Nothing that goes wrong here is raised.
    """

    def __init__(
        self, run_dir: Path | None, report_fault: Callable[[SCOUTFaultReport], None] | None, *, first: bool
    ) -> None:
        self.reports: deque[SCOUTFaultReport] = deque(maxlen=_KEPT_REPORTS)
        self._run_dir = run_dir
        self._report_fault = report_fault
        self._first = first
        self._lock = threading.Lock()
        self._log = EventLog(run_dir) if run_dir is not None and first else None

    def take_check(self, check: Mapping[str, Any], reports: Sequence[SCOUTFaultReport]) -> None:
        """The record of one check and the reports it led to, equal on every peer."""
        self.reports.extend(reports)
        if not self._first:
            return
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

    def close(self) -> None:
        """Close the event log; reports that come later are still kept, logged and handed on."""
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
        callback = self._report_fault
        if callback is not None:
            attempt("calling the manager's report_fault", lambda: callback(report))

    def _write(self, record: Mapping[str, Any]) -> None:
        with self._lock:
            run_dir = self._run_dir
            if run_dir is not None:
                attempt("writing the event log", lambda: self._opened(run_dir).append(record))

    def _opened(self, run_dir: Path) -> EventLog:
        if self._log is None:
            self._log = EventLog(run_dir)
        return self._log
