"""Checkpoint cases from public reports in which storage is not what it seems: E02, E11, E16."""

from __future__ import annotations

import io
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import scout_core
from scout_core.cli import app
from scout_core.trust import files
from scout_core.trust.certify import JobVerdict
from scout_core.trust.channel import JobChannel
from scout_core.trust.durable import CheckpointContext, DurableCheckpointConfig, TorchSaveCallbacks
from scout_core.trust.manifest import ManifestStore
from scout_core.trust.saver import DurableTier, Lineage
from scout_core.trust.states import Change, Outcome
from tests.cases.test_section_e import VERIFIED, choose, save, tier
from tests.distributed.pool import RankPool
from tests.oob.jobs import wait_until
from tests.trust.ranks import forget_memory, train

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


@contextmanager
def reads_that_hang(name: str) -> Iterator[list[str]]:
    """Whoever opens a file of this name waits until the block ends; the names that were waited for."""
    over, opened, waited = threading.Event(), io.open, []

    def hang(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path).endswith(name):
            waited.append(str(path))
            over.wait(60)
        return opened(path, *args, **kwargs)

    with patch.object(io, "open", hang):
        yield waited
        over.set()


@pytest.mark.parametrize("local", [True, False])
def test_e16_a_fetch_that_hangs_at_a_restart_falls_back_and_names_the_shard(tmp_path: Path, local: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    durable = DurableCheckpointConfig(
        callbacks=TorchSaveCallbacks(), folder=tmp_path / "remote", interval=20 if local else 10
    )
    settings = {"run_dir": tmp_path, "durable": durable, "gemini": True, "oob_enabled": False}
    verdict = JobVerdict(outcome=Outcome.CLEAN, cycle=True, may_capture=local, broken_ranks=(), nonfinite_alike=False)
    with scout_core.attach(model, optimizer, **settings) as scout:
        for step in (10, 20):
            with torch.no_grad():
                model[0].weight.fill_(step)
            scout._trust._apply(step, Change(capture=True, state=VERIFIED), verdict)
            # as the vote sees to: no capture begins before the last one is complete
            assert scout._trust._gemini is not None and scout._trust._gemini.settle(10)
        scout._trust._gemini.flush()
    forget_memory()
    if local:  # the older state lies on the local disk alone, and the newest one in the remote store
        shutil.rmtree(tmp_path / "gemini" / "rank-00000" / "step-000000020-own")
    newest = f"{NEW}/rank-00000.pt"
    with (
        reads_that_hang(newest) as waited,
        patch.object(files, "STALLED_READ_S", 0.3),
        scout_core.attach(model, optimizer, **settings) as scout,
    ):
        assert waited and scout.step_count == 10 and bool((model[0].weight == 10).all())
        decision = scout.last_recovery_decision
        assert decision is not None and decision.source == ("gemini" if local else "durable")
        told = [report.message for report in scout.reports if report.kind.value == "checkpoint_bad"]
        assert f"{newest} (rank 0) cannot be read: no byte of it came within 0.3 s" in told[0]


class PartialUpload(TorchSaveCallbacks):
    """Writes to a local disk and copies to the checkpoint's folder; one shard of step 4 does not come through."""

    def __init__(self, local: Path) -> None:
        self.local = local

    def save_candidate(self, context: CheckpointContext, state: Any) -> Sequence[Path]:
        [written] = super().save_candidate(replace(context, folder=self.local / context.checkpoint_id), state)
        context.folder.mkdir(parents=True, exist_ok=True)
        if (context.rank, context.step) != (2, 4):
            shutil.copy(written, context.folder)
        return [context.folder / written.name]


def train_with_partial_upload(run_dir: Path, steps: int) -> dict[str, Any]:
    return train(run_dir, steps, callbacks=PartialUpload(run_dir / "local"), gemini=False)


def test_e16_three_of_four_shards_in_the_remote_store_are_no_checkpoint(ranks4: RankPool, tmp_path: Path) -> None:
    ended = ranks4.run(train_with_partial_upload, tmp_path, 5)
    for one in ended:
        [(_, ranks, message)] = [report for report in one["reports"] if report[0] == "checkpoint_bad"]
        assert ranks == [2] and "step-000000004-attempt-0/rank-00002.pt" in message
    assert len(list((tmp_path / "durable" / "step-000000004-attempt-0").iterdir())) == 3
    states = {m.step: m.state for m in ManifestStore(tmp_path / "manifests").all()[0]}
    assert states == {2: "RECOVERY_VERIFIED", 4: "REJECTED"}
    assert [one["start"] for one in ranks4.run(train_with_partial_upload, tmp_path, 3)] == [2] * 4
