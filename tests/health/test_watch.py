"""`HealthWatch`: one rank's own device, told as fault reports with rank, device and step."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from scout_core.health import HealthConfig, Metric
from scout_core.health.fake_nvml import FakeNvml
from scout_core.health.watch import HealthWatch, StepLog
from scout_core.report import SCOUTFaultReport
from scout_core.report.health_reports import ranks_accessible
from tests.health.helpers import Clock


class Rank:
    """A rank on CUDA device 1, which is physical GPU 3, with a clock and a step count that the test turns."""

    def __init__(self, nvml: FakeNvml, **more: Any) -> None:
        self.nvml, self.clock, self.step = nvml, Clock(), 100
        self.reports: list[SCOUTFaultReport] = []
        given = {"kernel_log": None, "environ": {"CUDA_VISIBLE_DEVICES": "2,3"}, "ordinal": 1, **more}
        self.watch = HealthWatch(
            HealthConfig(),
            rank=9,
            deliver=self.reports.append,
            step=lambda: self.step,
            module=nvml,
            clock=self.clock,
            **given,
        )

    def poll(self, times: int = 1) -> None:
        assert self.watch.monitor is not None
        for _ in range(times):
            self.watch.monitor.poll_once()
            self.clock.now_s += 10.0
            self.step += 5

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *exc: object) -> None:
        self.watch.close()


@pytest.fixture
def node() -> FakeNvml:
    return FakeNvml({"devices": [{}] * 4})


def test_a_fault_of_the_own_device_is_one_report_that_names_everything(node: FakeNvml) -> None:
    with Rank(node) as rank:
        rank.poll(2)
        node.devices[3].ecc_uncorrectable = 2
        rank.poll(4)
    (report,) = rank.reports
    assert (report.kind.value, report.severity, report.status) == ("hardware_fault", "fatal", "Attributed")
    assert (report.scope, report.ranks, report.devices) == ("device", (9,), (node.devices[3].uuid,))
    identity = report.evidence["identity"]
    assert (identity["rank"], identity["cuda_ordinal"], identity["nvml_index"]) == (9, 1, 3)
    assert identity["pci_bus_id"] == "0000:13:00.0"
    assert report.hosts == (identity["host"],)
    assert (report.step, report.first_seen_step) == (110, 105), "the poll before was still clean, at step 105"
    assert report.evidence["blocks_certification"] is True
    assert not ranks_accessible(report)


def test_other_devices_of_the_host_are_left_to_their_own_ranks(node: FakeNvml) -> None:
    with Rank(node) as rank:
        rank.poll()
        node.devices[1].ecc_uncorrectable = 2
        node.devices[2].errors = {"*": "GPU_IS_LOST"}
        node.emit_xid(0, 79)
        rank.poll(3)
        assert rank.reports == []
        node.emit_xid(3, 79)
        rank.poll(2)
    assert [(report.surface, report.ranks) for report in rank.reports] == [("xid.79", (9,))]


def test_xids_of_the_own_device_come_from_the_kernel_log_too(node: FakeNvml, tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_text("")
    node.devices[3].xid_events = False
    with Rank(node, kernel_log=log) as rank:
        rank.poll()
        with log.open("a") as file:
            file.write("[ 9.0] NVRM: Xid (PCI:0000:10:00): 79, another rank's\n")
            file.write("[ 9.1] NVRM: Xid (PCI:0000:13:00): 94, pid=7, contained\n")
        rank.poll()
    (report,) = rank.reports
    assert (report.surface, report.ranks, report.devices) == ("xid.94", (9,), (node.devices[3].uuid,))
    assert report.recommended_action == "restart"
    assert ranks_accessible(report)


def test_warnings_are_reports_that_ask_for_nothing_and_notes_are_none(node: FakeNvml) -> None:
    with Rank(node) as rank:
        rank.poll()
        node.devices[3].ecc_correctable = 5
        node.emit_xid(3, 45)
        rank.poll(3)
    (report,) = rank.reports
    assert (report.kind.value, report.severity, report.recommended_action) == ("hardware_warning", "warning", "observe")


def test_a_warning_that_flickers_is_not_told_at_every_poll(node: FakeNvml) -> None:
    with Rank(node) as rank:
        for number in range(120):
            node.devices[3].clock_events = 0x40 * (number % 2)
            rank.poll()
        assert [report.surface for report in rank.reports] == [Metric.CLOCK_EVENTS] * 2
        assert rank.watch.monitor is not None
        assert rank.watch.monitor.counts[(node.devices[3].uuid, Metric.CLOCK_EVENTS)] == 60


@pytest.mark.parametrize("error", ["LIBRARY_NOT_FOUND", "DRIVER_NOT_LOADED", "UNKNOWN"])
def test_without_nvml_it_says_so_once_and_blames_nobody(node: FakeNvml, error: str) -> None:
    node.init_error = error
    with Rank(node) as rank:
        rank.poll(5)
        (report,) = rank.reports
        assert (report.kind.value, report.severity, report.ranks) == ("telemetry_lost", "warning", ())
        assert report.recommended_action == "continue"
        assert report.hosts == (report.evidence["identity"]["host"],)
        node.init_error = None
        rank.poll(2)
        node.emit_xid(3, 79)
        rank.poll(2)
    assert [report.surface for report in rank.reports] == ["telemetry_lost", "xid.79"], "it works once NVML does"


def test_a_missing_module_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Rank(None) as rank:  # type: ignore[arg-type]
        rank.poll(3)
    (report,) = rank.reports
    assert "scout-suite[nvml]" in report.message


def test_a_cpu_rank_watches_nothing_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    before = threading.active_count()
    with caplog.at_level(logging.INFO):
        watch = HealthWatch(HealthConfig(), rank=2, ordinal=None, deliver=lambda _: None).start()
    assert watch.monitor is None
    assert threading.active_count() == before
    assert "rank 2 has no CUDA device" in caplog.text
    watch.close()


def test_started_it_delivers_from_its_own_thread_and_ends_though_the_device_blocks(node: FakeNvml) -> None:
    release, entered, told = threading.Event(), threading.Event(), threading.Event()
    where: list[int] = []

    def deliver(report: SCOUTFaultReport) -> None:
        where.append(threading.get_ident())
        told.set()
        raise RuntimeError("the manager's bug")

    def block() -> None:
        entered.set()
        release.wait(60)

    node.devices[0].remapped = [0, 0, 0, 1]
    config = HealthConfig(poll_interval_s=0.01, read_deadline_s=30)
    watch = HealthWatch(config, rank=0, ordinal=0, deliver=deliver, module=node, environ={}, kernel_log=None).start()
    try:
        assert told.wait(30)
        assert where == [where[0]] and where[0] != threading.get_ident()
        node.devices[0].block = block
        assert entered.wait(30)
        began = time.monotonic()
        watch.close()
        watch.close()
        assert time.monotonic() - began < 1.0
    finally:
        release.set()


def test_steps_of_old_times_are_never_later_than_they_were_and_memory_is_bounded() -> None:
    clock, now = Clock(0.0), [0]
    log = StepLog(lambda: now[0], clock)
    for poll in range(1, 20_001):
        clock.now_s, now[0] = float(poll), poll
        log.read()
    assert len(log._seen) <= 4096
    for when in (0.5, 3.0, 777.0, 19_999.5, 20_000.0):
        assert log.before(when) <= when - 1 or log.before(when) == 0
    assert log.before(20_000.0) == 19_999
