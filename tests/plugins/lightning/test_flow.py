"""Fits that end, batch, accumulate, compile, log and draw in other ways than the plain one, over two ranks."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pool import RankPool
from tests.plugins.lightning.fits import Fit, run_all
from tests.plugins.lightning.test_fit import same

pytestmark = pytest.mark.distributed
FLOWS: dict[str, tuple[dict[str, Any], int]] = {
    "compiled network": ({"mode": "compiled_net", "look": 2}, 4),
    "network compiled in place": ({"mode": "compiled_in_place", "look": 2}, 4),
    "compiled LightningModule": ({"mode": "compiled_module", "look": 2}, 4),
    "early stopping": ({"extras": ("early_stopping",), "steps": 9, "trainer": {"limit_train_batches": 2}}, 4),
    "overfitted batches": ({"trainer": {"overfit_batches": 3}}, 4),
    "changing accumulation": ({"extras": ("accumulation",), "steps": 6, "trainer": {"limit_train_batches": 4}}, 6),
    "end of epochs": ({"steps": -1, "trainer": {"max_epochs": 2, "limit_train_batches": 3}}, 6),
    "end inside an accumulation": (
        {"steps": -1, "accumulate": 2, "trainer": {"max_epochs": 1, "limit_train_batches": 5}},
        3,
    ),
    "several loaders": ({"extras": ("combined",), "look": 3}, 4),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def test_every_flow_is_checked_at_each_step_silent_and_the_same_bits(pool: RankPool, tmp_path: Path) -> None:
    fits = [Fit(folder=tmp_path, scout=scout, **options) for options, _ in FLOWS.values() for scout in (True, False)]
    for results in pool.run(run_all, fits, timeout=180):
        pairs = zip(results[::2], results[1::2], strict=True)
        for (name, (options, steps)), (with_it, without) in zip(FLOWS.items(), pairs, strict=True):
            assert with_it["reports"] == with_it["reasons"] == with_it["errors"] == [], name
            assert with_it["status"] == ("Agree", True, True), name
            assert with_it["looked"] == (("Agree", True) if "look" in options else None), name
            assert with_it["steps"] == with_it["checks"] == steps, name
            assert with_it["global_step"] == without["global_step"] == steps, name
            assert same(with_it, without), name


def test_metrics_reach_the_logger_and_both_bars_which_count_to_the_end(pool: RankPool, tmp_path: Path) -> None:
    fits = [
        Fit(
            folder=tmp_path / bar,
            every=2,
            extras=(bar, "csv"),
            prog_bar=bar == "rich",
            trainer={"log_every_n_steps": 1},
        )
        for bar in ("tqdm", "rich")
    ]
    tqdm, rich = pool.run(run_all, fits, timeout=120)[0]
    shown = ["scout/checks", "scout/reports", "scout/skipped_steps"]
    # one epoch of 32 batches, of which four are run
    assert tqdm["bar"] == (4, []) and rich["bar"] == (4, shown)
    for bar in ("tqdm", "rich"):
        (file,) = (tmp_path / bar).rglob("metrics.csv")
        rows = {row["step"]: row for row in csv.DictReader(file.open()) if row["scout/checks"]}
        assert [(float(rows[s]["scout/checks"]), float(rows[s]["scout/reports"])) for s in "13"] == [(1, 0), (2, 0)]
