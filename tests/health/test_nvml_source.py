"""`NvmlSource` and `XidSource` against drivers that offer, refuse, and fail in different ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scout_core.health import HealthReading, Metric, NvmlSource, ReadingStatus, XidSource
from scout_core.health.fake_nvml import DEFAULT_DEVICE, FakeNvml
from scout_core.health.nvml_api import NvmlApi, NvmlUnavailable
from tests.health.helpers import Clock, Node


def read(device: dict[str, Any], **more: Any) -> dict[str, HealthReading]:
    nvml = FakeNvml({"devices": [device, {}]})
    return {reading.metric: reading for reading in NvmlSource(device_index=0, module=nvml, **more).read()}


def test_a_healthy_device_answers_every_metric() -> None:
    readings = read({})
    asked_for = {value for name, value in vars(Metric).items() if not name.startswith("_")}
    derived = {
        Metric.SHUTDOWN_MARGIN,
        Metric.POWER_CAP,
        Metric.PCIE_LINK,
        Metric.NVLINK_FABRIC,
        Metric.XID,
        Metric.TELEMETRY_LOST,
        Metric.TELEMETRY_STALE,
    }
    assert asked_for - derived <= set(readings)
    assert readings[Metric.POWER_LIMIT].value == 700.0
    assert readings[Metric.NVLINK_LINKS].value == readings[Metric.NVLINK_LINKS].limit == 18


NOT_QUERIES = {"name", "errors", "mig_uuids", "nvlink_generation", "links", "xid_events"}
WITH_ANOTHER = {"sram_correctable", "sram_threshold_exceeded"}


@pytest.mark.parametrize("key", sorted(set(DEFAULT_DEVICE) - NOT_QUERIES - WITH_ANOTHER))
def test_not_supported_is_neither_zero_nor_failure(key: str) -> None:
    before, after = read({}), read({key: None})
    changed = [metric for metric in before if before[metric].status is not after[metric].status]
    for metric in changed:
        assert after[metric].status is ReadingStatus.UNSUPPORTED
        assert after[metric].value is None
    assert changed or before[_metric_of(key)].status is ReadingStatus.UNSUPPORTED


def _metric_of(key: str) -> str:
    return {
        "tlimit_margin": Metric.TLIMIT_MARGIN,
        "tlimit_at_shutdown": Metric.TLIMIT_SHUTDOWN,
        "link_recovery_failed": Metric.NVLINK_RECOVERY_FAILED,
    }[key]


def test_a_failed_query_is_a_failed_reading_and_the_device_is_still_there() -> None:
    readings = read({"errors": {"nvmlDeviceGetTotalEccErrors": "UNKNOWN"}})
    assert readings[Metric.ECC_UNCORRECTABLE].status is ReadingStatus.FAILED
    assert readings[Metric.PRESENCE].value == "present"


@pytest.mark.parametrize("generation", [2, 4, 5])
def test_link_errors_are_found_on_every_generation_by_link(generation: int) -> None:
    device = {"nvlink_generation": generation, "link_recovery": {"3": 2}, "link_crc": {"0": 7, "5": 1}}
    readings = read(device)
    assert readings[Metric.NVLINK_RECOVERY].value == 2
    assert readings[Metric.NVLINK_RECOVERY].parts["link 3"] == 2
    assert readings[Metric.NVLINK_CRC].value == 8
    expected = ReadingStatus.OK if generation == 5 else ReadingStatus.UNSUPPORTED
    assert readings[Metric.NVLINK_RECOVERY_FAILED].status is expected


def test_counters_that_a_virtual_machine_hides_are_unsupported() -> None:
    hidden = {"link_recovery": None, "link_crc": None, "link_replay": None, "link_recovery_failed": None}
    readings = read(hidden)
    assert {readings[m].status for m in (Metric.NVLINK_CRC, Metric.NVLINK_RECOVERY, Metric.NVLINK_REPLAY)} == {
        ReadingStatus.UNSUPPORTED
    }
    assert readings[Metric.NVLINK_LINKS].status is ReadingStatus.OK


def test_a_gpu_alone_on_its_node_is_not_expected_to_have_links_up() -> None:
    with Node([{"links": [0] * 18}]) as node:
        node.poll(4)
        assert node.alarms == []


def test_once_known_a_device_is_never_found_by_its_shifted_index() -> None:
    with Node([{}] * 3) as node:
        node.poll()
        lost = node.uuid(0)
        node.nvml.devices.pop(0).errors = {"*": "UNKNOWN"}
        for device in node.nvml.devices:
            device.errors = {"*": "UNINITIALIZED"}
        node.poll()
        for device in node.nvml.devices:
            device.errors = {}
        node.poll(3)
        states = node.monitor.status()
        assert node.alarm_keys() == [(lost, Metric.PRESENCE)]
        assert (states[node.uuid(0)], states[node.uuid(1)]) == ("healthy", "healthy")


def test_telemetry_comes_back_and_goes_on_from_the_same_baseline() -> None:
    with Node([{"ecc_uncorrectable": 3}] * 2) as node:
        node.poll()
        for device in node.nvml.devices:
            device.errors = {"*": "UNKNOWN"}
        node.poll(2)
        for device in node.nvml.devices:
            device.errors = {}
        node.poll(2)
        assert node.alarms == []
        assert set(node.monitor.status().values()) == {"healthy"}
        node.nvml.devices[1].ecc_uncorrectable = 4
        node.poll(2)
        assert node.alarm_keys() == [(node.uuid(1), Metric.ECC_UNCORRECTABLE)]


def test_a_device_that_could_not_be_resolved_at_first_leaves_no_ghost() -> None:
    with Node([{}], init_error="DRIVER_NOT_LOADED") as node:
        node.poll(2)
        assert node.monitor.status() == {"nvml:0": "unknown"}
        node.nvml.init_error = None
        node.poll()
        assert node.monitor.status() == {node.uuid(0): "healthy"}


def test_nvml_is_opened_as_often_as_closed() -> None:
    with Node([{}] * 2) as node:
        node.poll()
        assert node.nvml.opened == 3
    assert node.nvml.opened == 0


def test_a_missing_module_is_said_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlUnavailable, match=r"scout-suite\[nvml\]"):
        NvmlApi().open()


def test_on_this_machine_the_real_module_gives_readings_and_never_raises() -> None:
    pytest.importorskip("pynvml")
    source = NvmlSource(device_index=0)
    readings = source.read()
    source.close()
    assert readings[0].metric == Metric.PRESENCE
    assert all(isinstance(reading, HealthReading) for reading in readings)


def test_xids_come_from_the_kernel_log_only_for_devices_without_nvml_events(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_text("[ 1.0] NVRM: Xid (PCI:0000:10:00): 79, old news\n")
    nvml = FakeNvml({"devices": [{}, {"xid_events": False}]})
    source = XidSource(module=nvml, kernel_log=log, clock=Clock())
    assert source.read() == []
    with log.open("a") as file:
        for pci in ("10", "11", "77"):
            file.write(f"[ 2.0] NVRM: Xid (PCI:0000:{pci}:00): 48, pid=7, text\n")
    nvml.emit_xid(0, 48)
    found = [(r.device, r.value) for r in source.read()]
    source.close()
    assert found == [(nvml.devices[0].uuid, 48), (nvml.devices[1].uuid, 48)]


def test_without_nvml_and_log_xids_are_unsupported_and_it_says_why(tmp_path: Path) -> None:
    source = XidSource(module=FakeNvml({"init_error": "LIBRARY_NOT_FOUND"}), kernel_log=tmp_path / "absent")
    (reading,) = source.read()
    assert reading.status is ReadingStatus.UNSUPPORTED
    assert "Library not found" in reading.reason
    assert "No such file" in reading.reason


def test_xids_logged_within_a_second_but_read_in_two_polls_are_one_burst(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_text("")
    with Node([{"xid_events": False}], kernel_log=log) as node:
        node.poll()
        log.open("a").write("[ 500.0] NVRM: Xid (PCI:0000:10:00): 62, x\n")
        node.poll()
        log.open("a").write("[ 500.4] NVRM: Xid (PCI:0000:10:00): 45, x\n")
        node.poll()
        assert node.alarm_keys() == [(node.uuid(0), "xid.62")]
        assert [event.cause for event in node.told] == ["xid.62"]


def test_events_are_registered_again_after_the_driver_was_reloaded() -> None:
    nvml = FakeNvml({"devices": [{}, {}]})
    source = XidSource(module=nvml, kernel_log=None, clock=Clock())
    assert source.read() == []
    nvml.opened = 0
    assert [r.status for r in source.read()] == [ReadingStatus.FAILED]
    nvml.emit_xid(1, 79)
    assert [(r.device, r.value) for r in source.read()] == [(nvml.devices[1].uuid, 79)]


@pytest.mark.parametrize("trouble", ["init", "all devices", "one device"])
def test_events_are_registered_later_where_nvml_failed_at_the_start(trouble: str) -> None:
    nvml = FakeNvml({"devices": [{}, {}]})
    nvml.init_error = "DRIVER_NOT_LOADED" if trouble == "init" else None
    for device in nvml.devices[0 if trouble == "all devices" else 1 :]:
        device.errors = {"*": "UNKNOWN"}
    source = XidSource(module=nvml, kernel_log=None, clock=Clock())
    for _ in range(3):
        assert [r for r in source.read() if r.status is ReadingStatus.OK] == []
    nvml.emit_xid(0, 31)
    before = [r.value for r in source.read() if r.status is ReadingStatus.OK]
    assert before == ([31] if trouble == "one device" else [])
    nvml.init_error = None
    for device in nvml.devices:
        device.errors = {}
    source.read()
    nvml.emit_xid(1, 79)
    assert (nvml.devices[1].uuid, 79) in [(r.device, r.value) for r in source.read()]
    source.close()
    assert nvml.opened == 0
