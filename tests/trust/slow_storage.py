"""Durable callbacks on storage that is slow or stuck, for ranks with observers; the test says when it goes on."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scout_core.trust.durable import CheckpointContext, DurableCallbacks, DurableCheckpointConfig, TorchSaveCallbacks
from tests.oob.jobs import TinyJob, say

STALL_S = 3.0


class SlowStorage(TorchSaveCallbacks):
    """Rank 0 takes a moment for step 2, and for step 4 until the test says so."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir

    def save_candidate(self, context: CheckpointContext, state: Any) -> Sequence[Path]:
        if context.rank == 0:
            say(self.run_dir, f"saving-{context.step}")
            until = time.monotonic() + (1.0 if context.step == 2 else 60.0)
            while time.monotonic() < until and not Path(self.run_dir, f"go-{context.step}").exists():
                time.sleep(0.02)
        return super().save_candidate(context, state)


class WriterProcess(TorchSaveCallbacks):
    """On rank 1 another process writes the file; it stops after the header."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir

    def save_candidate(self, context: CheckpointContext, state: Any) -> Sequence[Path]:
        written = super().save_candidate(context, state)
        if context.rank != 1:
            return written
        path = written[0]
        whole = path.with_suffix(".whole")
        path.rename(whole)
        script = f'head -c 64 "{whole}" > "{path}"; kill -STOP $$; tail -c +65 "{whole}" >> "{path}"; rm "{whole}"'
        writer = subprocess.Popen(["/bin/sh", "-c", script])
        say(self.run_dir, "writer-started")
        Path(self.run_dir, "writer.pid").write_text(str(writer.pid))
        writer.wait()
        return written


class SlowLoads(TorchSaveCallbacks):
    """Rank 3 reads its part of a checkpoint when the test says so."""

    def __init__(self, run_dir: str) -> None:
        self.run_dir = run_dir

    def load_checkpoint(self, context: CheckpointContext, state: Any) -> Any:
        until = time.monotonic() + 60.0
        while context.rank == 3 and time.monotonic() < until and not Path(self.run_dir, "go-load").exists():
            time.sleep(0.02)
        return super().load_checkpoint(context, state)


def train_on(run_dir: str, kind: Callable[[str], DurableCallbacks], steps: int) -> None:
    """A job with observers whose durable checkpoints lie on such storage."""
    durable = DurableCheckpointConfig(callbacks=kind(run_dir), folder=Path(run_dir, "durable"))
    job = TinyJob(run_dir, durable=durable, check_interval=2, checkpoint_stall_s=STALL_S, stall_train_s=STALL_S)
    say(run_dir, f"start-{job.rank}-{job.scout.step_count}")
    while job.scout.step_count < steps:
        job.step()
    job.scout.close()
    say(run_dir, f"done-{os.environ['RANK']}")
