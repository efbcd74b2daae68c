"""Lightning's own checkpoints: what is certified, kept, refused, and loaded again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scout_core.trust.manifest import ManifestStore, verify
from scout_core.trust.states import Outcome, TrustState
from scout_lightning import latest_verified
from scout_lightning.certifier import state_at_save
from tests.distributed.pool import RankPool
from tests.plugins.lightning.fits import Fit, run, run_all
from tests.plugins.lightning.test_fit import same

ALL = {"every_n_train_steps": 1, "save_top_k": -1}


def states(folder: Path) -> dict[int, str]:
    return {m.step: m.state for m in ManifestStore(folder / "scout" / "manifests").all()[0]}


@pytest.mark.parametrize(
    ("outcome", "checked_now", "failing", "state"),
    [
        (None, False, False, TrustState.CANDIDATE),
        (Outcome.CLEAN, True, False, TrustState.RECOVERY_VERIFIED),
        (Outcome.STRAGGLER, True, False, TrustState.RECOVERY_VERIFIED),
        (Outcome.CLEAN, False, False, TrustState.CANDIDATE),
        (Outcome.CLEAN, True, True, TrustState.CANDIDATE),
        (Outcome.INCONCLUSIVE, True, False, TrustState.CANDIDATE),
        (Outcome.SDC, True, False, TrustState.QUARANTINED),
        (Outcome.SDC, False, True, TrustState.QUARANTINED),
    ],
)
def test_the_state_of_a_checkpoint_at_the_moment_it_is_saved(
    outcome: Outcome | None, checked_now: bool, failing: bool, state: TrustState
) -> None:
    assert state_at_save(outcome=outcome, checked_now=checked_now, failing=failing)[0] is state


@pytest.mark.distributed
@pytest.mark.parametrize("order", ["before", "after", "twice"])
def test_f18_neither_the_order_of_callbacks_nor_a_second_one_changes_what_is_certified(
    pool: RankPool, tmp_path: Path, order: str
) -> None:
    fit = Fit(folder=tmp_path, checkpoint=ALL, scout_last=order == "after", callbacks=2 if order == "twice" else 1)
    for one in pool.run(run, fit, timeout=120):
        assert (one["reports"], one["steps"], one["checks"], one["attached"]) == ([], 4, 4, 1)
    assert states(tmp_path) == dict.fromkeys([1, 2, 3, 4], "RECOVERY_VERIFIED")
    for manifest in ManifestStore(tmp_path / "scout" / "manifests").all()[0]:
        assert verify(manifest) == []
        kept = torch.load(Path(manifest.folder) / manifest.files[0].path, weights_only=True)
        assert kept["global_step"] == manifest.step == kept["scout"]["steps"]


@pytest.mark.distributed
def test_f18_a_save_at_the_end_of_an_epoch_is_certified_too(pool: RankPool, tmp_path: Path) -> None:
    fit = Fit(
        folder=tmp_path,
        checkpoint={"save_on_train_epoch_end": True, "every_n_epochs": 1, "save_top_k": -1},
        trainer={"limit_train_batches": 2},
    )
    pool.run(run, fit, timeout=120)
    assert states(tmp_path) == {2: "RECOVERY_VERIFIED", 4: "RECOVERY_VERIFIED"}


@pytest.mark.distributed
def test_a_save_between_checks_is_a_candidate_until_the_next_clean_check(pool: RankPool, tmp_path: Path) -> None:
    pool.run(run, Fit(folder=tmp_path, every=2, steps=5, checkpoint=ALL), timeout=120)
    assert states(tmp_path) == {**dict.fromkeys([1, 2, 3, 4], "RECOVERY_VERIFIED"), 5: "CANDIDATE"}


@pytest.mark.distributed
def test_corruption_quarantines_its_step_and_what_was_not_proven_before(pool: RankPool, tmp_path: Path) -> None:
    pool.run(run, Fit(folder=tmp_path, every=2, steps=6, checkpoint=ALL, fault_at=3), timeout=120)
    assert states(tmp_path) == {
        1: "RECOVERY_VERIFIED",
        2: "RECOVERY_VERIFIED",
        **dict.fromkeys([3, 4, 5, 6], "QUARANTINED"),
    }


@pytest.mark.distributed
def test_resuming_from_verified_gives_the_healthy_trajectory_bit_for_bit(pool: RankPool, tmp_path: Path) -> None:
    keep = {"every_n_train_steps": 1, "save_top_k": 1}  # Lightning would keep the newest alone, which is corrupt
    faulty = Fit(folder=tmp_path / "a", checkpoint=keep, fault_at=3, steps=5, ckpt_path="scout-verified")
    again = Fit(folder=tmp_path / "a", checkpoint=keep, steps=6, ckpt_path="scout-verified")
    healthy = Fit(folder=tmp_path / "b", steps=6)
    for broken, resumed, whole in pool.run(run_all, [faulty, again, healthy], timeout=180):
        assert ("sdc", (2,), 4) in broken["reports"] and broken["steps"] == 5
        assert resumed["checks"] == 3 and resumed["steps"] == 6  # 4, 5 and 6: from the checkpoint of step 3
        assert resumed["reports"] == []
        assert same(resumed, whole)


@pytest.mark.distributed
def test_the_newest_verified_outlives_save_top_k_until_a_newer_one(pool: RankPool, tmp_path: Path) -> None:
    keep = {"every_n_train_steps": 1, "save_top_k": 1}
    pool.run(run, Fit(folder=tmp_path, checkpoint=keep, every=3, steps=5), timeout=120)
    left = sorted(p.name for p in (tmp_path / "ckpt").iterdir())
    assert left == ["step=3.ckpt", "step=5.ckpt"]
    assert states(tmp_path) == {3: "RECOVERY_VERIFIED", 5: "CANDIDATE"}
    assert latest_verified(tmp_path / "scout") == str(tmp_path / "ckpt" / "step=3.ckpt")


@pytest.mark.distributed
def test_the_newest_verified_outlives_save_last_which_writes_over_it(pool: RankPool, tmp_path: Path) -> None:
    keep = {"every_n_train_steps": 1, "save_top_k": 0, "save_last": True}
    pool.run(run, Fit(folder=tmp_path, checkpoint=keep, fault_at=3, steps=5), timeout=120)
    found = latest_verified(tmp_path / "scout")
    assert found is not None and Path(found).name == "last-verified-step3.ckpt"
    assert torch.load(found, weights_only=True)["global_step"] == 3


@pytest.mark.distributed
def test_asynchronous_writes_are_certified_once_complete_and_the_verified_one_is_never_lost(
    pool: RankPool, tmp_path: Path
) -> None:
    top, last = (
        {"every_n_train_steps": 1, "save_top_k": 1},
        {"every_n_train_steps": 1, "save_top_k": 0, "save_last": True},
    )
    fits = [
        Fit(folder=tmp_path / "all", extras=("async",), checkpoint=ALL),
        Fit(folder=tmp_path / "top", extras=("async",), checkpoint=top, fault_at=3, steps=6),
        Fit(folder=tmp_path / "last", extras=("late",), checkpoint=last, fault_at=3, steps=6),
    ]
    pool.run(run_all, fits, timeout=120)
    assert states(tmp_path / "all") == dict.fromkeys([1, 2, 3, 4], "RECOVERY_VERIFIED")
    for name in ("all", "top", "last"):
        assert all(verify(m) == [] for m in ManifestStore(tmp_path / name / "scout" / "manifests").all()[0])
    for name in ("top", "last"):
        found = latest_verified(tmp_path / name / "scout")
        assert found is not None and torch.load(found, weights_only=True)["global_step"] == 3


@pytest.mark.distributed
def test_a_proven_candidate_is_what_a_corrupted_fit_goes_back_to(pool: RankPool, tmp_path: Path) -> None:
    keep = {"every_n_train_steps": 1, "save_top_k": 1, "save_last": True, "save_on_exception": True}
    fits = [
        Fit(folder=tmp_path, every=2, checkpoint=keep, fault_at=3, steps=9, raise_at=7, scout_last=True),
        Fit(folder=tmp_path, every=2, checkpoint=keep, steps=6, ckpt_path="scout-verified"),
        Fit(folder=tmp_path / "whole", every=2, steps=6),
    ]
    for broken, resumed, healthy in pool.run(run_all, fits, timeout=120):
        assert broken["ended"] == "user code failed" and ("sdc", (2,), 4) in broken["reports"]
        assert resumed["checks"] == 2 and resumed["reports"] == []  # 4 and 6: from the checkpoint of step 2
        assert same(resumed, healthy)


@pytest.mark.distributed
def test_weights_alone_are_no_checkpoint_to_go_on_from(pool: RankPool, tmp_path: Path) -> None:
    pool.run(run, Fit(folder=tmp_path, checkpoint={**ALL, "save_weights_only": True}, every=2, steps=3), timeout=120)
    assert states(tmp_path) == dict.fromkeys([1, 2, 3], "CANDIDATE")


@pytest.mark.distributed
def test_what_is_saved_on_an_exception_is_never_certified(pool: RankPool, tmp_path: Path) -> None:
    keep = {"every_n_train_steps": 100, "save_on_exception": True, "save_top_k": -1}
    for one in pool.run(run, Fit(folder=tmp_path, checkpoint=keep, raise_at=2), timeout=120):
        assert one["ended"] == "user code failed"
    assert list(states(tmp_path).values()) == ["CANDIDATE"]
    assert latest_verified(tmp_path / "scout") is None


@pytest.mark.distributed
def test_a_checkpoint_damaged_on_disk_is_skipped_with_its_reason(
    pool: RankPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool.run(run, Fit(folder=tmp_path, checkpoint=ALL, steps=3), timeout=120)
    newest = tmp_path / "ckpt" / "step=3.ckpt"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    assert latest_verified(tmp_path / "scout") == str(tmp_path / "ckpt" / "step=2.ckpt")
    assert "step=3.ckpt" in caplog.text and "other content" in caplog.text


def test_nothing_verified_is_none(tmp_path: Path) -> None:
    assert latest_verified(tmp_path / "nowhere") is None
