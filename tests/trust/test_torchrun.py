"""The closed loop under the real torchrun: a fault, a decision, a restart, and the same final weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from scout_core.manager_api import RESTART_EXIT_CODE
from tests.trust.launch import events, finals, starts, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


def test_corruption_restarts_the_job_which_ends_in_the_bits_of_a_healthy_run(tmp_path: Path) -> None:
    assert torchrun(tmp_path / "healthy", 12) == 0
    run = tmp_path / "faulty"
    assert torchrun(run, 12, "fault=sdc", "at=7", restarts=2) == 0
    assert starts(run) == [(0, 0), (1, 6)]
    assert f"exitcode: {RESTART_EXIT_CODE}" in (run / "torchrun.log").read_text()
    decision = events(run, "RecoveryDecision")[0]
    assert (decision["step"], decision["exclude_ranks"], decision["lost_steps"]) == (6, [2], 2)
    assert [e["ranks"] for e in events(run, "SCOUTFaultReport") if e["kind"] == "sdc"] == [[2]]
    assert finals(run) == finals(tmp_path / "healthy")


@pytest.mark.slow
@pytest.mark.parametrize("durable", ["save", "dcp"])
def test_the_same_with_durable_checkpoints_alone(tmp_path: Path, durable: str) -> None:
    assert torchrun(tmp_path / "healthy", 12) == 0
    run = tmp_path / "faulty"
    assert torchrun(run, 12, "fault=sdc", "at=7", f"durable={durable}", "gemini=0", restarts=2) == 0
    assert starts(run) == [(0, 0), (1, 6)]
    assert finals(run) == finals(tmp_path / "healthy")


@pytest.mark.slow
def test_a_killed_rank_leaves_a_verified_state_behind(tmp_path: Path) -> None:
    assert torchrun(tmp_path / "healthy", 12) == 0
    run = tmp_path / "faulty"
    assert torchrun(run, 12, "fault=kill", "at=9", restarts=1) == 0
    assert starts(run)[1][1] in (6, 8)
    assert finals(run) == finals(tmp_path / "healthy")
