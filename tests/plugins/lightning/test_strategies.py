"""`ModelParallelStrategy` over four ranks: FSDP2, HSDP on the job's own mesh, tensor parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest

from scout_core.trust.manifest import ManifestStore, verify
from scout_lightning import latest_verified
from tests.distributed.pool import RankPool
from tests.plugins.lightning.fits import Fit, run, run_all
from tests.plugins.lightning.test_fit import same

pytestmark = pytest.mark.distributed
ALL = {"every_n_train_steps": 1, "save_top_k": -1}


@pytest.mark.parametrize("layout", ["hsdp", "fsdp", "fsdp_tp"])
def test_a_clean_fit_on_shards_is_silent_and_the_same_bits(pool: RankPool, tmp_path: Path, layout: str) -> None:
    fits = [Fit(folder=tmp_path, layout=layout), Fit(folder=tmp_path, layout=layout, scout=False)]
    for with_it, without in pool.run(run_all, fits, timeout=120):
        assert with_it["reports"] == [] and with_it["reasons"] == []
        assert with_it["steps"] == with_it["checks"] == 4
        assert with_it["status"] == ("Agree", True, True)
        assert same(with_it, without)


def test_without_replicas_nothing_is_checked_nor_certified(pool: RankPool, tmp_path: Path) -> None:
    for one in pool.run(run, Fit(folder=tmp_path, layout="tp", checkpoint=ALL), timeout=120):
        assert one["status"] == ("Inconclusive", False, False) and one["reports"] == []
        assert one["reasons"] and all("nothing to compare" in reason for reason in one["reasons"])
    assert {m.state for m in ManifestStore(tmp_path / "scout" / "manifests").all()[0]} == {"CANDIDATE"}


def test_a_sharded_checkpoint_is_certified_file_by_file_and_loaded_again(pool: RankPool, tmp_path: Path) -> None:
    first = Fit(folder=tmp_path, layout="hsdp", checkpoint=ALL, steps=3)
    again = Fit(folder=tmp_path, layout="hsdp", checkpoint=ALL, steps=5, ckpt_path="scout-verified")
    whole = Fit(folder=tmp_path / "whole", layout="hsdp", steps=5)
    for _, resumed, healthy in pool.run(run_all, [first, again, whole], timeout=180):
        assert resumed["checks"] == 2 and resumed["reports"] == []
        assert same(resumed, healthy)
    found = latest_verified(tmp_path / "scout")
    assert found == str(tmp_path / "ckpt" / "step=5.ckpt") and Path(found).is_dir()
    manifest = ManifestStore(tmp_path / "scout" / "manifests").all()[0][0]
    assert len(manifest.files) > 4 and verify(manifest) == []
