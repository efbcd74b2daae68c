"""The callback in real fits of four ranks: boundaries, no trace, blame, and an end that takes everything off."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scout_core.manager_api import RESTART_EXIT_CODE
from scout_core.trust.manifest import ManifestStore
from scout_lightning.callback import _refusal
from tests.distributed.pool import RankPool
from tests.plugins.lightning.fits import Fit, run, run_all

pytestmark = pytest.mark.distributed


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    keys = ("parameters", "optimizer")
    return all(len(a[k]) == len(b[k]) and all(map(torch.equal, a[k], b[k])) for k in keys) and torch.equal(
        a["rng"], b["rng"]
    )


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, 4),
        ({"clip": 0.1}, 4),
        ({"accumulate": 4, "steps": 2}, 2),
        ({"mode": "manual"}, 4),
        ({"validate": True}, 4),
        ({"trainer": {"precision": "bf16-mixed"}}, 4),
    ],
    ids=["plain", "clipping", "F16-accumulation", "manual", "validation", "bf16"],
)
def test_a_clean_fit_is_checked_at_each_step_silent_and_the_same_bits(
    pool: RankPool, tmp_path: Path, options: dict[str, Any], steps: int
) -> None:
    for with_it, without in pool.run(
        run_all, [Fit(folder=tmp_path, **options), Fit(folder=tmp_path, scout=False, **options)], timeout=120
    ):
        assert with_it["reports"] == [] and with_it["reasons"] == []
        assert with_it["status"] == ("Agree", True, True)
        assert with_it["steps"] == with_it["checks"] == steps
        assert same(with_it, without)
        assert with_it["hooks"] == without["hooks"] and not with_it["wrapped"]


@pytest.mark.parametrize("mode", ["fp16", "fp16_fused"])
def test_f17_steps_skipped_on_all_ranks_raise_no_alarm_and_are_counted(
    pool: RankPool, tmp_path: Path, mode: str
) -> None:
    for one in pool.run(run, Fit(folder=tmp_path, mode=mode, steps=5), timeout=120):
        assert one["reports"] == []
        assert one["status"] == ("Agree", True, True)
        if mode == "fp16":  # a fused optimizer is called for these too, and skips in its kernel
            assert one["metrics"]["scout/skipped_steps"] == 2 and one["steps"] == 3


def test_two_optimizers_count_the_steps_of_the_first_and_what_the_second_made_waits_for_the_next_check(
    pool: RankPool, tmp_path: Path
) -> None:
    checkpoint = {"every_n_train_steps": 1, "save_top_k": -1}
    for one in pool.run(run, Fit(folder=tmp_path, mode="manual2", steps=8, checkpoint=checkpoint), timeout=120):
        assert one["global_step"] == 8 and one["steps"] == 4
        assert one["reports"] == [] and one["status"] == ("Agree", True, True)
    states = {m.step: m.state for m in ManifestStore(tmp_path / "scout" / "manifests").all()[0]}
    assert states == {**dict.fromkeys([2, 4, 6], "RECOVERY_VERIFIED"), 8: "CANDIDATE"}


def test_lbfgs_updates_inside_its_closure_so_checks_stay_incomplete_without_alarm(
    pool: RankPool, tmp_path: Path
) -> None:
    for one in pool.run(run, Fit(folder=tmp_path, mode="lbfgs", steps=2), timeout=120):
        assert one["reports"] == [] and one["steps"] == 2
        assert one["status"][1:] == (False, False), one["reasons"]  # incomplete, so never certified
        assert one["reasons"]


@pytest.mark.parametrize("rank", range(4))
def test_a_wrong_weight_on_any_rank_names_that_rank_alone(pool: RankPool, tmp_path: Path, rank: int) -> None:
    for one in pool.run(run, Fit(folder=tmp_path, fault_at=2, fault_rank=rank), timeout=120):
        named = {ranks for kind, ranks, _ in one["reports"] if kind == "sdc"}
        assert named == {(rank,)}
        assert min(step for _, _, step in one["reports"]) == 3


def test_stop_ends_the_fit_on_all_ranks_at_the_step_that_found_it(pool: RankPool, tmp_path: Path) -> None:
    ended = pool.run(run, Fit(folder=tmp_path, fault_at=2, on_fault="stop", steps=9), timeout=120)
    assert [(one["ended"], one["global_step"]) for one in ended] == [(None, 3)] * 4


def test_restart_leaves_every_rank_with_the_documented_exit_code(pool: RankPool, tmp_path: Path) -> None:
    for one in pool.run(run, Fit(folder=tmp_path, fault_at=2, on_fault="restart", steps=9), timeout=120):
        assert (one["ended"], one["hooks"]) == (RESTART_EXIT_CODE, 0)


def test_an_exception_in_user_code_takes_everything_off_and_the_next_fit_works(pool: RankPool, tmp_path: Path) -> None:
    failing, after = Fit(folder=tmp_path, raise_at=2), Fit(folder=tmp_path / "after")
    for broken, whole in pool.run(run_all, [failing, after], timeout=120):
        assert broken["ended"] == "user code failed" and broken["hooks"] == 0 and not broken["wrapped"]
        assert whole["status"] == ("Agree", True, True) and whole["reports"] == []


@pytest.mark.parametrize("how", ["interrupt", "sigterm"])
def test_an_interrupt_or_sigterm_takes_the_hooks_off_and_leaves_lightning_its_answer(
    pool: RankPool, tmp_path: Path, how: str
) -> None:
    checkpoint = {"every_n_train_steps": 1, "save_top_k": -1}
    fits = [Fit(folder=tmp_path / name, raise_at=2, raises=how, scout=name == "with", checkpoint=checkpoint)
            for name in ("with", "without")]  # fmt: skip
    for with_it, without in pool.run(run_all, fits, timeout=120):
        assert with_it["hooks"] == without["hooks"] and not with_it["wrapped"]
        assert with_it["ended"] == without["ended"] and with_it["global_step"] == without["global_step"]


def test_deepspeed_names_the_plugin_that_it_needs() -> None:
    own = type("Own", (type("DeepSpeedStrategy", (), {}),), {})()
    said = [_refusal(SimpleNamespace(strategy=strategy, optimizers=[object()])) for strategy in (own, object())]
    assert "scout_deepspeed" in str(said[0]) and said[1] is None


def test_observers_are_told_of_validation_checkpoints_and_loaders(pool: RankPool, tmp_path: Path) -> None:
    every = {"every_n_train_steps": 1, "save_top_k": -1}
    fit = Fit(folder=tmp_path, oob=True, validate=True, steps=3, checkpoint=every, extras=("combined",))
    for rank, one in enumerate(pool.run(run, fit, timeout=180)):
        assert one["reports"] == [] and one["status"] == ("Agree", True, True)
        assert one["phases"] == [("training", "TRAIN"), ("validation", "EVAL")], rank
        assert {"train[0]", "train[1]", "lightning"} <= set(one["watched"])
        assert one["entered"]["train[1]"] == one["entered"]["train[0]"] + 2  # it ended once and began anew
