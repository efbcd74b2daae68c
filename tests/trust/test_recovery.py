"""`prepare_recovery` on real ranks: every row of the contract's table, the emergency replay run by the job itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import scout_core
from scout_core.faults import corrupt_weight
from tests.distributed.pool import RankPool
from tests.trust.ranks import fail_and_ask, forget_memory, train_with

pytestmark = pytest.mark.distributed

STEPS = 10
GEMINI, VERIFIED, DURABLE = (
    ("GEMINI", "gemini", 10),
    ("RECOVERY_VERIFIED", "gemini", 4),
    ("RECOVERY_VERIFIED", "durable", 4),
)
"""The newest capture; and the candidate of the first cycle (step 4), promoted by the second (step 8), in both tiers."""


def chosen(decision: dict[str, Any]) -> tuple[str, str, int]:
    return decision["mode"], decision["source"], decision["step"]


@pytest.mark.parametrize(
    ("how", "kind", "accessible", "expected", "word"),
    [
        ("hang", "hang", True, GEMINI, "complete clean replay"),
        ("nothing", "uncertain", True, GEMINI, "complete clean replay"),
        ("corrupt", "hang", True, VERIFIED, "found corruption"),
        ("corrupt", "uncertain", True, VERIFIED, "found corruption"),
        ("nan", "uncertain", True, VERIFIED, "incomplete"),
        ("unable", "hang", True, VERIFIED, "rank 1 cannot replay"),
        ("apart", "hang", True, VERIFIED, "at steps"),
        ("nothing", "straggler", True, GEMINI, "straggler"),
        ("nothing", "straggler", False, DURABLE, "inaccessible"),
        ("nothing", "hang", False, DURABLE, "inaccessible"),
        ("nothing", "inaccessible", False, DURABLE, "inaccessible"),
        ("nothing", "inaccessible", True, DURABLE, "inaccessible"),
        ("nothing", "sdc", True, VERIFIED, "corruption"),
    ],
)
def test_the_contracts_table_on_real_ranks(
    pool: RankPool, tmp_path: Path, how: str, kind: str, accessible: bool, expected: tuple[str, str, int], word: str
) -> None:
    ended = pool.run(fail_and_ask, tmp_path, STEPS, how, kind, accessible)
    decisions = [one["decision"] for one in ended if one["decision"] is not None]
    assert len(decisions) == (4 if accessible else 1) and all(d == decisions[0] for d in decisions)
    assert chosen(decisions[0]) == expected and word in decisions[0]["reason"]
    corrupt = how == "corrupt"
    assert decisions[0]["exclude_ranks"] == ([2] if corrupt else [])
    if corrupt:
        assert ended[0]["delivered"][:2] == ["RecoveryDecision", "SCOUTFaultReport"]


def test_a_replay_that_breaks_off_on_one_rank_is_incomplete(pool: RankPool, tmp_path: Path) -> None:
    ended = pool.run(fail_and_ask, tmp_path, 8, "breaks", "hang", True)
    for one in ended:
        assert chosen(one["decision"]) == VERIFIED and "incomplete" in one["decision"]["reason"]


def ask_with_more_state_than_a_check_compares(run_dir: Path, place: int) -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(*[nn.Linear(8, 8) for _ in range(2)]), nn.Linear(8, 8))
    model.register_parameter("unused", nn.Parameter(torch.zeros(3 << 18)))  # 3 MiB that no replay reads
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"check_interval": 2, "gemini": True, "certification": "dynamic", "state_budget_mib": 1}
    with scout_core.attach(model, optimizer, run_dir=run_dir, **settings) as scout:
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        if dist.get_rank() == 2:
            corrupt_weight(model.unused, element=place, bit=20)
        return scout.prepare_recovery("uncertain").model_dump(mode="json")


@pytest.mark.parametrize("place", [5, 3 << 17, (3 << 18) - 1])
def test_the_emergency_replay_compares_all_of_the_live_state(pool: RankPool, tmp_path: Path, place: int) -> None:
    for decision in pool.run(ask_with_more_state_than_a_check_compares, tmp_path, place):
        assert decision["exclude_ranks"] == [2] and "found corruption" in decision["reason"]


@pytest.mark.parametrize(("how", "step"), [("hang", STEPS), ("corrupt", 4)])
def test_the_next_attempt_follows_the_decision(pool: RankPool, tmp_path: Path, how: str, step: int) -> None:
    pool.run(fail_and_ask, tmp_path, STEPS, how, "hang", True)
    pool.run(forget_memory)
    again = pool.run(train_with, tmp_path, STEPS, "save", certification="dynamic")
    assert [one["start"] for one in again] == [step] * 4


def test_a_decision_that_nobody_followed_is_taken_back(pool: RankPool, tmp_path: Path) -> None:
    pool.run(fail_and_ask, tmp_path, 4, "nothing", "straggler", True)
    assert (tmp_path / "decision.json").exists()
    pool.run(train_with, tmp_path, 8, "save", certification="dynamic")
    assert not (tmp_path / "decision.json").exists()
