"""The monitor's promises: others go on, training goes on, memory stays flat, and it ends when told."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import scout_core.health
from scout_core.health import (
    HardwareHealthMonitor,
    HealthConfig,
    HealthEvent,
    HealthReading,
    HealthSource,
    Metric,
    NvmlSource,
    ReadingStatus,
)
from scout_core.health.fake_nvml import FakeNvml
from tests.health.helpers import Clock, Node


class Listed:
    """Gives out prepared answers, one a read, the last one for ever. An exception among them is raised."""

    def __init__(self, name: str, *answers: Any) -> None:
        self.name = name
        self.answers = list(answers)
        self.reads = 0
        self.closed = 0

    def read(self) -> Any:
        self.reads += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        self.closed += 1


def reading(device: str, metric: str = Metric.ECC_UNCORRECTABLE, value: Any = 0) -> HealthReading:
    return HealthReading(device=device, metric=metric, value=value)


def monitor_of(*sources: HealthSource, **more: Any) -> tuple[HardwareHealthMonitor, list[HealthEvent]]:
    alarms: list[HealthEvent] = []
    return HardwareHealthMonitor(HealthConfig(read_deadline_s=0.2), sources, alarms.append, **more), alarms


@pytest.mark.parametrize(
    "bad",
    [RuntimeError("boom"), None, 7, "text", [1, 2], [object()], {"a": 1}, iter(()), StopIteration(), [None] * 9000],
)
def test_a_source_that_raises_or_returns_nonsense_is_stale_and_the_others_go_on(bad: Any) -> None:
    wild, calm = Listed("wild", [reading("GPU-w")], bad), Listed("calm", [reading("GPU-c")])
    monitor, alarms = monitor_of(wild, calm)
    for _ in range(3):
        monitor.poll_once()
    assert monitor.status() == {"GPU-w": "stale", "GPU-c": "healthy"}
    assert [event.key for event in monitor.warnings] == [("GPU-w", Metric.TELEMETRY_STALE)]
    assert calm.reads == wild.reads == 3
    assert alarms == []
    monitor.close()
    assert (wild.closed, calm.closed) == (1, 1)


def test_a_source_that_never_answered_is_known_by_its_name() -> None:
    monitor, _ = monitor_of(Listed("broken", OSError("no")), Listed("calm", [reading("GPU-c")]))
    monitor.poll_once()
    assert monitor.status() == {"broken": "stale", "GPU-c": "healthy"}
    monitor.close()


class Blocked:
    """Blocks in its first read until released."""

    name = "blocked"

    def __init__(self) -> None:
        self.entered, self.release = threading.Event(), threading.Event()

    def read(self) -> Sequence[HealthReading]:
        self.entered.set()
        self.release.wait(60)
        return [reading("GPU-b")]

    def close(self) -> None:
        raise AssertionError("a source inside read() must not be closed")


def test_a_blocked_source_costs_one_deadline_and_then_nothing() -> None:
    blocked, calm = Blocked(), Listed("calm", [reading("GPU-c")])
    monitor, _ = monitor_of(blocked, calm)
    try:
        monitor.poll_once()
        began = time.monotonic()
        for _ in range(50):
            monitor.poll_once()
        assert time.monotonic() - began < 2.0, "50 more polls must not wait for it again"
        assert calm.reads == 51
        assert monitor.status() == {"blocked": "stale", "GPU-c": "healthy"}
        began = time.monotonic()
        monitor.close()
        assert time.monotonic() - began < 1.0
    finally:
        blocked.release.set()


@pytest.mark.slow
def test_a_source_blocked_for_60_s_leaves_the_others_on_time_and_close_ends_it() -> None:
    blocked, times = Blocked(), []

    class Calm:
        name = "calm"

        def read(self) -> list[HealthReading]:
            times.append(time.monotonic())
            return [reading("GPU-c")]

        def close(self) -> None: ...

    config = HealthConfig(poll_interval_s=0.5, read_deadline_s=0.5)
    monitor = HardwareHealthMonitor(config, [blocked, Calm()]).start()
    try:
        assert blocked.entered.wait(30)
        blocked.release.wait(58)  # nothing releases it: 58 s of it being stuck
        began = time.monotonic()
        monitor.close()
        closing_s = time.monotonic() - began
    finally:
        blocked.release.set()
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    print(f"{len(times)} polls, gaps {min(gaps):.3f} to {max(gaps):.3f} s, closed in {closing_s:.3f} s")
    assert len(times) >= 110
    assert max(gaps) < 0.5 + 0.5
    assert closing_s < 1.0


def test_a_late_answer_is_taken_by_the_next_poll() -> None:
    blocked, calm = Blocked(), Listed("calm", [reading("GPU-c")])
    blocked.close = lambda: None  # type: ignore[method-assign]
    monitor, _ = monitor_of(blocked, calm)
    monitor.poll_once()
    blocked.release.set()
    deadline = time.monotonic() + 10
    while monitor.status().get("GPU-b") != "healthy" and time.monotonic() < deadline:
        monitor.poll_once()
    assert monitor.status() == {"GPU-b": "healthy", "GPU-c": "healthy"}
    monitor.close()


EXIT_PROGRAM = """
import sys, threading, time, types
package = types.ModuleType("scout_core")  # without torch, whose own shutdown would be measured too
package.__path__ = [sys.argv[2]]
sys.modules["scout_core"] = package
from scout_core.health import HardwareHealthMonitor, HealthConfig
class Blocked:
    name = "blocked"
    entered = threading.Event()
    def read(self):
        self.entered.set()
        threading.Event().wait(60)
        return []
    def close(self): pass
source = Blocked()
monitor = HardwareHealthMonitor(HealthConfig(read_deadline_s=30), [source]).start()
assert source.entered.wait(30)
assert "torch" not in sys.modules and "pynvml" not in sys.modules
print(time.monotonic(), flush=True)
if sys.argv[1] == "close":
    monitor.close()
sys.exit(3)
"""


def seconds_to_end(way: str) -> float:
    package = str(Path(scout_core.health.__file__).parent.parent)
    command = [sys.executable, "-c", EXIT_PROGRAM, way, package]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    ended = time.monotonic()
    assert done.returncode == 3, done.stderr
    return ended - float(done.stdout)


@pytest.mark.parametrize("way", ["close", "exit"])
def test_a_process_with_a_source_blocked_for_60_s_ends_within_a_second(way: str) -> None:
    # A busy machine can be slow by itself, so the best of a few counts; a wait for the source would never be.
    assert any(seconds_to_end(way) < 1.0 for _ in range(5))


def test_started_it_polls_by_itself_and_tells_each_fatal_once() -> None:
    source = Listed("s", [reading("GPU-a", value=0)], [reading("GPU-a", value=1)], [reading("GPU-a", value=2)])
    told = threading.Event()
    alarms: list[HealthEvent] = []

    def hear(event: HealthEvent) -> None:
        alarms.append(event)
        told.set()

    config = HealthConfig(poll_interval_s=0.001)
    with HardwareHealthMonitor(config, [source], on_event=hear) as monitor:
        assert told.wait(30)
        deadline = time.monotonic() + 30
        while source.reads < 20 and time.monotonic() < deadline:
            told.wait(0.001)
    assert source.reads >= 20
    assert [event.key for event in alarms] == [("GPU-a", Metric.ECC_UNCORRECTABLE)]
    assert monitor.fatal_events == tuple(alarms)
    with pytest.raises(RuntimeError, match="already started or closed"):
        monitor.start()
    monitor.close()


def test_all_its_threads_are_daemons() -> None:
    before = set(threading.enumerate())
    monitor, _ = monitor_of(Listed("s", [reading("GPU-a")]))
    monitor.start()
    deadline = time.monotonic() + 30
    while monitor.polls == 0 and time.monotonic() < deadline:
        monitor.readings()
    mine = set(threading.enumerate()) - before
    assert {thread.name for thread in mine} == {"scout-health", "scout-health s"}
    assert all(thread.daemon for thread in mine)
    monitor.close()
    assert not any(thread.is_alive() for thread in mine)


@pytest.mark.parametrize("how", [ValueError, SystemExit])
def test_a_callback_that_raises_is_counted_and_told_no_second_time(how: type[BaseException]) -> None:
    source = Listed("s", [reading("GPU-a", value=0)], [reading("GPU-a", value=1)])
    calls: list[HealthEvent] = []

    def fail(event: HealthEvent) -> None:
        calls.append(event)
        raise how("the manager's bug")

    monitor = HardwareHealthMonitor(HealthConfig(), [source], on_event=fail)
    for _ in range(4):
        monitor.poll_once()
    monitor.close()
    assert (len(calls), monitor.callback_errors) == (1, 1)


def test_a_source_that_invents_devices_and_metrics_stays_bounded() -> None:
    class Inventive:
        name = "inventive"
        count = 0

        def read(self) -> list[HealthReading]:
            self.count += 1
            return [
                HealthReading(device=f"GPU-{self.count}-{i}", metric=f"m{self.count}", value=1) for i in range(50)
            ] + [reading("GPU-a", metric=f"m{self.count}")]

        def close(self) -> None: ...

    monitor, _ = monitor_of(Inventive())
    for _ in range(60):
        monitor.poll_once()
    assert len(monitor.status()) <= 1024
    monitor.close()


def soak(polls: int) -> tuple[int, int]:
    """Bytes in use after a tenth of `polls`, and after all of them, while everything that can grow does."""
    node = Node([{"links": [1, 1, 1, 1]}, {"name": "NVIDIA L40S", "links": []}])
    tracemalloc.start()
    early = 0
    try:
        for number in range(polls):
            for device in node.nvml.devices:
                device.ecc_correctable += 3
                device.temperature = 60 + number % 40
                device.link_crc = {"3": number}
            node.nvml.emit_xid(number % 2, (13, 45, 63)[number % 3])
            node.poll(seconds=0.01)
            node.told.clear()
            if number == polls // 10:
                gc.collect()
                early = tracemalloc.get_traced_memory()[0]
        gc.collect()
        return early, tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        node.monitor.close()


def test_memory_is_flat_over_fifteen_hundred_polls() -> None:
    early, late = soak(1_500)
    assert late - early < 256 * 1024, f"{early} -> {late} bytes"


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_memory_is_flat_over_half_an_hour_of_polls_at_100_hz() -> None:
    """180,000 polls: half an hour at 100 Hz, as fast as they go."""
    early, late = soak(180_000)
    assert late - early < 256 * 1024, f"{early} -> {late} bytes"


def test_ages_of_stale_readings_come_from_the_monitors_clock() -> None:
    clock, blocked = Clock(), Blocked()
    monitor, _ = monitor_of(blocked, clock=clock)
    try:
        monitor.poll_once()
        clock.now_s += 45
        monitor.poll_once()
        (late,) = monitor.readings()
        assert (late.status, late.value) == (ReadingStatus.STALE, 45)
    finally:
        monitor.close()
        blocked.release.set()


def test_the_contracts_example_works() -> None:
    alarms: list[HealthEvent] = []
    module = FakeNvml({"devices": [{}, {}]})
    health_monitor = HardwareHealthMonitor(
        HealthConfig(), [NvmlSource(device_index=1, module=module)], on_event=alarms.append
    )
    health_monitor.start()
    deadline = time.monotonic() + 30
    while health_monitor.polls == 0 and time.monotonic() < deadline:
        health_monitor.readings()
    assert list(health_monitor.status()) == [module.devices[1].uuid]
    health_monitor.close()
