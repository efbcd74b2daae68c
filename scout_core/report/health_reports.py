"""Hardware events as fault reports. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from scout_core.health.cause import SLOWDOWN_CAUSES
from scout_core.health.identity_map import IdentityMap
from scout_core.health.types import HOST, DeviceIdentity, HealthAction, HealthEvent, HealthSeverity, Metric
from scout_core.report.fault_report import FaultKind, RecommendedAction, SCOUTFaultReport, Severity, VerdictStatus

_RECOMMENDED: dict[HealthAction, RecommendedAction] = {
    HealthAction.CONTINUE: "continue",
    HealthAction.OBSERVE: "observe",
    HealthAction.RESET_AT_NEXT_STOP: "observe",
    HealthAction.CHECK_LINK: "observe",
    HealthAction.RESTART_RANK: "restart",
    HealthAction.EXCLUDE_UNTIL_RESET: "restart_excluding",
    HealthAction.EXCLUDE: "restart_excluding",
}
_HARDWARE = (FaultKind.HARDWARE_WARNING, FaultKind.HARDWARE_FAULT)
_TELEMETRY = (Metric.TELEMETRY_LOST, Metric.TELEMETRY_STALE)


def health_report(
    event: HealthEvent,
    *,
    ranks: IdentityMap | None = None,
    step: int | None = None,
    step_at: Callable[[float], int | None] | None = None,
    phase: str = "train",
) -> SCOUTFaultReport:
    """The report of one health event. Called on the rank, or in the manager, that runs the monitor; no collectives.

    `ranks` names the ranks on the device (or host); without it the event's own rank is named, if it carries one.
    `step_at` maps monotonic seconds to the optimizer step of that time: `first_seen_step` is then the step of the
    earliest sign, from which on no checkpoint should be certified when `evidence["blocks_certification"]` is true.

    Telemetry names a device directly, so a fatal event is Attributed with basis `direct`. Lost or stale telemetry
    accuses nobody: Inconclusive, no ranks.
    """
    accuses = event.metric not in _TELEMETRY
    identity = _identity(event, ranks)
    named = _ranks(event, identity, ranks) if accuses else ()
    return SCOUTFaultReport(
        kind=_kind(event),
        severity=_severity(event),
        status=_status(event, accuses),
        scope="host" if event.device == HOST else "device",
        ranks=named,
        hosts=(identity.host,) * max(1, len(named)) if identity is not None else (),
        devices=() if event.device == HOST else (event.device,) * max(1, len(named)),
        surface=event.metric,
        phase=phase,
        step=step,
        first_seen_step=step_at(event.first_sign_s) if step_at is not None else None,
        confidence=1.0 if accuses else 0.5,
        basis="direct" if accuses else "none",
        evidence=_evidence(event, identity),
        recommended_action=_RECOMMENDED[event.action],
        message=_message(event, identity),
    )


def with_hardware_cause(slow: SCOUTFaultReport, hardware: Iterable[SCOUTFaultReport]) -> SCOUTFaultReport:
    """`slow`, if it is a compute straggler on whose rank the hardware told of a reason, with that reason. Pure.

    `hardware` are reports of `health_report`, of any rank and kind; those that began after `slow` explain nothing.
    Adds `hardware_cause` (one of `SLOWDOWN_CAUSES`) and `hardware_message` to the evidence. It explains a rank that was
    measured to be slow, and never makes one slow that was not.
    """
    if slow.kind is not FaultKind.COMPUTE_STRAGGLER:
        return slow
    found: dict[str, SCOUTFaultReport] = {}
    for report in hardware:
        began = report.step if report.first_seen_step is None else report.first_seen_step
        late = began is not None and slow.step is not None and began > slow.step
        if report.kind in _HARDWARE and set(report.ranks) & set(slow.ranks) and not late:
            found.setdefault(str(report.evidence.get("cause")), report)
    cause = next((name for name in SLOWDOWN_CAUSES if name in found), None)
    if cause is None:
        return slow
    told = {"hardware_cause": cause, "hardware_message": found[cause].message}
    return slow.model_copy(update={"evidence": {**slow.evidence, **told}})


def ranks_accessible(report: SCOUTFaultReport) -> bool:
    """Whether the ranks a hardware report names may still hand over their newest state. Pure.

    False for hardware that is to be excluded: the contract's recovery table then selects the RECOVERY_VERIFIED
    checkpoint ('required rank or machine inaccessible'). It is the `all_ranks_accessible` of a recovery decision.
    """
    return report.recommended_action != "restart_excluding"


def _kind(event: HealthEvent) -> FaultKind:
    if event.metric in _TELEMETRY:
        return FaultKind.TELEMETRY_LOST
    return FaultKind.HARDWARE_FAULT if event.severity is HealthSeverity.FATAL else FaultKind.HARDWARE_WARNING


def _severity(event: HealthEvent) -> Severity:
    names: dict[HealthSeverity, Severity] = {
        HealthSeverity.INFO: "info",
        HealthSeverity.WARNING: "warning",
        HealthSeverity.FATAL: "fatal",
    }
    return names[event.severity]


def _status(event: HealthEvent, accuses: bool) -> VerdictStatus:
    return "Attributed" if accuses and event.severity is HealthSeverity.FATAL else "Inconclusive"


def _identity(event: HealthEvent, ranks: IdentityMap | None) -> DeviceIdentity | None:
    if event.identity is None or ranks is None:
        return event.identity
    return ranks.completed(event.identity)


def _ranks(event: HealthEvent, identity: DeviceIdentity | None, ranks: IdentityMap | None) -> tuple[int, ...]:
    """A fatal event blames the ranks on its device. A fault of the whole machine blames all of its ranks."""
    if ranks is None:
        return () if identity is None or identity.rank is None else (identity.rank,)
    if event.device == HOST:
        return ranks.ranks_on(identity.host) if identity is not None else ()
    found = ranks.ranks_of(event.device, identity.host if identity is not None else None)
    if found or identity is None or identity.rank is None:
        return found
    return (identity.rank,)


def _evidence(event: HealthEvent, identity: DeviceIdentity | None) -> dict[str, Any]:
    told = event.to_json()
    kept = ("metric", "value", "threshold", "cause", "action", "source", "blocks_certification", "evidence")
    return {**{name: told[name] for name in kept}, "identity": identity.to_json() if identity is not None else None}


def _message(event: HealthEvent, identity: DeviceIdentity | None) -> str:
    if identity is None:
        return f"{event.device}: {event.message}"
    place = [f"host {identity.host}"]
    if event.device != HOST:
        place += [event.device] + ([f"PCI {identity.pci_bus_id}"] if identity.pci_bus_id else [])
    if identity.rank is not None:
        place.append(f"rank {identity.rank}")
    return f"{', '.join(place)}: {event.message}"
