"""`FSDPStrategy` over four ranks of the CPU: full, hybrid and no sharding, one unit and many, nested and not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from scout_core.trust.manifest import ManifestStore
from tests.distributed.pool import RankPool
from tests.plugins.lightning.fits import Fit, run_all
from tests.plugins.lightning.test_fit import same

pytestmark = pytest.mark.distributed
ALL = {"every_n_train_steps": 1, "save_top_k": -1}


@pytest.mark.parametrize(
    ("layout", "options", "blamed"),
    [
        ("fsdp1", {"accumulate": 2}, (2,)),  # held once: seen to change while it rested
        ("fsdp1_one_unit", {"trainer": {"precision": "bf16-mixed"}}, (2,)),
        ("fsdp1_hybrid", {"trainer": {"precision": "bf16-true"}}, ()),  # two replicas: that they differ, not which
        ("fsdp1_replicated", {}, (2,)),
    ],
)
def test_a_clean_fit_is_silent_and_the_same_bits_and_a_wrong_weight_is_found(
    pool: RankPool, tmp_path: Path, layout: str, options: dict[str, Any], blamed: tuple[int, ...]
) -> None:
    fits = [
        Fit(folder=tmp_path, layout=layout, look=3, **options),
        Fit(folder=tmp_path, layout=layout, scout=False, **options),
        Fit(folder=tmp_path, layout=layout, fault_at=2, **options),
    ]
    found = []
    for with_it, without, faulty in pool.run(run_all, fits, timeout=120):
        assert with_it["reports"] == [] and with_it["reasons"] == []
        assert with_it["steps"] == with_it["checks"] == 4
        assert with_it["status"] == ("Agree", True, True)
        assert with_it["looked"] == ("Agree", True)
        assert same(with_it, without)
        found += faulty["reports"]
    assert found and {ranks for _, ranks, _ in found} == {blamed}
    assert min(found)[::2] == ("sdc", 3)


def test_a_sharded_checkpoint_resumes_with_the_same_bits_and_nothing_is_certified_after_a_fault(
    pool: RankPool, tmp_path: Path
) -> None:
    fits = [
        Fit(folder=tmp_path, layout="fsdp1", checkpoint=ALL, steps=5, fault_at=3),
        Fit(folder=tmp_path, layout="fsdp1", steps=6, ckpt_path="scout-verified"),
        Fit(folder=tmp_path / "whole", layout="fsdp1", steps=6),
    ]
    for faulty, resumed, healthy in pool.run(run_all, fits, timeout=120):
        assert faulty["status"] == ("Agree", True, True)  # all have gathered the wrong value by now
        assert resumed["checks"] == 3 and resumed["reports"] == []
        assert all(map(torch.equal, resumed["parameters"], healthy["parameters"]))
    states = {m.step: m.state for m in ManifestStore(tmp_path / "scout" / "manifests").all()[0]}
    assert states == {**dict.fromkeys([1, 2, 3], "RECOVERY_VERIFIED"), 4: "QUARANTINED", 5: "QUARANTINED"}


@pytest.mark.slow
def test_without_original_parameters_the_job_is_watched_and_nothing_certified(pool: RankPool, tmp_path: Path) -> None:
    fits = [Fit(folder=tmp_path, layout="fsdp1_flat", oob=True, steps=3, checkpoint=ALL)]
    for (one,) in pool.run(run_all, fits, timeout=120):
        assert one["reports"] == [] and one["status"] is None and one["steps"] == 3
        assert {"train", "lightning"} <= set(one["watched"])
    assert {m.state for m in ManifestStore(tmp_path / "scout" / "manifests").all()[0]} == {"CANDIDATE"}
