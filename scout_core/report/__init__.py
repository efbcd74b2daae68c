"""Fault reports and the event log."""

from scout_core.report.fault_report import FaultKind, SCOUTFaultReport

__all__ = ["FaultKind", "SCOUTFaultReport"]
