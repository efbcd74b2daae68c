"""Events as fault reports, and the history of bad hardware."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scout_core.health import DeviceIdentity, FaultHistory, HealthAction, HealthEvent, HealthSeverity, IdentityMap
from scout_core.health.types import HOST
from scout_core.report import SCOUTFaultReport
from scout_core.report.health_reports import health_report

HERE = DeviceIdentity(host="node7", uuid="GPU-1", pci_bus_id="0000:c3:00.0", nvml_index=3)


def event(**more: Any) -> HealthEvent:
    given: dict[str, Any] = {
        "severity": HealthSeverity.FATAL,
        "device": "GPU-1",
        "metric": "ecc.uncorrectable",
        "time_s": 120.0,
        "first_sign_s": 100.0,
        "message": "2 uncorrectable memory error(s)",
        "action": HealthAction.EXCLUDE_UNTIL_RESET,
        "blocks_certification": True,
        "identity": HERE,
        **more,
    }
    return HealthEvent(**given)


def test_a_fatal_event_names_device_host_and_all_ranks_on_it() -> None:
    ranks = IdentityMap(devices=tuple(DeviceIdentity(host="node7", uuid="GPU-1", rank=r) for r in (5, 4)))
    report = health_report(event(), ranks=ranks, step=80, step_at=lambda when: int(when / 2))
    assert (report.status, report.basis, report.scope) == ("Attributed", "direct", "device")
    assert (report.ranks, report.hosts, report.devices) == ((4, 5), ("node7", "node7"), ("GPU-1", "GPU-1"))
    assert (report.step, report.first_seen_step) == (80, 50)
    assert report.evidence["blocks_certification"] is True
    assert report.evidence["identity"]["pci_bus_id"] == "0000:c3:00.0"
    assert "PCI 0000:c3:00.0" in report.message
    assert SCOUTFaultReport.model_validate_json(report.model_dump_json()) == report


def test_without_a_map_the_events_own_rank_is_named() -> None:
    own = DeviceIdentity(host="node7", uuid="GPU-1", rank=9)
    assert health_report(event(identity=own)).ranks == (9,)
    assert health_report(event()).ranks == ()


def test_a_warning_accuses_less_and_lost_telemetry_nobody() -> None:
    warning = health_report(event(severity=HealthSeverity.WARNING, action=HealthAction.OBSERVE))
    assert (warning.kind.value, warning.status, warning.severity) == ("hardware_warning", "Inconclusive", "warning")
    ranks = IdentityMap(devices=(DeviceIdentity(host="node7", uuid="GPU-1", rank=4),))
    for metric in ("telemetry_lost", "telemetry_stale"):
        lost = health_report(event(metric=metric, severity=HealthSeverity.WARNING), ranks=ranks)
        assert (lost.kind.value, lost.ranks, lost.basis) == ("telemetry_lost", (), "none")


def test_a_fault_of_the_machine_names_all_its_ranks_and_no_device() -> None:
    places = [("node7", 0), ("node7", 1), ("node8", 2)]
    ranks = IdentityMap(devices=tuple(DeviceIdentity(host=h, uuid=f"GPU-{r}", rank=r) for h, r in places))
    report = health_report(
        event(device=HOST, metric="nvlink.fabric", identity=DeviceIdentity(host="node7")), ranks=ranks
    )
    assert (report.scope, report.ranks, report.devices) == ("host", (0, 1), ())


@pytest.mark.parametrize("action", list(HealthAction))
def test_every_action_has_a_recommendation(action: HealthAction) -> None:
    recommended = health_report(event(action=action)).recommended_action
    assert (recommended == "restart_excluding") == (action in (HealthAction.EXCLUDE, HealthAction.EXCLUDE_UNTIL_RESET))


def test_an_event_is_json_ready() -> None:
    assert json.loads(json.dumps(event().to_json()))["identity"]["host"] == "node7"


def test_only_excluding_faults_of_known_hardware_are_kept() -> None:
    assert FaultHistory().with_event(event(severity=HealthSeverity.WARNING)).faults == ()
    assert FaultHistory().with_event(event(action=HealthAction.RESTART_RANK)).faults == ()
    assert FaultHistory().with_event(event(identity=None)).faults == ()
    once = FaultHistory().with_event(event())
    assert once.with_event(event()).faults == once.faults
    assert len(once.faults) == 1


def test_a_fault_of_a_whole_host_refuses_the_host_and_one_of_a_gpu_only_the_gpu() -> None:
    host_wide = FaultHistory().with_event(event(device=HOST, identity=DeviceIdentity(host="node7")))
    same, other = DeviceIdentity(host="node7", uuid="GPU-2", rank=0), DeviceIdentity(host="node8", uuid="GPU-1", rank=1)
    assert [r.rank for r in host_wide.refusals([same, other])] == [0]
    one_gpu = FaultHistory().with_event(event())
    assert [r.rank for r in one_gpu.refusals([same, other])] == [1], "the GPU was moved to another host"


def test_history_on_disk_is_strict_and_an_absent_file_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "faults.jsonl"
    assert FaultHistory.load(path) == FaultHistory()
    FaultHistory().with_event(event()).save(path)
    assert len(FaultHistory.load(path).faults) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["faults.jsonl"]
    path.write_text('{"host": "a", "surprise": 1}\n')
    with pytest.raises(ValueError, match="surprise"):
        FaultHistory.load(path)
