"""The closed loop under the real torchrun: a fault, a decision, a restart, and the same final weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scout_core.manager_api import RESTART_EXIT_CODE
from scout_core.trust.manifest import ManifestStore, verify
from tests.trust.launch import events, finals, starts, torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

STEPS = 12


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """How the ranks of an undisturbed job end."""
    run = tmp_path_factory.mktemp("healthy")
    assert torchrun(run, STEPS) == 0
    return finals(run)


def test_corruption_restarts_the_job_which_ends_in_the_bits_of_a_healthy_run(
    healthy: list[Any], tmp_path: Path
) -> None:
    run = tmp_path / "faulty"
    assert torchrun(run, STEPS, "fault=sdc", "at=7", restarts=2) == 0
    assert starts(run) == [(0, 0), (1, 6)]
    assert f"exitcode: {RESTART_EXIT_CODE}" in (run / "torchrun.log").read_text()
    decision = events(run, "RecoveryDecision")[0]
    assert (decision["step"], decision["exclude_ranks"], decision["lost_steps"]) == (6, [2], 2)
    assert [e["ranks"] for e in events(run, "SCOUTFaultReport") if e["kind"] == "sdc"] == [[2]]
    assert finals(run) == healthy


@pytest.mark.slow
@pytest.mark.parametrize("durable", ["save", "dcp"])
def test_the_same_with_durable_checkpoints_alone(healthy: list[Any], tmp_path: Path, durable: str) -> None:
    run = tmp_path / "faulty"
    assert torchrun(run, STEPS, "fault=sdc", "at=7", f"durable={durable}", "gemini=0", restarts=2) == 0
    assert starts(run) == [(0, 0), (1, 6)]
    assert finals(run) == healthy


@pytest.mark.slow
def test_a_killed_rank_leaves_a_verified_state_behind(healthy: list[Any], tmp_path: Path) -> None:
    run = tmp_path / "faulty"
    assert torchrun(run, STEPS, "fault=kill", "at=9", restarts=1) == 0
    assert starts(run)[1][1] in (6, 8)
    assert finals(run) == healthy


@pytest.mark.slow
def test_c02_a_checkpoint_that_brings_a_nan_each_time_is_revoked_within_two_restarts(
    healthy: list[Any], tmp_path: Path
) -> None:
    """Step 4 is whole, verified and bad. A kill after it makes the job load it: twice, and then never again."""
    run = tmp_path / "faulty"
    words = ("fault=kill", "at=5", "durable=save", "damaged=4", "gemini=0", "budget=2")
    assert torchrun(run, STEPS, *words, restarts=3) == 0
    assert starts(run) == [(0, 0), (1, 4), (2, 4), (3, 2)]
    reports = events(run, "SCOUTFaultReport")
    assert "checkpoint_bad" in {one["kind"] for one in reports} and "sdc" not in {one["kind"] for one in reports}
    assert all(one["ranks"] == [] for one in reports if one["kind"] in ("checkpoint_bad", "numeric"))
    decisions = events(run, "RecoveryDecision")
    assert [(one["mode"], one["step"], one["exclude_ranks"]) for one in decisions] == [
        ("RECOVERY_VERIFIED", 4, []),
        ("RECOVERY_VERIFIED", 2, []),
    ]
    states = {(m.step, m.attempt): m.state for m in ManifestStore(run / "manifests").all()[0]}
    assert states[4, 0] == "QUARANTINED" and states[2, 0] == "RECOVERY_VERIFIED"
    assert finals(run) == healthy


@pytest.mark.slow
@pytest.mark.parametrize("own", ["before", "after", "twice"])
def test_f18_beside_the_jobs_own_saving_a_restart_ends_in_the_same_bits(
    healthy: list[Any], tmp_path: Path, own: str
) -> None:
    run = tmp_path / "faulty"
    assert torchrun(run, STEPS, f"own={own}", "durable=save", "fault=sdc", "at=7", restarts=1) == 0
    assert starts(run) == [(0, 0), (1, 6)]
    assert finals(run) == healthy
    for rank in range(4):  # one save a step, and the last is of the trained weights
        assert json.loads((run / f"own-{rank}.json").read_text()) == [6, 6, True]
    for folder in (run, run / "again") if own == "twice" else (run,):
        manifests, refused = ManifestStore(folder / "manifests").all()
        assert refused == [] and {m.step for m in manifests} == {2, 4, 6, 8, 10, 12}
        assert len(manifests) == 6 and all(m.state == "RECOVERY_VERIFIED" and verify(m) == [] for m in manifests)
