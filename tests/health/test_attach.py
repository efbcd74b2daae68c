"""`attach(..., health=HealthConfig())`: the rank's own GPU is watched while it trains, and told once."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import scout_core
from scout_core.health.fake_nvml import FakeNvml
from scout_core.manager_api import HealthConfig, OrchestrationHooks, SCOUTFaultReport
from scout_core.trust.durable import DurableCheckpointConfig, TorchSaveCallbacks


def trained(steps: int = 3, **settings: Any) -> tuple[scout_core.Scout, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scout = scout_core.attach(model, optimizer, oob_enabled=False, **settings)
    for _ in range(steps):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    return scout, model


def test_a_fault_during_training_is_logged_and_handed_to_the_manager_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvml = FakeNvml({"devices": [{}, {"remapped": [0, 0, 0, 1]}]})
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    told = threading.Event()
    got: list[SCOUTFaultReport] = []

    def report_fault(report: SCOUTFaultReport) -> None:
        got.append(report)
        told.set()

    with trained(
        run_dir=tmp_path,
        health=HealthConfig(poll_interval_s=0.01, read_deadline_s=30),
        hooks=OrchestrationHooks(report_fault=report_fault),
    )[0] as scout:
        assert told.wait(30)
        assert scout.step_count == 3
        assert scout.tainted, "memory is at fault, and that counts without GEMINI and durable checkpoints too"
    (report,) = got
    assert (report.kind.value, report.scope, report.ranks) == ("hardware_fault", "device", (0,))
    assert report.devices == (nvml.devices[1].uuid,)
    written = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [record["kind"] for record in written] == ["hardware_fault"]
    assert list(scout.reports) == got
    assert nvml.opened == 0, "closing the handle lets go of NVML"


def test_a_fatal_fault_brings_its_recovery_decision_before_the_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvml = FakeNvml({"devices": [{"remapped": [0, 0, 0, 1]}]})
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    told, got = threading.Event(), []

    def report_fault(report: SCOUTFaultReport) -> None:
        got.append(report)
        told.set()

    scout, _ = trained(
        run_dir=tmp_path,
        health=HealthConfig(poll_interval_s=0.01, read_deadline_s=30),
        durable=DurableCheckpointConfig(folder=tmp_path / "durable", callbacks=TorchSaveCallbacks()),
        hooks=OrchestrationHooks(report_fault=report_fault, report_recovery=got.append),
    )
    with scout:
        assert told.wait(30)
        decision, report = got[:2]
        assert report.kind.value == "hardware_fault" and report.recommended_action == "restart_excluding"
        assert decision.mode == "RESTART_FROM_SCRATCH" and decision.exclude_ranks == (0,)
        assert decision.failed_step <= 3 and scout.last_recovery_decision == decision


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPUs of this machine are watched, by threads")
@pytest.mark.parametrize("health", [None, HealthConfig()])
def test_a_cpu_rank_trains_to_the_same_bits_with_no_thread_more(health: HealthConfig | None) -> None:
    plain = trained()[1].state_dict()
    before = threading.active_count()
    scout, model = trained(health=health)
    assert not scout.tainted
    assert threading.active_count() == before
    scout.close()
    assert all(torch.equal(value, plain[name]) for name, value in model.state_dict().items())
