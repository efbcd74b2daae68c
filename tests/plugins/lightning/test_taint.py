"""Corruption that the newest scheduled check does not show: what is certified after it, and who is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import RankPool
from tests.plugins.lightning.fits import Fit, run, run_all
from tests.plugins.lightning.test_checkpoints import ALL, states
from tests.plugins.lightning.troubles import Hardware, Save, Share, Told

pytestmark = pytest.mark.distributed


def test_corruption_found_at_the_first_of_two_steps_of_a_batch_is_answered_once_and_certifies_nothing_more(
    pool: RankPool, tmp_path: Path
) -> None:
    """Between the two all ranks take rank 0's parameters, so the check after the second finds nothing."""
    fit = Fit(folder=tmp_path, mode="manual_twice", fault_at=2, steps=8, checkpoint=ALL, on_fault=Told())
    for one in pool.run(run, fit, timeout=120):
        assert {(kind, ranks, step) for kind, ranks, step in one["reports"] if kind == "sdc"} == {("sdc", (2,), 3)}
        assert one["status"] == ("Agree", True, True) and one["answers"] == 1
    assert states(tmp_path) == {2: "RECOVERY_VERIFIED", **dict.fromkeys([4, 6, 8], "QUARANTINED")}


def test_corruption_that_only_check_now_saw_certifies_nothing_more_also_right_after_it(
    pool: RankPool, tmp_path: Path
) -> None:
    """Before the next scheduled check all ranks take rank 0's parameters, so that it finds nothing."""
    fault: dict[str, Any] = {"every": 2, "fault_at": 2, "look": 3, "checkpoint": ALL}
    fits = [
        Fit(folder=tmp_path / "on", steps=6, before=(Share(3),), on_fault=Told(), **fault),
        Fit(folder=tmp_path / "end", steps=3, **fault),  # no scheduled check comes after it
    ]
    for on, end in pool.run(run_all, fits, timeout=120):
        assert [step for kind, _, step in on["reports"] if kind == "sdc"] == [3] and on["answers"] == 1
        assert on["looked"] == end["looked"] == ("Attributed", True)
    good = dict.fromkeys([1, 2], "RECOVERY_VERIFIED")
    assert states(tmp_path / "on") == {**good, **dict.fromkeys([3, 4, 5, 6], "QUARANTINED")}
    assert states(tmp_path / "end") == {**good, 3: "QUARANTINED"}


@pytest.mark.parametrize(
    ("sign", "state"),
    [({"remapped": [0, 0, 0, 1]}, "QUARANTINED"), ({"errors": {"*": "GPU_IS_LOST"}}, "RECOVERY_VERIFIED")],
    ids=["memory", "lost"],
)
def test_a_memory_fault_that_one_ranks_hardware_tells_of_ends_certification_on_all(
    pool: RankPool, tmp_path: Path, sign: dict[str, Any], state: str
) -> None:
    """Rank 0, which writes the manifests, has healthy hardware."""
    fit = Fit(folder=tmp_path, every=2, steps=4, checkpoint=ALL, after=(Hardware(2, sign),), on_fault=Told())
    for rank, one in enumerate(pool.run(run, fit, timeout=120)):
        assert [kind for kind, _, _ in one["reports"]] == ["hardware_fault"] * (rank == 1)
        assert one["status"] == ("Agree", True, True) and one["answers"] == (state == "QUARANTINED")
    assert states(tmp_path) == {1: "RECOVERY_VERIFIED", **dict.fromkeys([2, 3, 4], state)}


def test_ranks_that_save_before_and_after_the_vote_lose_certification_and_not_the_job(
    pool: RankPool, tmp_path: Path
) -> None:
    """Three save between step and batch end, as on a signal, while the fourth waits for their votes."""
    path = tmp_path / "early.ckpt"
    early, late = Save(path, 2, (0, 2, 3)), Save(path, 2, (1,))
    for one in pool.run(run, Fit(folder=tmp_path, patience_s=1.0, before=(early,), after=(late,)), timeout=120):
        assert (one["ended"], one["global_step"], one["reports"]) == (None, 4, [])
        assert any("gathering over all ranks" in said for said in one["errors"])
    assert states(tmp_path) == {2: "CANDIDATE"}
