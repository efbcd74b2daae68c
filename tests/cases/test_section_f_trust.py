"""Cases F18 and F19: checkpoints beside the job's own callbacks, and faults that always come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from scout_core.manager_api import RESTART_EXIT_CODE, STOP_EXIT_CODE
from scout_core.trust.manifest import ManifestStore, verify
from tests.distributed.pool import RankPool
from tests.trust.launch import events, starts, torchrun
from tests.trust.ranks import train, train_beside_own_callback
from tests.trust.test_loop import same

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def healthy(ranks4: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks4.run(train, tmp_path_factory.mktemp("healthy"), 4, gemini=False)


@pytest.mark.parametrize("order", ["before", "after", "twice"])
def test_f18_the_order_of_callbacks_changes_neither_what_is_saved_nor_how_often(
    ranks4: RankPool, healthy: list[dict[str, Any]], tmp_path: Path, order: str
) -> None:
    ended = ranks4.run(train_beside_own_callback, tmp_path, 4, order)
    runs = ["run", "again"] if order == "twice" else ["run"]
    assert same(ended, healthy)
    for rank, one in enumerate(ended):
        assert one["reports"] == [] and one["counts"] == [4] * len(runs)
        assert one["calls"].count(("save", 4)) == len(runs)  # once a run
        assert one["calls"].count(("commit", 4)) == (len(runs) if rank == 0 else 0)
    for name in runs:
        for manifest in ManifestStore(tmp_path / name / "manifests").all()[0]:
            assert manifest.state == "RECOVERY_VERIFIED" and verify(manifest) == []
            for rank, one in enumerate(ended):
                path = Path(manifest.folder) / f"rank-{rank:05d}.pt"
                kept = torch.load(path, weights_only=True)["tensors"]
                mine = one["own"][manifest.step]
                assert all(any(k.shape == m.shape and torch.equal(k, m) for k in kept) for m in mine)


@pytest.mark.slow
@pytest.mark.timeout(700)
def test_f19_a_fault_that_always_returns_ends_in_stop(tmp_path: Path) -> None:
    """Corruption before step 5, the first that is checked, in every attempt: from scratch, then no more."""
    words = ("fault=sdc", "at=4", "interval=5", "attempts=9", "budget=1")
    assert torchrun(tmp_path, 12, *words, restarts=2, timeout=600) != 0
    decisions = events(tmp_path, "RecoveryDecision")
    assert [d["mode"] for d in decisions] == ["RESTART_FROM_SCRATCH", "STOP"]
    assert [(d["lost_steps"], d["restarts_used"], d["restart_budget"]) for d in decisions] == [(5, 0, 1), (5, 1, 1)]
    assert starts(tmp_path) == [(0, 0), (1, 0)]  # attempts after the stop leave before they train
    log = (tmp_path / "torchrun.log").read_text()
    assert f"exitcode: {RESTART_EXIT_CODE}" in log and f"exitcode: {STOP_EXIT_CODE}" in log
    assert "an earlier attempt decided to stop" in log
