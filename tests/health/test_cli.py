"""`scout health`: table, JSON, drills, event stream, exit codes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from scout_core.health import HealthConfig
from scout_core.health.cli import EXIT_FATAL, EXIT_HEALTHY, EXIT_NO_TELEMETRY, add_health_command, run_health
from scout_core.health.fake_nvml import FakeNvml
from scout_core.report import SCOUTFaultReport

typer = pytest.importorskip("typer")
testing = pytest.importorskip("typer.testing")


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.callback()(lambda: None)
    add_health_command(app)
    return testing.CliRunner().invoke(app, ["health", "--kernel-log", "/nonexistent", *arguments])


def described(path: Path, *devices: dict[str, Any], **more: Any) -> str:
    path.write_text(json.dumps({"devices": list(devices), **more}))
    return str(path)


def test_the_table_shows_every_reading_and_says_what_is_not_supported(tmp_path: Path) -> None:
    result = invoke("--fake", described(tmp_path / "f.json", {"sram_uncorrectable": None}, {}))
    assert result.exit_code == EXIT_HEALTHY
    assert result.stdout.count("[healthy]") == 2
    line = next(line for line in result.stdout.splitlines() if "ecc.sram_uncorrectable" in line)
    assert line.split(None, 1)[1] == "not supported"


def test_a_device_fault_is_exit_code_1_and_in_the_json(tmp_path: Path) -> None:
    result = invoke("--json", "--fake", described(tmp_path / "f.json", {}, {"remapped": [0, 0, 0, 1]}))
    assert result.exit_code == EXIT_FATAL
    record = json.loads(result.stdout)
    assert [device["state"] for device in record["devices"]] == ["healthy", "fatal"]
    assert [event["metric"] for event in record["events"]] == ["remap.failure"]


@pytest.mark.parametrize("more", [{"init_error": "LIBRARY_NOT_FOUND"}, {}])
def test_without_nvml_or_without_a_gpu_it_says_so_with_its_own_code(tmp_path: Path, more: dict[str, Any]) -> None:
    result = invoke("--fake", described(tmp_path / "f.json", **more))
    assert result.exit_code == EXIT_NO_TELEMETRY
    assert ("Library not found" if more else "no GPU") in result.stdout


def test_a_gpu_that_gives_no_telemetry_is_not_healthy(tmp_path: Path) -> None:
    result = invoke("--fake", described(tmp_path / "f.json", {"errors": {"*": "UNKNOWN"}}))
    assert result.exit_code == EXIT_NO_TELEMETRY
    assert "telemetry is lost" in result.stdout


def test_one_device_can_be_chosen(tmp_path: Path) -> None:
    result = invoke("--device", "1", "--json", "--fake", described(tmp_path / "f.json", {}, {}, {}))
    assert [device["device"][:12] for device in json.loads(result.stdout)["devices"]] == ["GPU-00000001"]


def test_a_wrong_drill_file_is_a_usage_error(tmp_path: Path) -> None:
    result = invoke("--fake", described(tmp_path / "f.json", {"colour": 1}))
    assert result.exit_code == 2
    assert "colour" in result.output


def test_watch_follows_a_drill_file_and_serves_reports(tmp_path: Path) -> None:
    drill, events = tmp_path / "f.json", tmp_path / "events.jsonl"
    described(drill, {}, {})
    stop = threading.Event()
    codes: list[int] = []

    def serve() -> None:
        codes.append(
            run_health(
                HealthConfig(poll_interval_s=0.01),
                write=lambda _: None,
                module=FakeNvml.from_file(drill),
                stop=stop,
                serve_events=events,
                reload_fake=drill,
            )
        )

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    changed = tmp_path / "g.json"
    described(changed, {}, {"remapped": [0, 0, 0, 1]})
    changed.replace(drill)
    deadline = time.monotonic() + 30
    while not events.exists() and time.monotonic() < deadline:
        thread.join(0.01)
    stop.set()
    thread.join(30)
    (line,) = events.read_text().splitlines()
    report = SCOUTFaultReport.model_validate_json(line)
    assert (report.kind.value, report.surface, report.severity) == ("hardware_fault", "remap.failure", "fatal")
    assert codes == [EXIT_FATAL]


PROGRAM = """
import typer
from scout_core.health.cli import add_health_command
app = typer.Typer()
app.callback()(lambda: None)
add_health_command(app)
app()
"""


def test_watch_ends_cleanly_on_sigterm(tmp_path: Path) -> None:
    drill = described(tmp_path / "f.json", {})
    command = [sys.executable, "-c", PROGRAM, "health", "--watch", "--json", "--interval", "0.05", "--fake", drill]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["devices"][0]["state"] == "healthy"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == EXIT_HEALTHY
