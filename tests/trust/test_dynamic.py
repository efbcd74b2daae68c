"""The dynamic rule on real ranks: a candidate after one clean cycle, promoted by the next, rejected job-wide.

Two hidden layers take turns, one a check, a check every two steps: a cycle ends at steps 4, 8, 12.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scout_core.trust.manifest import ManifestStore
from tests.distributed.pool import RankPool
from tests.trust.ranks import forget_memory, train, train_with
from tests.trust.test_loop import same

pytestmark = pytest.mark.distributed

DYNAMIC: dict[str, Any] = {"certification": "dynamic", "flush_interval": 0}


def durable(run_dir: Path) -> dict[int, str]:
    return {manifest.step: manifest.state for manifest in ManifestStore(run_dir / "manifests").all()[0]}


def on_disk(run_dir: Path) -> set[int]:
    return {int(path.name.split("-")[1]) for path in (run_dir / "gemini").glob("rank-*/step-*")}


def judged(run_dir: Path) -> Any:
    return json.loads((run_dir / "run.json").read_text())["record"]["judged"]


def test_a_candidate_waits_for_the_following_cycle_and_no_restart_trusts_it(pool: RankPool, tmp_path: Path) -> None:
    pool.run(train_with, tmp_path, 7, "save", **DYNAMIC)
    assert durable(tmp_path) == {4: "CANDIDATE"} and on_disk(tmp_path) == {4} and judged(tmp_path) == {}
    pool.run(forget_memory)
    again = pool.run(train_with, tmp_path, 1, "save", **DYNAMIC)
    assert [one["start"] for one in again] == [0] * 4
    assert all(one["decision"]["mode"] == "RESTART_FROM_SCRATCH" for one in again)
    pool.run(forget_memory)


def test_the_next_cycle_promotes_it_in_both_tiers(pool: RankPool, tmp_path: Path) -> None:
    healthy = pool.run(train_with, tmp_path / "healthy", 12, "save", **DYNAMIC)
    pool.run(train_with, tmp_path / "run", 9, "save", **DYNAMIC)
    assert durable(tmp_path / "run") == {4: "RECOVERY_VERIFIED", 8: "CANDIDATE"}
    assert on_disk(tmp_path / "run") == {4, 8} and judged(tmp_path / "run") == {"4@0": "RECOVERY_VERIFIED"}
    pool.run(forget_memory)
    again = pool.run(train_with, tmp_path / "run", 12, "save", **DYNAMIC)
    assert [one["start"] for one in again] == [4] * 4 and same(again, healthy)
    pool.run(forget_memory)


def test_memory_copies_alone_carry_promotion_and_rejection_over_a_restart(pool: RankPool, tmp_path: Path) -> None:
    healthy = pool.run(train, tmp_path / "healthy", 12, **DYNAMIC)
    pool.run(train, tmp_path / "run", 10, fault="sdc", at=9, **DYNAMIC)
    assert judged(tmp_path / "run").items() >= {"4@0": "RECOVERY_VERIFIED", "8@0": "REJECTED"}.items()
    pool.run(forget_memory)
    again = pool.run(train, tmp_path / "run", 12, **DYNAMIC)
    assert [one["start"] for one in again] == [4] * 4 and same(again, healthy)
    pool.run(forget_memory)


@pytest.mark.parametrize(
    ("at", "states", "mode", "step"),
    [
        (5, {4: "REJECTED"}, "RESTART_FROM_SCRATCH", None),
        (9, {4: "RECOVERY_VERIFIED", 8: "REJECTED"}, "RECOVERY_VERIFIED", 4),
    ],
)
def test_corruption_on_one_rank_rejects_the_candidate_on_all(
    pool: RankPool, tmp_path: Path, at: int, states: dict[int, str], mode: str, step: int | None
) -> None:
    ended = pool.run(train_with, tmp_path, at + 1, "save", fault="sdc", at=at, **DYNAMIC)
    assert durable(tmp_path) == states
    assert judged(tmp_path).items() >= {f"{s}@0": state for s, state in states.items()}.items()
    for one in ended:
        assert (one["decision"]["mode"], one["decision"]["step"]) == (mode, step)
        assert one["decision"]["exclude_ranks"] == [2]
    pool.run(forget_memory)
    again = pool.run(train_with, tmp_path, 1, "save", **DYNAMIC)
    assert [one["start"] for one in again] == [step or 0] * 4
    pool.run(forget_memory)


def test_what_was_captured_since_the_candidate_falls_with_it(pool: RankPool, tmp_path: Path) -> None:
    """Corruption found at step 8 may have been there at step 6: that capture is no longer the newest to go back to."""
    ended = pool.run(train_with, tmp_path, 8, "save", fault="sdc", at=7, **DYNAMIC)
    assert all(one["decision"]["mode"] == "RESTART_FROM_SCRATCH" for one in ended)
    assert judged(tmp_path) == {"2@0": "REJECTED", "4@0": "REJECTED", "6@0": "REJECTED"}
    assert all(one["survivors"] == [] for one in ended)
    pool.run(forget_memory)
