"""`scout health`: what the hardware says now, once, repeatedly, or as a stream of fault reports for a manager.

Part of the command line, and imported only by it.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scout_core.health.config import HealthConfig
from scout_core.health.fake_nvml import FakeNvml
from scout_core.health.monitor import HardwareHealthMonitor
from scout_core.health.nvml import NvmlSource
from scout_core.health.nvml_api import NvmlApi, NvmlUnavailable
from scout_core.health.table import health_json, health_lines
from scout_core.health.types import HealthEvent, HealthSource
from scout_core.health.xid_source import XidSource

if TYPE_CHECKING:
    from typer import Typer

EXIT_HEALTHY = 0
EXIT_FATAL = 1
EXIT_NO_TELEMETRY = 3
"""Exit codes of `scout health`; 2 is a usage error. Warnings do not change the code."""


def add_health_command(app: Typer) -> None:
    """Add the command `health` to a typer application."""
    import typer

    @app.command("health", help="What the GPUs say about themselves. Exit code 0: no fault, 1: fault, 3: no telemetry.")
    def health(
        watch: bool = typer.Option(False, "--watch", help="repeat until interrupted"),
        as_json: bool = typer.Option(False, "--json", help="one JSON record per poll"),
        interval_s: float = typer.Option(10.0, "--interval", min=0.05, help="seconds between polls"),
        device: list[int] = typer.Option([], "--device", min=0, help="physical NVML index; default: all"),
        fake: Path | None = typer.Option(
            None, "--fake", exists=True, dir_okay=False, help="drill: read this JSON description instead of NVML"
        ),
        kernel_log: Path = typer.Option(Path("/dev/kmsg"), "--kernel-log", help="kernel log to follow for XIDs"),
        serve_events: Path | None = typer.Option(
            None, "--serve-events", dir_okay=False, help="append each event as a fault report, until interrupted"
        ),
    ) -> None:
        try:
            module = FakeNvml.from_file(fake) if fake is not None else None
        except ValueError as error:
            raise typer.BadParameter(f"{fake}: {error}") from error
        config = HealthConfig(poll_interval_s=interval_s, confirmations=2 if watch or serve_events else 1)
        stop = threading.Event()
        if watch or serve_events is not None:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: stop.set())
        code = run_health(
            config,
            module=module,
            devices=device,
            kernel_log=kernel_log,
            stop=stop if watch or serve_events is not None else None,
            as_json=as_json,
            serve_events=serve_events,
            reload_fake=fake,
            write=typer.echo,
        )
        raise typer.Exit(code)


def run_health(
    config: HealthConfig,
    *,
    write: Callable[[str], None],
    module: Any = None,
    devices: Sequence[int] = (),
    kernel_log: Path | None = None,
    stop: threading.Event | None = None,
    as_json: bool = False,
    serve_events: Path | None = None,
    reload_fake: Path | None = None,
) -> int:
    """Poll once (`stop` None) or until `stop` is set, writing a table, JSON, or only the events file.

    Returns the exit code. With `reload_fake` the fake's file is read again before every poll, so that a drill can
    change it. `serve_events` gets one `SCOUTFaultReport` a line, fatal ones and warnings.
    """
    try:
        indices = list(devices) or _all_devices(module)
    except NvmlUnavailable as error:
        write(json.dumps({"devices": [], "events": [], "unavailable": str(error)}) if as_json else str(error))
        return EXIT_NO_TELEMETRY
    if not indices:
        write(json.dumps({"devices": [], "events": [], "unavailable": "no GPU"}) if as_json else "NVML shows no GPU")
        return EXIT_NO_TELEMETRY
    sources: list[HealthSource] = [NvmlSource(device_index=index, module=module) for index in indices]
    sources.append(XidSource(module=module, kernel_log=kernel_log))
    tell = _event_writer(serve_events) if serve_events is not None else None
    monitor = HardwareHealthMonitor(config, sources, on_event=tell, on_warning=tell)
    try:
        while True:
            if isinstance(module, FakeNvml) and reload_fake is not None:
                module.reload(reload_fake)
            monitor.poll_once()
            if serve_events is None:
                _show(monitor, write, as_json)
            if stop is None or stop.wait(config.poll_interval_s):
                break
    finally:
        monitor.close()
    if monitor.fatal_events:
        return EXIT_FATAL
    answered = any(state not in ("unknown", "stale") for state in monitor.status().values())
    return EXIT_HEALTHY if answered else EXIT_NO_TELEMETRY


def _all_devices(module: Any) -> list[int]:
    nvml = NvmlApi(module)
    nvml.open()
    try:
        count = nvml.ask("nvmlDeviceGetCount")
    finally:
        nvml.close()
    if not count.ok:
        raise NvmlUnavailable(f"NVML does not count its devices: {count.reason}")
    return list(range(count.value))


def _show(monitor: HardwareHealthMonitor, write: Callable[[str], None], as_json: bool) -> None:
    events = (*monitor.fatal_events, *monitor.active_warnings())
    if as_json:
        write(json.dumps(health_json(monitor.readings(), monitor.status(), events)))
    else:
        write("\n".join(health_lines(monitor.readings(), monitor.status(), events)))


def _event_writer(path: Path) -> Callable[[HealthEvent], None]:
    from scout_core.report.health_reports import health_report

    def tell(event: HealthEvent) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(health_report(event).model_dump_json() + "\n")

    return tell
