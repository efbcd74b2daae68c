"""What is known of checkpoints, over several runs and attempts in one folder and through failures. One process."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from scout_core.trust.manifest import ManifestStore
from scout_core.trust.states import TrustState
from scout_lightning import latest_verified
from scout_lightning.ledger import Entry, Ledger
from tests.plugins.lightning.fits import quiet
from tests.plugins.lightning.test_hygiene import trainer_of

VERIFIED, CANDIDATE = TrustState.RECOVERY_VERIFIED, TrustState.CANDIDATE


def ledger_of(folder: Path, run_id: str = "own", topology: str = "DDPStrategy-4") -> Ledger:
    return Ledger(folder / "scout", run_id=run_id, topology=topology)


def save(ledger: Ledger, folder: Path, step: int, state: TrustState = VERIFIED, name: str = "") -> Path:
    path = folder / (name or f"step={step}.ckpt")
    path.write_text(f"state after step {step}")
    ledger.complete(Entry(path=path, step=step, state=state))
    return path


@pytest.mark.parametrize("before", ["another run", "a later step of this run", "files that are gone"])
def test_what_lies_in_the_folder_neither_unprotects_nor_outranks_what_this_fit_verified(
    tmp_path: Path, before: str
) -> None:
    old = save(ledger_of(tmp_path, "other" if before == "another run" else "own"), tmp_path, 1000)
    if before == "files that are gone":
        old.unlink()
    own = ledger_of(tmp_path)
    path = save(own, tmp_path, 50)
    assert own.is_last_resort(path) and not own.is_last_resort(old)
    assert latest_verified(tmp_path / "scout") == str(path)


def test_until_it_has_verified_something_a_resumed_fit_keeps_what_the_attempt_before_it_verified(
    tmp_path: Path,
) -> None:
    path = save(ledger_of(tmp_path), tmp_path, 500)
    assert ledger_of(tmp_path).is_last_resort(path) and not ledger_of(tmp_path, "fresh").is_last_resort(path)


def test_a_run_that_verified_nothing_yet_does_not_go_on_from_an_earlier_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = save(ledger_of(tmp_path, "other"), tmp_path, 1000)
    save(ledger_of(tmp_path), tmp_path, 5, CANDIDATE)
    assert latest_verified(tmp_path / "scout") is None
    assert f"{old} of step 1000 is skipped: it is of an earlier run" in caplog.text


def test_a_checkpoint_of_another_topology_is_skipped_where_the_topology_is_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save(ledger_of(tmp_path), tmp_path, 5)
    assert latest_verified(tmp_path / "scout") == str(path)
    assert latest_verified(tmp_path / "scout", topology="DDPStrategy-8") is None
    assert "it is of DDPStrategy-4, not DDPStrategy-8" in caplog.text


def test_a_fit_from_a_checkpoint_is_a_later_attempt_of_its_run_and_a_fit_from_nothing_a_run_of_its_own(
    tmp_path: Path,
) -> None:
    saved: list[Path] = []

    class Keep(L.Callback):
        def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            saved.append(tmp_path / f"{len(saved)}.ckpt")
            trainer.save_checkpoint(saved[-1])

    def run(max_steps: int, ckpt_path: Path | None = None) -> None:
        with quiet():
            trainer = trainer_of(tmp_path, max_steps=max_steps)
            trainer.callbacks.append(Keep())  # type: ignore[attr-defined]
            trainer.fit(BoringModel(), ckpt_path=None if ckpt_path is None else str(ckpt_path))

    run(2)
    run(4, saved[0])
    run(2)
    by_name = {m.files[0].path: m for m in ManifestStore(tmp_path / "scout" / "manifests").all()[0]}
    first, second, third = (by_name[path.name] for path in saved)
    assert [m.attempt for m in (first, second, third)] == [0, 1, 2]
    assert first.run_id == second.run_id != third.run_id


@pytest.mark.parametrize("dies_in", [(ManifestStore, "write"), (Path, "replace"), (Ledger, "forget")])
def test_a_process_that_ends_while_it_sets_the_verified_one_aside_leaves_it_to_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_in: tuple[type, str]
) -> None:
    ledger = ledger_of(tmp_path)
    last = save(ledger, tmp_path, 3, name="last.ckpt")

    def end(*_: object) -> None:
        raise KeyboardInterrupt  # nothing behind it runs, as when the process is killed

    monkeypatch.setattr(*dies_in, end)
    with pytest.raises(KeyboardInterrupt):
        ledger.set_aside(last)
    monkeypatch.undo()
    found = latest_verified(tmp_path / "scout")
    assert found is not None and Path(found).read_text() == "state after step 3"
    assert ledger_of(tmp_path).is_last_resort(Path(found))


@pytest.mark.parametrize("fails", [(ManifestStore, "write"), (Path, "replace")])
def test_a_verified_checkpoint_that_cannot_be_set_aside_stays_so_until_it_is_written_over_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: tuple[type, str]
) -> None:
    ledger = ledger_of(tmp_path)
    last = save(ledger, tmp_path, 3, name="last.ckpt")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(*fails, full)
    ledger.set_aside(last)
    monkeypatch.undo()
    assert f"{last}, of step 3, could not be set aside and is overwritten" in caplog.text
    assert latest_verified(tmp_path / "scout") == str(last)  # the save may fail as well
    assert [m.files[0].path for m in ManifestStore(tmp_path / "scout" / "manifests").all()[0]] == ["last.ckpt"]


def test_what_two_attempts_set_aside_at_one_step_lies_side_by_side(tmp_path: Path) -> None:
    for _ in range(2):
        ledger = ledger_of(tmp_path)
        folder = tmp_path / "last.ckpt"
        folder.mkdir()
        (folder / "shard").write_text("state after step 3")
        ledger.complete(Entry(path=folder, step=3, state=VERIFIED))
        ledger.set_aside(folder)
    assert sorted(path.name for path in tmp_path.glob("last*")) == [
        "last-verified-step3-attempt1.ckpt",
        "last-verified-step3.ckpt",
    ]


def test_a_checkpoint_that_twice_failed_to_load_is_quarantined_and_the_one_before_it_taken(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path, topology="SingleDeviceStrategy-1")
    with quiet():
        trainer = trainer_of(tmp_path / "elsewhere", max_steps=1)
        trainer.fit(BoringModel())
        trainer.save_checkpoint(tmp_path / "good.ckpt")
    ledger.complete(Entry(path=tmp_path / "good.ckpt", step=1, state=VERIFIED))
    save(ledger, tmp_path, 2)  # as it was written, and yet no checkpoint

    def resume() -> int:
        with quiet():
            trainer = trainer_of(tmp_path, max_steps=3)
            trainer.fit(BoringModel(), ckpt_path="scout-verified")
        return int(trainer.global_step)

    for _ in range(2):
        with pytest.raises(IndexError):  # so torch.load puts it
            resume()
    for _ in range(3):  # what can be loaded is not used up
        assert resume() == 3
    first, second = sorted(ManifestStore(tmp_path / "scout" / "manifests").all()[0], key=lambda m: m.step)
    assert (first.state, first.failures) == ("RECOVERY_VERIFIED", 0)
    assert (second.state, second.failures) == ("QUARANTINED", 2) and "failed 2 times" in second.reason


def test_a_load_in_which_the_process_dies_counts_as_failed(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path)
    path = save(ledger, tmp_path, 2)
    for count in range(2):
        assert latest_verified(tmp_path / "scout") == str(path), count
        ledger_of(tmp_path).begin_load(path)
    assert latest_verified(tmp_path / "scout") is None
