"""Section D of the case list (hardware telemetry), F08, and the hardware half of B04 and B12, on a fake NVML.

Each test gives inputs as the report describes them and asserts what SCOUT says: severity, device by UUID, once.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from scout_core.health import (
    DeviceIdentity,
    FaultHistory,
    HealthAction,
    HealthConfig,
    HealthEvent,
    HealthReading,
    IdentityMap,
    Metric,
    NvmlSource,
    slowdown_cause,
)
from scout_core.health.types import HOST
from scout_core.report import FaultKind, SCOUTFaultReport
from scout_core.report.health_reports import health_report, with_hardware_cause
from tests.health.helpers import Node

V100 = {"name": "Tesla V100-SXM2-16GB", "links": [1] * 6, "fabric": None, "nvlink_generation": 2}
PCIE = {"name": "NVIDIA L40S", "links": [], "fabric": None}
THERMAL, POWER_CAP, IDLE = 0x40, 0x04, 0x01


def ranks_of(node: Node) -> IdentityMap:
    """Rank r runs on device r."""
    return IdentityMap(
        devices=tuple(
            DeviceIdentity(host=_host(), uuid=node.uuid(i), nvml_index=i, rank=i) for i in range(len(node.nvml.devices))
        )
    )


def _host() -> str:
    import socket

    return socket.gethostname()


def test_d01_a_gpu_that_falls_off_the_bus_without_an_xid_is_lost_once(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_text("[    1.0] before the job\n")
    with Node([{}] * 4, kernel_log=log) as node:
        node.poll()
        log.open("a").write(
            "[ 1843.308145] NVRM: The NVIDIA GPU 0000:13:00.0\n"
            "               NVRM: (PCI ID: 10de:26b5) installed in this system has\n"
            "               NVRM: fallen off the bus and is not responding to commands.\n"
        )
        node.nvml.devices[3].errors = {"*": "GPU_IS_LOST"}
        node.poll(3)
        assert node.alarm_keys() == [(node.uuid(3), Metric.PRESENCE)]
        report = health_report(node.alarms[0], ranks=ranks_of(node))
        assert (report.kind.value, report.scope, report.ranks) == ("hardware_fault", "device", (3,))
        assert report.devices == (node.uuid(3),)
        assert report.recommended_action == "restart_excluding"
        assert node.warning_keys() == []


def test_d01_the_kernel_log_alone_is_enough(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_text("")
    with Node([{}] * 4, kernel_log=log) as node:
        node.poll()
        log.open("a").write("6,901,1843308145,-;NVRM: GPU 0000:13:00.0: GPU has fallen off the bus.\n")
        node.poll(2)
        assert node.alarm_keys() == [(node.uuid(3), Metric.PRESENCE)]


class LastXidGauge:
    """An exporter's 'last XID' gauge for device `GPU-x`."""

    name = "gauge"

    def __init__(self, code: int, occurred_s: float | None) -> None:
        self.reading = HealthReading(device="GPU-x", metric=Metric.XID, value=code, occurred_s=occurred_s)

    def read(self) -> list[HealthReading]:
        return [self.reading]

    def close(self) -> None: ...


@pytest.mark.parametrize("code", [31, 79])
@pytest.mark.parametrize("occurred_s", [10.0, None])
def test_d02_a_last_xid_that_stays_set_from_before_the_job_is_no_alarm(code: int, occurred_s: float | None) -> None:
    with Node([], sources=[LastXidGauge(code, occurred_s)]) as node:
        node.poll(5)
        assert node.alarms == []
        assert node.told == []


def test_d02_the_same_gauge_counts_when_it_moves_once() -> None:
    gauge = LastXidGauge(31, 10.0)
    with Node([], sources=[gauge]) as node:
        node.poll(2)
        gauge.reading = LastXidGauge(79, node.clock.now_s).reading
        node.poll(5)
        assert node.alarm_keys() == [("GPU-x", "xid.79")]


def test_d03_xid_62_is_the_cause_and_the_45_after_it_a_consequence() -> None:
    with Node([{}] * 4) as node:
        node.poll()
        node.nvml.emit_xid(1, 62)
        node.nvml.emit_xid(1, 45)
        node.poll(2)
        assert node.alarm_keys() == [(node.uuid(1), "xid.62")]
        (note,) = node.told
        assert (note.severity.value, note.metric, note.cause) == ("info", "xid.45", "xid.62")


def test_d04_a_rack_of_xid_45_after_a_death_is_no_hardware_alarm() -> None:
    with Node([{}] * 4) as node:
        node.poll()
        for _ in range(2750):
            for index in range(4):
                node.nvml.emit_xid(index, 45)
        node.poll(60, seconds=0.1)
        assert node.alarms == []
        assert node.warning_keys() == []
        assert [(e.device, e.metric, e.cause) for e in node.told] == [
            (node.uuid(i), "xid.45", "process_end") for i in range(4)
        ]


def test_d05_a_gpu_that_degrades_and_blocks_its_reader_is_never_healthy_and_delays_nobody() -> None:
    config = HealthConfig(read_deadline_s=0.2)
    release, entered = threading.Event(), threading.Event()

    def wedge() -> None:
        entered.set()
        release.wait(30)

    with Node([{}] * 3, config=config) as node:
        try:
            node.poll()
            node.nvml.devices[1].ecc_correctable += 170_000
            node.poll()
            node.nvml.devices[1].block = wedge
            node.nvml.devices[1].ecc_correctable += 170_000
            before = [device.reads for device in node.nvml.devices]
            node.poll(3)
            assert entered.is_set()
            assert node.alarms == []
            assert (node.uuid(1), Metric.ECC_CORRECTABLE) in node.warning_keys()
            assert node.warning_keys().count((node.uuid(1), Metric.TELEMETRY_STALE)) == 1
            assert node.monitor.status() == {node.uuid(0): "healthy", node.uuid(1): "stale", node.uuid(2): "healthy"}
            fresh = [device.reads - then for device, then in zip(node.nvml.devices, before, strict=True)]
            assert fresh[0] >= 3 * 20, "the other devices were polled every time"
            assert fresh[2] >= 3 * 20
        finally:
            release.set()


def test_d06_a_pending_row_remap_warns_and_the_job_goes_on() -> None:
    with Node([{"remapped": [1, 0, 0, 0]}, {}]) as node:
        node.poll(2)
        assert node.told == [], "rows remapped before the job are not new errors"
        node.nvml.devices[0].remapped = [1, 0, 1, 0]
        node.nvml.emit_xid(0, 63)
        node.poll(3)
        assert node.alarms == []
        assert sorted(node.warning_keys()) == [(node.uuid(0), Metric.REMAP_PENDING), (node.uuid(0), "xid.63")]
        assert {event.action for event in node.told} == {HealthAction.RESET_AT_NEXT_STOP}
        assert all(health_report(event).recommended_action == "observe" for event in node.told)


@pytest.mark.parametrize("sign", ["flag", "xid"])
def test_d07_a_failed_row_remap_excludes_the_device_and_blocks_certification_since_the_first_sign(sign: str) -> None:
    with Node([{}] * 2) as node:
        node.poll()
        first_sign_s = node.clock.now_s
        node.nvml.devices[1].remapped = [0, 1, 1, 0]
        node.poll(3)
        if sign == "flag":
            node.nvml.devices[1].remapped = [0, 1, 1, 1]
        else:
            node.nvml.emit_xid(1, 64)
        node.poll(3)
        (alarm,) = node.alarms
        assert alarm.key == (node.uuid(1), Metric.REMAP_FAILURE if sign == "flag" else "xid.64")
        assert alarm.action is HealthAction.EXCLUDE
        assert alarm.blocks_certification
        assert alarm.first_sign_s == first_sign_s
        report = health_report(alarm, ranks=ranks_of(node), step_at=lambda when: int(when) // 10)
        assert (report.ranks, report.first_seen_step) == ((1,), int(first_sign_s) // 10)


@pytest.mark.parametrize(
    ("code", "severity", "action", "recommended"),
    [
        (48, "fatal", HealthAction.EXCLUDE_UNTIL_RESET, "restart_excluding"),
        (63, "warning", HealthAction.RESET_AT_NEXT_STOP, "observe"),
        (64, "fatal", HealthAction.EXCLUDE, "restart_excluding"),
        (74, "warning", HealthAction.CHECK_LINK, "observe"),
        (79, "fatal", HealthAction.EXCLUDE, "restart_excluding"),
        (94, "fatal", HealthAction.RESTART_RANK, "restart"),
        (95, "fatal", HealthAction.EXCLUDE_UNTIL_RESET, "restart_excluding"),
    ],
)
def test_d08_each_xid_has_its_own_consequence(code: int, severity: str, action: HealthAction, recommended: str) -> None:
    with Node([{}] * 4) as node:
        node.poll()
        node.nvml.emit_xid(2, code)
        node.poll(2)
        (event,) = node.alarms + node.told
        assert (event.severity.value, event.key, event.action) == (severity, (node.uuid(2), f"xid.{code}"), action)
        assert health_report(event).recommended_action == recommended


@pytest.mark.parametrize("links", [[], [0] * 12])
def test_d09_links_that_a_pcie_card_does_not_have_are_no_alarm(links: list[int]) -> None:
    name = "NVIDIA H100 PCIe" if links else "NVIDIA L40S"
    with Node([{"name": name, "links": links, "fabric": None}] * 4) as node:
        node.poll(5)
        assert node.alarms == []
        assert node.told == []
        if not links:
            status = {r.status.value for r in node.monitor.readings() if r.metric.startswith("nvlink.")}
            assert status == {"unsupported"}


def test_d10_two_inactive_links_name_their_card() -> None:
    with Node([V100, V100, V100, {**V100, "links": [1, 1, 1, 0, 1, 0]}]) as node:
        node.poll(4)
        assert node.alarm_keys() == [(node.uuid(3), Metric.NVLINK_LINKS)]
        assert node.alarms[0].evidence["inactive"] == ["link 3", "link 5"]


def test_d11_all_links_down_on_one_card_is_that_card() -> None:
    with Node([V100, V100, {**V100, "links": [0] * 6}, V100]) as node:
        node.poll(4)
        assert node.alarm_keys() == [(node.uuid(2), Metric.NVLINK_LINKS)]


def test_d11_all_links_down_on_all_cards_is_the_node_not_a_majority_of_healthy_ones() -> None:
    with Node([{**V100, "links": [0] * 6}] * 4) as node:
        node.poll(4)
        assert node.alarm_keys() == [(HOST, Metric.NVLINK_FABRIC)]
        assert health_report(node.alarms[0]).scope == "host"


def test_d11_a_rank_that_watches_only_its_own_card_says_the_same() -> None:
    with Node([{**V100, "links": [0] * 6}] * 4, sources=()) as whole:
        own = Node([], sources=[NvmlSource(device_index=2, module=whole.nvml)])
        with own:
            own.poll(4)
            assert own.alarm_keys() == [(HOST, Metric.NVLINK_FABRIC)]


def test_d12_a_fabric_daemon_that_has_not_started_on_an_idle_node_is_no_alarm() -> None:
    idle = {"fabric": "not_started", "clock_events": IDLE, "utilization": 0}
    with Node([idle] * 4) as node:
        node.poll(200, seconds=5600.0)
        assert node.alarms == []
        assert node.warning_keys() == []


@pytest.mark.parametrize("visible", ["3,1", "GPU-00000003,GPU-00000001-0000"])
def test_d13_the_watched_card_follows_cuda_visible_devices(visible: str) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": visible}
    with Node([{}] * 4, sources=()) as whole:
        ranks = [NvmlSource.for_cuda_device(rank, rank=rank, module=whole.nvml, environ=environ) for rank in range(2)]
        with Node([], sources=ranks) as job:
            job.poll()
            whole.nvml.devices[1].temperature = 94
            whole.nvml.devices[0].temperature = 94
            job.poll(2)
            assert job.alarm_keys() == [(whole.uuid(1), Metric.SHUTDOWN_MARGIN)]
            identity = job.alarms[0].identity
            assert identity is not None
            assert (identity.rank, identity.cuda_ordinal, identity.nvml_index) == (1, 1, 1)
            assert {reading.device for reading in job.monitor.readings()} == {whole.uuid(3), whole.uuid(1)}


def test_d14_a_mig_instance_with_nothing_to_say_is_no_alarm() -> None:
    denied = {"nvmlDeviceGetDeviceHandleFromMigDeviceHandle": "NO_PERMISSION"}
    device = {"mig_mode": 1, "mig_uuids": ["MIG-1234"], "errors": denied}
    with Node([device], sources=()) as whole:
        source = NvmlSource.for_cuda_device(0, module=whole.nvml, environ={"CUDA_VISIBLE_DEVICES": "MIG-1234"})
        with Node([], sources=[source]) as job:
            job.poll(4)
            assert job.alarms == []
            assert job.told == []
            unsupported = [r for r in job.monitor.readings() if r.metric != Metric.PRESENCE]
            assert {r.status.value for r in unsupported} == {"unsupported"}
            assert {r.device for r in unsupported} == {"MIG-1234"}


def test_d15_nvml_failing_for_all_devices_at_once_is_lost_telemetry() -> None:
    with Node([{}] * 4) as node:
        node.poll()
        for device in node.nvml.devices:
            device.errors = {"*": "UNKNOWN", "nvmlDeviceGetHandleByIndex": "UNKNOWN"}
        node.poll(5)
        assert node.alarms == []
        assert node.warning_keys() == [(HOST, Metric.TELEMETRY_LOST)]
        report = health_report(node.told[0], ranks=ranks_of(node))
        assert (report.kind.value, report.ranks, report.recommended_action) == ("telemetry_lost", (), "continue")
        assert "restart inside this container" in report.message
        assert set(node.monitor.status().values()) == {"unknown"}


def test_d15_against_d01_one_silent_device_among_answering_ones_is_lost() -> None:
    with Node([{}] * 4) as node:
        node.poll()
        node.nvml.devices[2].errors = {"*": "UNKNOWN", "nvmlDeviceGetHandleByIndex": "UNKNOWN"}
        node.poll(5)
        assert node.alarm_keys() == [(node.uuid(2), Metric.PRESENCE)]


def test_d16_a_gpu_that_asks_for_a_reset_is_an_alarm_though_all_else_is_green() -> None:
    with Node([{}, {"recovery_action": 1}, {}]) as node:
        node.poll(3)
        assert node.alarm_keys() == [(node.uuid(1), Metric.RECOVERY_ACTION)]
        assert node.alarms[0].action is HealthAction.EXCLUDE_UNTIL_RESET


def test_d16_xid_120_too() -> None:
    with Node([{}] * 2) as node:
        node.poll()
        node.nvml.emit_xid(1, 120)
        node.poll(2)
        assert node.alarm_keys() == [(node.uuid(1), "xid.120")]


def test_d19_history_follows_the_hardware_not_the_rank(tmp_path: Path) -> None:
    bad = DeviceIdentity(host="old", uuid="GPU-bad", pci_bus_id="0000:10:00.0", rank=2)
    event = _fatal("GPU-bad", bad)
    FaultHistory().with_event(event).save(tmp_path / "faults.jsonl")
    history = FaultHistory.load(tmp_path / "faults.jsonl")
    placement = [
        DeviceIdentity(host="old", uuid="GPU-bad", pci_bus_id="0000:10:00.0", rank=0),
        DeviceIdentity(host="old", uuid="GPU-good", pci_bus_id="0000:11:00.0", rank=1),
        DeviceIdentity(host="new", uuid="GPU-other", pci_bus_id="0000:10:00.0", rank=2),
    ]
    (refusal,) = history.refusals(placement)
    assert (refusal.rank, refusal.host, refusal.device) == (0, "old", "GPU-bad")
    assert history.without("GPU-bad").refusals(placement) == ()


def _fatal(device: str, identity: DeviceIdentity) -> HealthEvent:
    with Node([], sources=[LastXidGauge(1, None)]) as node:
        node.poll()
        moved = HealthReading(
            device=device, metric=Metric.XID, value=79, occurred_s=node.clock.now_s, identity=identity
        )
        gauge: Any = node.monitor._sources[0]
        gauge.reading = moved
        node.poll()
        (alarm,) = node.alarms
        return alarm


def test_d20_a_pcie_link_trained_down_warns_only_under_load() -> None:
    down = {"pcie_generation": 3, "pcie_width": 8}
    with Node([{}, {**down, "clock_events": IDLE, "utilization": 0}, down, {}]) as node:
        node.poll(5)
        assert node.alarms == []
        assert node.warning_keys() == [(node.uuid(2), Metric.PCIE_LINK)]


def test_b04_a_hot_card_warns_and_explains_a_slow_rank() -> None:
    hot = {"temperature": 91, "shutdown": 98, "clock_events": THERMAL, "sm_mhz": 1365, "sm_max_mhz": 1725}
    with Node([{**PCIE}, {**PCIE, **hot}]) as node:
        node.poll(3)
        assert node.alarms == []
        assert set(node.warning_keys()) == {(node.uuid(1), Metric.CLOCK_EVENTS), (node.uuid(1), Metric.SHUTDOWN_MARGIN)}
        assert slowdown_cause(node.monitor.active_warnings(), node.uuid(1)) == "thermal"
        assert slowdown_cause(node.monitor.active_warnings(), node.uuid(0)) is None
        told = [health_report(event, ranks=ranks_of(node), step=150) for event in node.told]
    assert {report.recommended_action for report in told} == {"observe"}
    explained = with_hardware_cause(_slow(1), told)
    assert explained.evidence["hardware_cause"] == "thermal"
    assert (explained.ranks, explained.recommended_action) == ((1,), "observe")
    assert with_hardware_cause(_slow(0), told) == _slow(0), "another rank's heat explains nothing"
    assert with_hardware_cause(_slow(1, step=100), told) == _slow(1, step=100), "nor does what came later"


def test_b12_a_card_with_half_its_power_limit_warns_and_explains_a_slow_rank() -> None:
    card = {**PCIE, "power_limit_w": 300, "power_default_w": 300, "clock_events": POWER_CAP}
    with Node([card, card, card, {**card, "power_limit_w": 150}]) as node:
        node.poll(3)
        assert node.alarms == []
        assert node.warning_keys() == [(node.uuid(3), Metric.POWER_CAP)]
        assert slowdown_cause(node.monitor.active_warnings(), node.uuid(3)) == "power_cap"
        told = [health_report(event, ranks=ranks_of(node), step=150) for event in node.told]
    assert with_hardware_cause(_slow(3), told).evidence["hardware_cause"] == "power_cap"


def _slow(rank: int, step: int = 200) -> SCOUTFaultReport:
    return SCOUTFaultReport(
        incident_id=f"slow {rank}",
        kind=FaultKind.COMPUTE_STRAGGLER,
        severity="warning",
        status="Attributed",
        scope="rank",
        ranks=(rank,),
        step=step,
        recommended_action="observe",
        message=f"rank {rank} is slow",
    )


@pytest.mark.parametrize("where", ["init", "handle"])
@pytest.mark.parametrize(
    ("error", "expected"),
    [("UNKNOWN", Metric.TELEMETRY_LOST), ("NOT_SUPPORTED", Metric.TELEMETRY_LOST), ("GPU_IS_LOST", Metric.PRESENCE)],
)
def test_f08_an_nvml_error_at_the_start_is_a_report_and_not_an_exception(where: str, error: str, expected: str) -> None:
    device: dict[str, Any] = {} if where == "init" else {"errors": {"nvmlDeviceGetHandleByIndex": error}}
    with Node([device], sources=()) as whole:
        whole.nvml.init_error = error if where == "init" else None
        with Node([], sources=[NvmlSource(device_index=0, module=whole.nvml)]) as job:
            job.poll(4)
            (event,) = job.alarms + job.told
            assert event.metric == expected
            assert event.severity.value == ("fatal" if error == "GPU_IS_LOST" else "warning")
