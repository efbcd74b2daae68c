"""Fault reports and the event log."""

from scout_core.report.event_log import EventLog
from scout_core.report.fault_report import FaultKind, SCOUTFaultReport

__all__ = ["EventLog", "FaultKind", "SCOUTFaultReport"]
