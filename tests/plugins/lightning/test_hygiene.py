"""What could get in a job's way: other wrappers, a Trainer used again, stages without a fit, foreign checkpoints."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from scout_core.trust.manifest import ManifestStore
from scout_lightning import ScoutCallback
from scout_lightning.certifier import Certifier
from scout_lightning.randomness import own_state, restore
from tests.plugins.lightning.fits import quiet


def trainer_of(folder: Path, **options: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=options.pop("max_steps", 2),
        limit_val_batches=1,
        callbacks=[ScoutCallback(1, folder / "scout", {"oob": {"oob_enabled": False}})],
        logger=False,
        default_root_dir=str(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def untouched(trainer: L.Trainer) -> bool:
    names = {"save_checkpoint", "remove_checkpoint", "resume_start", "resume_end"}
    hooks = [o._optimizer_step_post_hooks for o in trainer.optimizers]
    return not names & {*vars(trainer.strategy), *vars(trainer._checkpoint_connector)} and not any(hooks)


def test_a_trainer_may_be_used_again_and_for_stages_without_a_fit(tmp_path: Path) -> None:
    model = BoringModel()
    with quiet():
        trainer = trainer_of(tmp_path)
        trainer.validate(model, verbose=False)
        trainer.test(model, verbose=False, ckpt_path="scout-verified")
        assert trainer.predict(model) and untouched(trainer)
        trainer.fit(model)
        trainer.fit_loop.epoch_loop.max_steps = 4
        trainer.fit(model)
        trainer.validate(model, verbose=False)
    assert trainer.global_step == 4 and untouched(trainer)


@pytest.mark.parametrize("given", [[], None])
def test_a_module_without_an_optimizer_is_fitted_unwatched_and_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: Any
) -> None:
    class Manual(BoringModel):
        automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return given

    with quiet():
        trainer = trainer_of(tmp_path, max_epochs=1, limit_train_batches=2)
        trainer.fit(Manual())
    assert trainer.fit_loop.epoch_progress.current.completed == 1 and untouched(trainer)
    assert ("configure_optimizers gave no optimizer" in caplog.text) == (given == [])


def test_a_dry_run_and_a_checkpoint_that_never_saw_scout(tmp_path: Path) -> None:
    with quiet():
        trainer_of(tmp_path / "dry", fast_dev_run=True).fit(BoringModel())
        plain = L.Trainer(accelerator="cpu", max_steps=2, logger=False, default_root_dir=str(tmp_path), barebones=True)
        plain.fit(BoringModel())
        plain.save_checkpoint(tmp_path / "plain.ckpt")
        trainer = trainer_of(tmp_path / "b", max_steps=4)
        trainer.fit(BoringModel(), ckpt_path=str(tmp_path / "plain.ckpt"))
    assert trainer.global_step == 4 and untouched(trainer)


def test_a_wrapper_of_another_is_put_back_and_one_around_ours_stays(tmp_path: Path) -> None:
    calls: list[str] = []
    with quiet():
        trainer = trainer_of(tmp_path)
    strategy: Any = trainer.strategy

    def wrapping(name: str) -> None:
        inner = strategy.save_checkpoint

        def wrapped(*args: Any, **kwargs: Any) -> None:
            calls.append(name)
            inner(*args, **kwargs)

        strategy.save_checkpoint = wrapped

    wrapping("before")
    first = strategy.save_checkpoint
    certifier = Certifier(trainer, tmp_path / "scout", "run")
    assert strategy.save_checkpoint != first
    certifier.close()
    assert strategy.save_checkpoint == first
    again = Certifier(trainer, tmp_path / "scout", "run")
    wrapping("after")
    again.close()
    again.close()
    strategy.save_checkpoint({"global_step": 1, "optimizer_states": []}, tmp_path / "x.ckpt")
    assert calls == ["after", "before"] and (tmp_path / "x.ckpt").exists()
    assert ManifestStore(tmp_path / "scout" / "manifests").all()[0] == []  # closed: it passes through


def test_a_folder_that_cannot_be_written_does_not_end_the_job(tmp_path: Path) -> None:
    with quiet():
        trainer = trainer_of(tmp_path)
    (tmp_path / "scout").write_text("a file where the folder was to be")
    certifier = Certifier(trainer, tmp_path / "scout", "run")
    trainer.strategy.save_checkpoint({"global_step": 1, "optimizer_states": []}, tmp_path / "x.ckpt")
    certifier.close()
    assert (tmp_path / "x.ckpt").exists()


def test_random_states_come_back_also_beside_another_generator_of_numpy() -> None:
    usual = np.random.get_state()
    try:
        row = own_state()
        drawn = (random.random(), float(np.random.rand()), torch.rand(2).tolist())
        restore(row)
        assert (random.random(), float(np.random.rand()), torch.rand(2).tolist()) == drawn
        old = np.random.get_bit_generator()
        np.random.set_bit_generator(np.random.PCG64(1))
        try:
            row = own_state()
            drawn_torch = torch.rand(2).tolist()
            restore(row)
            assert torch.rand(2).tolist() == drawn_torch
            assert np.random.get_state(legacy=False)["bit_generator"] == "PCG64"
        finally:
            np.random.set_bit_generator(old)
    finally:
        np.random.set_state(usual)


def test_random_states_have_one_length_whether_or_not_cuda_was_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some ranks may have touched CUDA and others not; their rows meet in one all-gather."""
    device, put_back = torch.arange(16, dtype=torch.uint8), []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_rng_state", lambda: device)
    monkeypatch.setattr("torch.cuda.set_rng_state", lambda state: put_back.append(state.tolist()))
    rows = []
    for used in (False, True):
        monkeypatch.setattr("torch.cuda.is_initialized", lambda used=used: used)
        rows.append(own_state())
        restore(rows[-1])
    assert len(rows[0]) == len(rows[1])
    assert put_back == [device.tolist()]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_random_states_of_a_gpu_come_back_and_make_the_row_no_longer() -> None:
    torch.rand(1, device="cuda")
    row = own_state()
    drawn = torch.rand(2, device="cuda").tolist()
    restore(row)
    assert torch.rand(2, device="cuda").tolist() == drawn
    assert row[-3] == 16, "16 bytes of the device and their length end the row"
