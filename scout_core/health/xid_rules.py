"""XID readings of one device: new or old, cause or consequence. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scout_core.health.config import HealthConfig
from scout_core.health.history import DeviceHistory, XidBurst, counter_value
from scout_core.health.types import HealthReading, HealthSeverity, Metric, ReadingStatus
from scout_core.health.view import Finding
from scout_core.health.xid import XidClass, XidMeaning, explained_by, xid_meaning

_SEVERITY = {
    XidClass.FATAL: HealthSeverity.FATAL,
    XidClass.WARNING: HealthSeverity.WARNING,
    XidClass.APPLICATION: HealthSeverity.WARNING,
    XidClass.CONSEQUENCE: HealthSeverity.INFO,
}
_MOST_CODES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class XidOutcome:
    """Findings with the time of each, and what the device's history becomes."""

    findings: tuple[tuple[float, Finding], ...]
    seen: Mapping[str, tuple[float, int]]
    told: Mapping[int, float]
    burst: XidBurst | None


def judge_xids(
    readings: tuple[HealthReading, ...],
    past: DeviceHistory,
    *,
    source: str,
    now_s: float,
    started_s: float,
    config: HealthConfig,
) -> XidOutcome:
    """Judge the XIDs of one sample, oldest first.

    An XID counts when its sequence number (or, without one, its time) is newer than the last one taken from this
    source, and when it happened after `started_s`. A reading with neither is a gauge: only a change of it counts.
    """
    seen, told, burst = dict(past.xid_seen), dict(past.xid_told), past.burst
    findings: list[tuple[float, Finding]] = []
    ordered = sorted((r for r in readings if r.metric == Metric.XID and r.status is ReadingStatus.OK), key=_when)
    for reading in ordered:
        code = counter_value(reading.value)
        if code is None or not _is_new(reading, code, seen, source, started_s):
            continue
        when = reading.occurred_s if reading.occurred_s is not None else now_s
        meaning = xid_meaning(code, reading.reason, config.fatal_xids)
        if burst is not None and when - burst.last_s > config.xid_burst_s:
            burst = None
        cause = burst.cause if burst is not None else None
        folded = meaning.klass is not XidClass.FATAL or explained_by(meaning, cause)
        # A storm of one code is told once; a fatal one always, since the caller tells each fatal once anyway.
        if not folded or told.get(code) is None or when - told[code] > config.window_s:
            findings.append((when, _finding(meaning, reading, cause)))
        if len(told) < _MOST_CODES or code in told:
            told[code] = when
        burst = XidBurst(cause=cause if folded else meaning, last_s=when)
    return XidOutcome(findings=tuple(findings), seen=seen, told=told, burst=burst)


def _when(reading: HealthReading) -> tuple[float, int]:
    return (reading.occurred_s if reading.occurred_s is not None else 0.0, reading.sequence or 0)


def _is_new(
    reading: HealthReading, code: int, seen: dict[str, tuple[float, int]], source: str, started_s: float
) -> bool:
    """Edge detection; updates `seen`."""
    key = f"{source}|gauge" if reading.occurred_s is None and reading.sequence is None else source
    last = seen.get(key)
    if key != source:
        # A gauge's first value is the baseline. 0 means 'none yet' in every exporter that has such a gauge.
        seen[key] = (0.0, code)
        return last is not None and last[1] != code and code != 0
    mark = (reading.occurred_s if reading.occurred_s is not None else 0.0, reading.sequence or 0)
    if last is not None and (mark[1] <= last[1] if reading.sequence is not None else mark[0] <= last[0]):
        return False
    seen[key] = mark
    return reading.occurred_s is None or reading.occurred_s >= started_s


def _finding(meaning: XidMeaning, reading: HealthReading, cause: XidMeaning | None) -> Finding:
    text = f"XID {meaning.code} ({meaning.mnemonic})" + (f": {reading.reason}" if reading.reason else "")
    if cause is not None and (explained_by(meaning, cause) or meaning.klass is XidClass.CONSEQUENCE):
        return Finding(
            metric=f"xid.{meaning.code}",
            severity=HealthSeverity.INFO,
            message=f"{text}; a consequence of XID {cause.code}",
            action=cause.action,
            value=meaning.code,
            cause=f"xid.{cause.code}",
            told_once=True,
        )
    return Finding(
        metric=f"xid.{meaning.code}",
        severity=_SEVERITY[meaning.klass],
        message=f"{text}{'; ' + meaning.note if meaning.note else ''}",
        action=meaning.action,
        value=meaning.code,
        cause={XidClass.APPLICATION: "application", XidClass.CONSEQUENCE: "process_end"}.get(meaning.klass, "xid"),
        memory=meaning.memory and meaning.klass in (XidClass.FATAL, XidClass.WARNING),
        told_once=True,
        evidence={"immediate_action": meaning.immediate, "kernel_message": reading.reason},
    )
