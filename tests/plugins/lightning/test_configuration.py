"""Every form of configuration, both names of Lightning, and the way without a change of code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from scout_core.config import ConfigError, ReplayHarnessConfig, ScoutConfig
from scout_lightning import ScoutCallback
from scout_lightning.configuration import due_between, scout_config
from tests.plugins.lightning.fits import quiet

JOB = Path(__file__).with_name("cli_job.py")


def cli(name: str, *words: str) -> list[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(JOB), name, *words], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith(("SCOUT ", "["))]


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_cli_builds_the_callback_under_either_name(name: str, tmp_path: Path) -> None:
    words = ["--trainer.callbacks+=scout_lightning.ScoutCallback", "--trainer.callbacks.every_n_train_steps=7"]
    words += [f"--trainer.callbacks.dirpath={tmp_path}", "--trainer.callbacks.on_fault=stop"]
    words += ["--trainer.accelerator=cpu", "--trainer.logger=false"]
    own, modules = cli(name, *words)
    assert own.split() == ["SCOUT", "True", "7", str(tmp_path), "stop"]
    assert modules == f"['{name.partition('.')[0]}']"  # the other one is not needed


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("form", ["dict", "object", "yaml", "toml", "json"])
def test_every_form_of_configuration_says_the_same(form: str, tmp_path: Path) -> None:
    forms: dict[str, Any] = {
        "dict": {"replay": {"check_interval": 9}},
        "object": ScoutConfig.build(check_interval=9),
        "yaml": write(tmp_path, "c.yaml", "replay:\n  check_interval: 9\n"),
        "toml": write(tmp_path, "c.toml", "[replay]\ncheck_interval = 9\n"),
        "json": write(tmp_path, "c.json", '{"replay": {"check_interval": 9}}'),
    }
    assert scout_config(forms[form], None).replay.check_interval == 9
    assert scout_config(forms[form], 3).replay.check_interval == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"config": {"replay": {"check_intervall": 1}}}, "did you mean 'check_interval'"),
        ({"config": "nowhere.yaml"}, "nowhere.yaml"),
        ({"every_n_train_steps": -1}, "check_interval"),
        ({"config": {"run_dir": "x", "trust": {"gemini": True}}}, "gemini"),
        ({"config": {"trust": {"certification": "dynamic"}}}, "leave it at 'dense'"),
        ({"config": {"trust": {"on_fault": "restart"}}}, r"ScoutCallback\(on_fault=...\)"),
        ({"config": {"trust": {"restart_budget": 1}}}, "--max-restarts"),
        ({"on_fault": "explode"}, "'report', 'stop', 'restart'"),
    ],
)
def test_what_cannot_be_used_is_refused_at_once(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ScoutCallback(**arguments)


@pytest.mark.parametrize(
    ("before", "now", "intervals", "due"),
    [
        (0, 1, {"check_interval": 2}, None),
        (1, 2, {"check_interval": 2}, 2),
        (2, 7, {"check_interval": 3}, 6),
        (2, 3, {"check_interval": 0}, None),
        (8, 10, {"check_interval": 100, "hidden_interval": 9}, 9),
    ],
)
def test_the_newest_step_with_a_check_in_a_range(
    before: int, now: int, intervals: dict[str, int], due: int | None
) -> None:
    assert due_between(before, now, ReplayHarnessConfig(**intervals)) == due


@pytest.mark.parametrize(("switch", "given", "count"), [("1", False, 1), ("0", False, 0), ("1", True, 2)])
def test_an_environment_variable_enables_it_and_a_second_one_does_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, switch: str, given: bool, count: int
) -> None:
    monkeypatch.setenv("SCOUT_LIGHTNING", switch)
    with quiet():
        trainer = L.Trainer(
            accelerator="cpu",
            logger=False,
            default_root_dir=str(tmp_path),
            callbacks=[ScoutCallback()] if given else None,
        )
    found = [one for one in trainer.callbacks if isinstance(one, ScoutCallback)]
    assert len(found) == count
    for one in found:
        one.setup(trainer, None, "fit")
    assert [one._certifier is not None for one in found] == [True, False][:count]
    for one in found:
        one.teardown(trainer, None, "fit")
    assert "save_checkpoint" not in vars(trainer.strategy)
