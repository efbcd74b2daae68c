"""Readings, baseline and history become events. Pure: no clock, device, file or thread in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from scout_core.health.config import HealthConfig
from scout_core.health.history import DeviceHistory, HealthHistory
from scout_core.health.rounds import RoundFacts, host_findings, presence_findings, round_facts
from scout_core.health.rules import INPUTS, RULES
from scout_core.health.types import (
    HOST,
    DeviceIdentity,
    DeviceSample,
    HealthEvent,
    HealthSeverity,
    Metric,
    ReadingStatus,
)
from scout_core.health.view import Finding, View
from scout_core.health.xid_rules import judge_xids

_MOST_METRICS = 512
"""Warnings in force, and fatal metrics, remembered per device; a source that invents names cannot grow them further."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """Events of one round, in order of device, and the history to hand in with the next round."""

    events: tuple[HealthEvent, ...]
    history: HealthHistory


def classify(samples: Iterable[DeviceSample], history: HealthHistory, config: HealthConfig) -> Judgement:
    """Judge one round: at most one sample of each device from each source.

    Each fatal (device, metric) is an event once in the life of a history, each warning once as long as it lasts.
    Devices are judged independently of the order of `samples`; only two things look across them: silence of all at
    once is lost telemetry and not lost devices, and links down on all at once is the fabric and not a device.
    """
    ordered = sorted(samples, key=lambda sample: (sample.device, sample.source))
    facts = round_facts(ordered, config)
    devices = dict(history.devices)
    events: list[HealthEvent] = []
    for sample in ordered:
        past = devices.get(sample.device) or DeviceHistory()
        found, devices[sample.device] = _judge_sample(sample, past, facts, history.started_s, config)
        events += found
    found, host = _judge_host(facts, devices.get(HOST), config)
    if host is not None:
        devices[HOST] = host
    return Judgement(events=(*events, *found), history=replace(history, devices=devices))


def _judge_sample(
    sample: DeviceSample, past: DeviceHistory, facts: RoundFacts, started_s: float, config: HealthConfig
) -> tuple[list[HealthEvent], DeviceHistory]:
    view = View(sample, past, config)
    findings = [(sample.time_s, finding) for rule in RULES for finding in rule(view)]
    findings += [(sample.time_s, finding) for finding in presence_findings(view, facts)]
    xids = judge_xids(
        sample.readings, past, source=sample.source, now_s=sample.time_s, started_s=started_s, config=config
    )
    findings += xids.findings
    identity = next((r.identity for r in sample.readings if r.identity is not None), None)
    events, past = _settle(findings, past, sample, identity)
    return events, replace(
        past,
        counters=view.counters,
        streaks=view.streaks,
        active=_still_active(past.active, {finding.metric for _, finding in findings}, view),
        xid_seen=xids.seen,
        xid_told=xids.told,
        burst=xids.burst,
        answered=_answered(view) if _judges_presence(view) else past.answered,
    )


def _settle(
    findings: list[tuple[float, Finding]], past: DeviceHistory, sample: DeviceSample, identity: DeviceIdentity | None
) -> tuple[list[HealthEvent], DeviceHistory]:
    """Turn findings into events that were not told before, and remember that they were told."""
    active, latched, sign = dict(past.active), set(past.latched), past.memory_sign_s
    events: list[HealthEvent] = []
    for time_s, finding in findings:
        if finding.memory:
            sign = time_s if sign is None else min(sign, time_s)
        event = _event(finding, sample, time_s, sign if finding.memory and sign is not None else time_s, identity)
        if finding.metric in latched or max(len(active), len(latched)) >= _MOST_METRICS:
            continue
        if finding.severity is HealthSeverity.FATAL:
            latched.add(finding.metric)
            active.pop(finding.metric, None)
        elif not finding.told_once:
            known = active.get(finding.metric)
            if known is not None and known.severity is finding.severity:
                continue
            active[finding.metric] = event
        events.append(event)
    return events, replace(past, active=active, latched=frozenset(latched), memory_sign_s=sign)


def _event(
    finding: Finding, sample: DeviceSample, time_s: float, first_sign_s: float, identity: DeviceIdentity | None
) -> HealthEvent:
    fatal = finding.severity is HealthSeverity.FATAL
    return HealthEvent(
        severity=finding.severity,
        device=sample.device,
        metric=finding.metric,
        time_s=time_s,
        first_sign_s=first_sign_s,
        message=finding.message,
        action=finding.action,
        value=finding.value,
        threshold=finding.threshold,
        cause=finding.cause,
        blocks_certification=fatal and finding.memory,
        evidence=finding.evidence,
        identity=identity,
        source=sample.source,
    )


def _still_active(active: Mapping[str, HealthEvent], found: set[str], view: View) -> dict[str, HealthEvent]:
    """A warning ends when its own source was asked again, answered, and no longer shows it. Silence ends nothing."""
    return {
        metric: event
        for metric, event in active.items()
        if metric in found or event.source != view.sample.source or not _answers(metric, view)
    }


def _answers(metric: str, view: View) -> bool:
    if metric == Metric.TELEMETRY_STALE:
        return bool(view.readings()) and all(r.status is not ReadingStatus.STALE for r in view.sample.readings)
    return any(view.ok(name) is not None for name in INPUTS.get(metric, (metric,)))


def _judges_presence(view: View) -> bool:
    return any(r.metric in (Metric.PRESENCE, Metric.TELEMETRY_STALE) for r in view.sample.readings) or bool(
        view.readings()
    )


def _answered(view: View) -> bool:
    presence = view.ok(Metric.PRESENCE)
    return bool(view.readings()) if presence is None else presence.value == "present"


def _judge_host(
    facts: RoundFacts, past: DeviceHistory | None, config: HealthConfig
) -> tuple[list[HealthEvent], DeviceHistory | None]:
    """Findings about the machine as a whole. They need no streak of their own device's counters."""
    past = past or DeviceHistory()
    if facts.time_s is None:
        return [], None
    sample = DeviceSample(device=HOST, time_s=facts.time_s, readings=(), source="round")
    view = View(sample, past, config)
    findings = [(facts.time_s, finding) for finding in host_findings(view, facts)]
    identity = DeviceIdentity(host=facts.host) if facts.host is not None else None
    events, past = _settle(findings, past, sample, identity)
    found = {finding.metric for _, finding in findings}
    kept = {metric: event for metric, event in past.active.items() if metric in found or facts.unasked}
    return events, replace(past, streaks=view.streaks, active=kept)
