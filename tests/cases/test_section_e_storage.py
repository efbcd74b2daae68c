"""Checkpoint cases from public reports in which storage is not what it seems: E02, E11, E16."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from scout_core.cli import app
from scout_core.trust.channel import JobChannel
from scout_core.trust.durable import CheckpointContext, DurableCheckpointConfig, TorchSaveCallbacks
from scout_core.trust.manifest import ManifestStore
from scout_core.trust.saver import DurableTier, Lineage
from tests.cases.test_section_e import VERIFIED, choose, save, tier
from tests.oob.jobs import wait_until

OLD, NEW = "step-000000010-attempt-0", "step-000000020-attempt-0"


class Eager(TorchSaveCallbacks):
    """Moves its pointer and clears old checkpoints away at once, while a thread that is late writes the new one."""

    def __init__(self, folder: Path, *, asks: bool, waits: bool) -> None:
        self.folder, self.asks, self.waits = folder, asks, waits
        self.go = threading.Event()
        self.writer: threading.Thread | None = None

    def save_candidate(self, context: CheckpointContext, state: Any) -> Sequence[Path]:
        (self.folder / "latest").write_text(context.checkpoint_id)
        allowed = ManifestStore(self.folder / "manifests").may_prune(OLD)
        if allowed or not self.asks:
            shutil.rmtree(self.folder / "durable" / OLD)
        (self.folder / f"pruning-{allowed}").touch()

        def write() -> None:
            self.go.wait(60)
            TorchSaveCallbacks.save_candidate(self, context, state)

        self.writer = threading.Thread(target=write, daemon=True)
        self.writer.start()
        if self.waits:
            self.writer.join()
        return [context.folder / "rank-00000.pt"]


def eager(folder: Path, **how: bool) -> tuple[DurableTier, Eager]:
    callbacks = Eager(folder, **how)
    config = DurableCheckpointConfig(callbacks=callbacks, folder=folder / "durable", visibility_s=0.5)
    lineage = Lineage(run_id="run", attempt=0, topology_digest="t", environment={})
    return DurableTier(config, folder / "manifests", JobChannel(10, "test"), lineage), callbacks


@pytest.mark.parametrize("asks", [True, False])
def test_e02_a_kill_before_a_late_writer_is_done_leaves_the_older_one(tmp_path: Path, asks: bool) -> None:
    save(tier(tmp_path), 10)
    (tmp_path / "run.json").touch()
    child = os.fork()
    if child == 0:
        try:
            eager(tmp_path, asks=asks, waits=True)[0].save(20, VERIFIED, lambda: {"step": 20, "state": {}})
        finally:
            os._exit(3)
    wait_until(lambda: list(tmp_path.glob("pruning-*")))
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert (tmp_path / "pruning-False").exists() and (tmp_path / "latest").read_text() == NEW
    durable = tier(tmp_path)
    assert [m.checkpoint_id for m in durable.store.all()[0]] == [OLD], "the new one was never vouched for"
    chosen, verified = choose(durable), CliRunner().invoke(app, ["trust", "verify", str(tmp_path)])
    if asks:
        assert chosen.checkpoint_id == OLD and durable.load(OLD, None)[0]["step"] == 10
        assert verified.exit_code == 0
    else:  # it was told, and it is told again, by name
        assert chosen.mode == "RESTART_FROM_SCRATCH" and "step 10: not every rank can load its part" in chosen.reason
        assert verified.exit_code == 1 and f"{OLD}/rank-00000.pt (rank 0) cannot be read" in verified.output


def test_e02_files_that_are_not_there_when_they_are_handed_over_are_never_promoted(tmp_path: Path) -> None:
    save(tier(tmp_path), 10)
    durable, callbacks = eager(tmp_path, asks=True, waits=False)
    [problem] = durable.save(20, VERIFIED, lambda: {"step": 20, "state": {}})
    assert problem.checkpoint_id == NEW and problem.ranks == (0,) and "rank-00000.pt" in problem.message
    callbacks.go.set()
    assert callbacks.writer is not None
    callbacks.writer.join(10)
    assert (tmp_path / "durable" / NEW / "rank-00000.pt").exists()  # too late: nobody has looked at what it holds
    durable.settle(VERIFIED, (20,), "")
    assert {m.step: m.state for m in durable.store.all()[0]} == {10: "RECOVERY_VERIFIED", 20: "REJECTED"}
    assert choose(durable).step == 10 and not durable.store.may_prune(OLD) and durable.store.may_prune(NEW)
