"""What the certifier does around saves and removals that meet a bad or slow disk. One process, no fit."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from scout_core.trust import manifest
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


def test_rank_0_is_in_checkpoint_io_whenever_it_reads_writes_or_deletes_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of it the observers would take a long digest for a training step that has stalled."""
    inside = False
    seen: list[tuple[str, bool]] = []

    @contextmanager
    def io() -> Iterator[None]:
        nonlocal inside
        inside = True
        yield
        inside = False

    def noting(name: str, work: Any) -> Any:
        def noted(*args: Any) -> Any:
            seen.append((name, inside))
            return work(*args)

        return noted

    bench.certifier.io = io
    monkeypatch.setattr(manifest, "file_digest", noting("read", manifest.file_digest))
    monkeypatch.setattr(bench.certifier, "_remove", noting("delete", bench.certifier._remove))
    first, second = bench.save(1), bench.save(2)
    assert seen == [("read", True)] * 2
    bench.certifier.judged(Outcome.CLEAN, 2)
    assert seen == [("read", True)] * 4
    bench.strategy.remove_checkpoint(str(first))
    bench.strategy.remove_checkpoint(str(second))  # the newest verified: deleted once there is a newer one
    assert seen[4:] == [("delete", True)]
    bench.save(3)
    assert seen[5:] == [("read", True), ("delete", True)] and not second.exists()


def test_the_training_thread_does_not_wait_for_a_digest_in_the_writers_thread(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = Event(), Event()

    def slow(path: Path) -> str:
        reading.set()
        assert go_on.wait(30)
        return digest(path)

    digest = manifest.file_digest
    monkeypatch.setattr(manifest, "file_digest", slow)
    other = bench.folder / "other.ckpt"
    with ThreadPoolExecutor(1) as writer:
        bench.strategy.checkpoint_io._executor = writer
        bench.save(1)
        assert reading.wait(30)
        looking = ThreadPoolExecutor(1).submit(bench.strategy.remove_checkpoint, str(other))
        try:
            looking.result(timeout=10)
        finally:
            go_on.set()
    assert bench.states() == {1: "CANDIDATE"}
