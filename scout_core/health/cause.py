"""Hardware reasons for slowness, for whoever judges stragglers. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from scout_core.health.types import HealthEvent, Metric

_BY_METRIC = {
    Metric.SHUTDOWN_MARGIN: "thermal",
    Metric.POWER_CAP: "power_cap",
    Metric.PCIE_LINK: "pcie",
    Metric.NVLINK_LINKS: "nvlink",
    Metric.NVLINK_FABRIC: "nvlink",
}
SLOWDOWN_CAUSES = ("thermal", "power_brake", "hardware_slowdown", "power_cap", "nvlink", "pcie")
"""Most telling first."""


def slowdown_cause(in_force: Iterable[HealthEvent], device: str) -> str | None:
    """Why `device` may be slow, by the warnings in force (`HardwareHealthMonitor.active_warnings()`).

    `thermal`, `power_brake`, `hardware_slowdown`, `power_cap`, `nvlink`, `pcie`, or None. A cause explains a rank
    that was measured to be slow; it never makes a rank slow that was not.
    """
    found = set()
    for event in in_force:
        if event.device != device:
            continue
        found.add(event.cause if event.metric == Metric.CLOCK_EVENTS else _BY_METRIC.get(event.metric))
    return next((cause for cause in SLOWDOWN_CAUSES if cause in found), None)
