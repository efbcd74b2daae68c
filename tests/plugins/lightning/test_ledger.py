"""What is known of checkpoints, over several runs and attempts in one folder and through failures. One process."""

from __future__ import annotations

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
