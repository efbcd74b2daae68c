"""The rules of direct telemetry: each looks at one kind of trouble and says what it finds. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from scout_core.health.types import HealthAction, HealthSeverity, Metric, ReadingStatus
from scout_core.health.view import Finding, View

FATAL, WARNING, INFO = HealthSeverity.FATAL, HealthSeverity.WARNING, HealthSeverity.INFO

# Bits of nvmlDeviceGetCurrentClocksEventReasons, from nvml.h.
CLOCK_IDLE = 0x01
CLOCK_SW_POWER_CAP = 0x04
CLOCK_CAUSES = ((0x40, "thermal"), (0x20, "thermal"), (0x80, "power_brake"), (0x08, "hardware_slowdown"))

# nvmlDeviceGpuRecoveryAction_t, from nvml.h; the meaning of each is in NVIDIA's GPU memory error management guide.
_RECOVERY_ACTIONS = {
    1: (FATAL, HealthAction.EXCLUDE_UNTIL_RESET, "GPU reset"),
    2: (FATAL, HealthAction.EXCLUDE, "node reboot"),
    3: (FATAL, HealthAction.EXCLUDE_UNTIL_RESET, "drain peer-to-peer traffic"),
    4: (WARNING, HealthAction.RESET_AT_NEXT_STOP, "drain and reset"),
    5: (WARNING, HealthAction.CHECK_LINK, "recover the IMEX domain"),
    6: (FATAL, HealthAction.EXCLUDE_UNTIL_RESET, "bus reset"),
    7: (FATAL, HealthAction.EXCLUDE, "system reboot"),
}


def uncorrectable_ecc(view: View) -> Iterator[Finding]:
    metrics = [Metric.ECC_UNCORRECTABLE, Metric.SRAM_UNCORRECTABLE]
    if not view.offers(Metric.ECC_UNCORRECTABLE):
        metrics.append(Metric.ECC_UNCORRECTABLE_LIFETIME)
    grown = {metric: growth for metric in metrics if (growth := view.growth(metric))}
    above = view.config.uncorrectable_ecc_fatal_above
    if grown and max(grown.values()) > above:
        yield Finding(
            metric=Metric.ECC_UNCORRECTABLE,
            severity=FATAL,
            message=f"{max(grown.values())} uncorrectable memory error(s) since the monitor started",
            action=HealthAction.EXCLUDE_UNTIL_RESET,
            value=max(grown.values()),
            threshold=above,
            cause="memory",
            memory=True,
            evidence={"growth": grown},
        )


def correctable_ecc(view: View) -> Iterator[Finding]:
    for metric in (Metric.ECC_CORRECTABLE, Metric.SRAM_CORRECTABLE):
        grown = sum(view.recent(metric).values())
        if grown > view.config.correctable_ecc_warning_above:
            yield Finding(
                metric=metric,
                severity=WARNING,
                message=f"{grown} correctable memory error(s) within {view.config.window_s:g} s",
                value=grown,
                threshold=view.config.correctable_ecc_warning_above,
                cause="memory",
            )
    if view.flag(Metric.SRAM_THRESHOLD):
        yield Finding(
            metric=Metric.SRAM_THRESHOLD,
            severity=WARNING,
            message="the SRAM error threshold is exceeded: run NVIDIA's field diagnostic at the next stop",
            action=HealthAction.RESET_AT_NEXT_STOP,
            value=1,
            cause="memory",
        )


def row_remapping(view: View) -> Iterator[Finding]:
    counts = {m: view.number(m, 0, 2**32) for m in (Metric.REMAP_CORRECTABLE, Metric.REMAP_UNCORRECTABLE)}
    if view.flag(Metric.REMAP_FAILURE):
        yield Finding(
            metric=Metric.REMAP_FAILURE,
            severity=FATAL,
            message="row remapping failed: spare rows are exhausted, the GPU must be replaced",
            action=HealthAction.EXCLUDE,
            value=1,
            cause="memory",
            memory=True,
            evidence=counts,
        )
    if view.flag(Metric.REMAP_PENDING):
        yield Finding(
            metric=Metric.REMAP_PENDING,
            severity=WARNING,
            message="a row remap is pending: it is done by the next GPU reset, the job may go on",
            action=HealthAction.RESET_AT_NEXT_STOP,
            value=1,
            cause="memory",
            memory=True,
            evidence=counts,
        )


def link_errors(view: View) -> Iterator[Finding]:
    limits = {
        Metric.NVLINK_RECOVERY: view.config.nvlink_recovery_fatal_above,
        Metric.NVLINK_CRC: view.config.nvlink_crc_fatal_above,
        Metric.NVLINK_RECOVERY_FAILED: 0,
        Metric.NVLINK_REPLAY: None,
    }
    for metric, fatal_above in limits.items():
        by_link = view.recent(metric)
        grown = sum(by_link.values())
        fatal = fatal_above is not None and grown > fatal_above
        if not fatal and grown <= view.config.nvlink_warning_above:
            continue
        where = ", ".join(part for part in sorted(by_link) if part) or "links not told apart"
        yield Finding(
            metric=metric,
            severity=FATAL if fatal else WARNING,
            message=f"{metric} grew by {grown} within {view.config.window_s:g} s ({where})",
            action=HealthAction.EXCLUDE_UNTIL_RESET if fatal else HealthAction.CHECK_LINK,
            value=grown,
            threshold=fatal_above if fatal else view.config.nvlink_warning_above,
            cause="nvlink",
            evidence={"growth_by_link": by_link},
        )


def temperature(view: View) -> Iterator[Finding]:
    margin = shutdown_margin(view)
    if margin is None or margin > view.config.warning_temperature_margin_c:
        return
    fatal = margin <= view.config.fatal_temperature_margin_c
    yield Finding(
        metric=Metric.SHUTDOWN_MARGIN,
        severity=FATAL if fatal else WARNING,
        message=f"{margin:g} degrees C below the hardware's shutdown temperature",
        action=HealthAction.EXCLUDE if fatal else HealthAction.OBSERVE,
        value=margin,
        threshold=view.config.fatal_temperature_margin_c if fatal else view.config.warning_temperature_margin_c,
        cause="thermal",
        evidence={"temperature_c": view.number(Metric.TEMPERATURE, -60, 200)},
    )


def shutdown_margin(view: View) -> float | None:
    """Degrees C left before the hardware shuts down; the smaller of the absolute and the T.Limit way of telling.

    T.Limit counts down to the operating limit and `tlimit_at_shutdown` is its (negative) value at shutdown.
    """
    now, shutdown = view.number(Metric.TEMPERATURE, -60, 200), view.number(Metric.TEMPERATURE_SHUTDOWN, 50, 200)
    left, end = view.number(Metric.TLIMIT_MARGIN, -100, 200), view.number(Metric.TLIMIT_SHUTDOWN, -100, 50)
    margins = [a - b for a, b in ((shutdown, now), (left, end)) if a is not None and b is not None]
    return min(margins) if margins else None


def busy(view: View) -> bool | None:
    """Whether the GPU works now; None when nothing tells. Slow links and clocks of an idle GPU are normal."""
    reasons = view.number(Metric.CLOCK_EVENTS, 0, 2**63)
    if reasons is not None:
        return not int(reasons) & CLOCK_IDLE
    utilization = view.number(Metric.UTILIZATION, 0, 100)
    return None if utilization is None else utilization >= 10


def clocks(view: View) -> Iterator[Finding]:
    number = view.number(Metric.CLOCK_EVENTS, 0, 2**63)
    reasons = int(number) if number is not None else 0
    mhz = {"sm_mhz": view.number(Metric.CLOCK_SM, 0, 1e5), "sm_max_mhz": view.number(Metric.CLOCK_SM_MAX, 0, 1e5)}
    cause = next((name for bit, name in CLOCK_CAUSES if reasons & bit), None)
    if cause is not None:
        yield Finding(
            metric=Metric.CLOCK_EVENTS,
            severity=WARNING,
            message=f"the clock is held down ({cause.replace('_', ' ')})",
            value=reasons,
            cause=cause,
            evidence=mhz,
        )
    limit, default = view.number(Metric.POWER_LIMIT, 0, 1e5), view.number(Metric.POWER_DEFAULT, 1, 1e5)
    if not reasons & CLOCK_SW_POWER_CAP or limit is None or default is None:
        return  # running into an undiminished power limit is how a busy GPU normally looks
    if limit < view.config.power_limit_warning_ratio * default:
        yield Finding(
            metric=Metric.POWER_CAP,
            severity=WARNING,
            message=f"the power cap of {limit:g} W (board default {default:g} W) holds the clock down",
            value=limit,
            threshold=view.config.power_limit_warning_ratio * default,
            cause="power_cap",
            evidence=mhz,
        )


def pcie_link(view: View) -> Iterator[Finding]:
    shortfall: dict[str, str] = {}
    known = False
    for metric in (Metric.PCIE_GENERATION, Metric.PCIE_WIDTH):
        reading, value = view.ok(metric), view.number(metric, 1, 64)
        if reading is None or value is None or reading.limit is None:
            continue
        known = True
        if value < reading.limit:
            shortfall[metric] = f"{value:g} of {reading.limit:g}"
    working = busy(view)
    if view.confirmed(Metric.PCIE_LINK, (bool(shortfall) and working) if known and working is not None else None):
        yield Finding(
            metric=Metric.PCIE_LINK,
            severity=WARNING,
            message=f"the PCIe link runs below its best under load: {shortfall}",
            action=HealthAction.CHECK_LINK,
            cause="pcie",
            evidence=shortfall,
        )


def recovery_action(view: View) -> Iterator[Finding]:
    value = view.number(Metric.RECOVERY_ACTION, 0, 1000)
    if not value:
        return
    unknown = (WARNING, HealthAction.RESET_AT_NEXT_STOP, f"action {value:g}")
    severity, action, words = _RECOVERY_ACTIONS.get(int(value), unknown)
    yield Finding(
        metric=Metric.RECOVERY_ACTION,
        severity=severity,
        message=f"the driver asks for: {words}",
        action=action,
        value=int(value),
        cause="needs_reset",
    )


def fabric_state(view: View) -> Iterator[Finding]:
    """A fabric that is not up matters only to a GPU that works over links that are not up either."""
    reading = view.ok(Metric.FABRIC_STATE)
    if reading is None or reading.value in ("completed", "not_supported"):
        return
    links = view.ok(Metric.NVLINK_LINKS)
    down = links is not None and bool(links.limit) and links.value == 0
    severity = WARNING if down and busy(view) else INFO
    yield Finding(
        metric=Metric.FABRIC_STATE,
        severity=severity,
        message=f"the NVLink fabric is {str(reading.value).replace('_', ' ')}",
        action=HealthAction.CHECK_LINK if severity is WARNING else HealthAction.CONTINUE,
        value=reading.value,
        cause="nvlink",
    )


def staleness(view: View) -> Iterator[Finding]:
    late = next((r for r in view.sample.readings if r.status is ReadingStatus.STALE), None)
    if late is not None:
        yield Finding(
            metric=Metric.TELEMETRY_STALE,
            severity=WARNING,
            message=f"telemetry is stale: {late.reason}",
            value=late.value,
            cause="telemetry",
        )


def custom(view: View) -> Iterator[Finding]:
    """Readings of caller-supplied sources that this package does not know: their own severity counts."""
    for metric, reading in sorted(view.readings().items()):
        if metric not in KNOWN and reading.severity is not None:
            yield Finding(
                metric=metric,
                severity=reading.severity,
                message=reading.reason or f"{metric} = {reading.value}",
                action=HealthAction.EXCLUDE if reading.severity is FATAL else HealthAction.OBSERVE,
                value=reading.value,
                cause="source",
            )


KNOWN = frozenset(value for name, value in vars(Metric).items() if not name.startswith("_"))

RULES: tuple[Callable[[View], Iterator[Finding]], ...] = (
    uncorrectable_ecc,
    correctable_ecc,
    row_remapping,
    link_errors,
    temperature,
    clocks,
    pcie_link,
    recovery_action,
    fabric_state,
    staleness,
    custom,
)

INPUTS = {
    Metric.SHUTDOWN_MARGIN: (Metric.TEMPERATURE, Metric.TLIMIT_MARGIN),
    Metric.POWER_CAP: (Metric.CLOCK_EVENTS,),
    Metric.PCIE_LINK: (Metric.PCIE_GENERATION, Metric.PCIE_WIDTH),
    Metric.NVLINK_FABRIC: (Metric.NVLINK_LINKS,),
}
"""Which readings must answer before the silence of a rule ends a warning; by default the metric itself."""
