"""The example under Lightning's own launcher: found, stopped on all ranks, and the trusted checkpoint taken up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scout_lightning import latest_verified

EXAMPLE = Path(__file__).parents[3] / "examples" / "lightning_gpt.py"


def launch(folder: Path, *words: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(EXAMPLE), "--devices=3", f"--folder={folder}", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategy", ["ddp", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp_fork", "ddp_spawn"))]
)
def test_the_example_stops_at_a_corrupt_rank(tmp_path: Path, strategy: str) -> None:
    said = launch(tmp_path, "--corrupt=1", "--steps=20", f"--strategy={strategy}")
    assert "SCOUT sdc at step 15: rank 1:" in said and "ended at step 15" in said
    assert latest_verified(tmp_path / "scout") == str(tmp_path / "step=10.ckpt")


@pytest.mark.slow
@pytest.mark.distributed
def test_the_example_goes_on_from_what_may_be_trusted(tmp_path: Path) -> None:
    launch(tmp_path, "--corrupt=1", "--steps=20")
    said = launch(tmp_path, "--steps=20")
    assert "step=10.ckpt" in said and "ended at step 20" in said and "SCOUT sdc" not in said
    assert latest_verified(tmp_path / "scout") == str(tmp_path / "step=20.ckpt")
