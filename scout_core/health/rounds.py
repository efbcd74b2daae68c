"""What one round of polling says across devices: who answers, whether telemetry or the fabric as a whole is down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from scout_core.health.config import HealthConfig
from scout_core.health.types import (
    NODE_WIDE,
    SIBLINGS,
    DeviceSample,
    HealthAction,
    HealthReading,
    HealthSeverity,
    Metric,
    ReadingStatus,
)
from scout_core.health.view import Finding, View


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundFacts:
    """`lost_telemetry`: reason by device whose telemetry, and not itself, is gone. `unasked`: the round says nothing
    about presence at all. `fabric_down`: devices whose dead links are the fabric's fault, not theirs."""

    time_s: float | None = None
    host: str | None = None
    answering: frozenset[str] = frozenset()
    lost_telemetry: Mapping[str, str] = field(default_factory=dict)
    unasked: bool = True
    fabric_down: frozenset[str] = frozenset()


def expected_links(reading: HealthReading, config: HealthConfig) -> int:
    return int(reading.limit or 0) if config.expected_nvlinks is None else config.expected_nvlinks


def round_facts(samples: Sequence[DeviceSample], config: HealthConfig) -> RoundFacts:
    """Pure; independent of the order of `samples`."""
    presence = [r for s in samples for r in s.readings if _judged(r, Metric.PRESENCE)]
    answering = frozenset(r.device for r in presence if r.value == "present")
    alone = {
        r.device: r.reason
        for r in presence
        if r.value == "unavailable" or (r.value == "unreachable" and not _others_answer(r, answering))
    }
    links = [r for s in samples for r in s.readings if _judged(r, Metric.NVLINK_LINKS) and expected_links(r, config)]
    dead = frozenset(r.device for r in links if r.value == 0)
    whole = len(dead) > 1 and all(r.device in dead for r in links)
    node_wide = frozenset(r.device for r in links if r.value == 0 and r.reason == NODE_WIDE)
    hosts = sorted({r.identity.host for s in samples for r in s.readings if r.identity is not None})
    return RoundFacts(
        time_s=max((s.time_s for s in samples), default=None),
        host=hosts[0] if hosts else None,
        answering=answering,
        lost_telemetry=dict(sorted(alone.items())),
        unasked=not presence,
        fabric_down=dead if whole else node_wide,
    )


def _judged(reading: HealthReading, metric: str) -> bool:
    return reading.metric == metric and reading.status is ReadingStatus.OK


def _others_answer(reading: HealthReading, answering: frozenset[str]) -> bool:
    return bool(reading.parts.get(SIBLINGS) or answering - {reading.device})


def presence_findings(view: View, facts: RoundFacts) -> Iterator[Finding]:
    """Loss of the device and of its own links."""
    reading = view.ok(Metric.PRESENCE)
    silent = None if reading is None else reading.value == "unreachable" and _others_answer(reading, facts.answering)
    confirmed = view.confirmed(Metric.PRESENCE, silent)
    if reading is not None and (reading.value == "lost" or confirmed):
        said = reading.value == "lost"
        yield Finding(
            metric=Metric.PRESENCE,
            severity=HealthSeverity.FATAL,
            message=f"the device is lost: {reading.reason}"
            if said
            else f"the device answers nothing while others do: {reading.reason}",
            action=HealthAction.EXCLUDE,
            value=reading.value,
            cause="device_lost",
        )
    yield from _link_findings(view, facts)


def _link_findings(view: View, facts: RoundFacts) -> Iterator[Finding]:
    reading, active = view.ok(Metric.NVLINK_LINKS), view.number(Metric.NVLINK_LINKS, 0, 1024)
    if reading is None or active is None:
        return
    expected = expected_links(reading, view.config)
    own_fault = active < expected and view.sample.device not in facts.fabric_down
    if view.confirmed(Metric.NVLINK_LINKS, own_fault):
        inactive = sorted((part for part, up in reading.parts.items() if not up), key=lambda p: (len(p), p))
        yield Finding(
            metric=Metric.NVLINK_LINKS,
            severity=HealthSeverity.FATAL,
            message=f"{active:g} of {expected} NVLinks are active (down: {', '.join(inactive) or 'not listed'})",
            action=HealthAction.EXCLUDE_UNTIL_RESET,
            value=active,
            threshold=expected,
            cause="nvlink",
            evidence={"inactive": inactive},
        )


def host_findings(view: View, facts: RoundFacts) -> Iterator[Finding]:
    """Telemetry lost as a whole, fabric down as a whole. `view` is that of the host's own pseudo-device."""
    if facts.lost_telemetry:
        reason = next(iter(facts.lost_telemetry.values()))
        yield Finding(
            metric=Metric.TELEMETRY_LOST,
            severity=HealthSeverity.WARNING,
            message=f"telemetry is lost or was never there ({reason}); no device is accused and the job may go on; "
            "where it worked before, a restart inside this container may not find its GPUs",
            action=HealthAction.CONTINUE,
            cause="telemetry",
            evidence={"devices": dict(facts.lost_telemetry)},
        )
    if view.confirmed(Metric.NVLINK_FABRIC, bool(facts.fabric_down)):
        yield Finding(
            metric=Metric.NVLINK_FABRIC,
            severity=HealthSeverity.FATAL,
            message="no GPU of this node has an active NVLink although the product has them: the fabric is down",
            action=HealthAction.EXCLUDE,
            cause="nvlink",
            evidence={"devices": sorted(facts.fabric_down)},
        )
