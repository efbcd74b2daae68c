"""What the certifier does around saves and removals that meet a bad or slow disk. One process, no fit."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scout_core.trust.manifest import ManifestStore
from scout_core.trust.states import Outcome
from scout_lightning.certifier import Certifier
from tests.plugins.lightning.fits import quiet
from tests.plugins.lightning.test_hygiene import trainer_of


class Bench:
    """A certifier on a strategy, and how a job saves there. `step` is the one after which the state was checked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with quiet():
            trainer = trainer_of(folder)
        self.strategy: Any = trainer.strategy
        self.certifier = Certifier(trainer, folder / "scout", "run")
        self.certifier.is_now = lambda step: True

    def save(self, step: int) -> Path:
        path = self.folder / f"step={step}.ckpt"
        self.strategy.save_checkpoint({"global_step": step, "optimizer_states": []}, str(path))
        return path

    def states(self) -> dict[int, str]:
        return {m.step: m.state for m in ManifestStore(self.folder / "scout" / "manifests").all()[0]}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.certifier.close()


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_manifest_that_cannot_be_settled_takes_neither_the_job_nor_the_next_one_down(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.save(1)
    bench.save(2)
    write = ManifestStore.write
    monkeypatch.setattr(ManifestStore, "write", lambda store, m: full() if m.step == 1 else write(store, m))
    bench.certifier.judged(Outcome.CLEAN, 2)
    assert bench.states() == {1: "CANDIDATE", 2: "RECOVERY_VERIFIED"}


def test_a_manifest_that_cannot_be_removed_does_not_end_the_job(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    path = bench.save(1)
    monkeypatch.setattr(Path, "unlink", full)
    bench.strategy.remove_checkpoint(str(path))
    assert not path.exists()


@pytest.mark.parametrize("at", ["superseded", "is_last_resort"])
def test_a_folder_that_cannot_be_read_keeps_checkpoints_and_the_job_alive(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    bench.certifier.judged(Outcome.CLEAN, 1)
    path = bench.save(1)
    bench.strategy.remove_checkpoint(str(path))  # it is the newest verified one: later
    monkeypatch.setattr(f"scout_lightning.ledger.Ledger.{at}", full)
    bench.strategy.remove_checkpoint(str(path))
    bench.save(2)
    bench.certifier.judged(Outcome.CLEAN, 2)
    assert path.exists()


def test_a_superseded_checkpoint_that_cannot_be_deleted_does_not_end_the_job(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.certifier.judged(Outcome.CLEAN, 1)
    path = bench.save(1)
    bench.strategy.remove_checkpoint(str(path))
    monkeypatch.setattr(bench.certifier, "_remove", full)
    bench.save(2)
    assert path.exists() and bench.states() == dict.fromkeys([1, 2], "RECOVERY_VERIFIED")
