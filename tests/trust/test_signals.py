"""Flushes when the process is told to end, also while its main thread is stuck in native code."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scout_core.trust.channel import JobChannel
from scout_core.trust.durable import unwatched
from scout_core.trust.gemini import Gemini
from scout_core.trust.handover import HandOver
from scout_core.trust.memory import Copy, HostMemory
from scout_core.trust.run_record import RunFolder
from scout_core.trust.shard import Shards
from scout_core.trust.signals import FlushOnSignal
from scout_core.trust.states import TrustState


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"


def end_of(process: int) -> int:
    """With which status it ended, for which it has 10 s."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return status
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    raise AssertionError("it did not end")


def child(folder: Path, how: str) -> None:
    """Install, then be busy; ends only by a signal."""
    flusher = FlushOnSignal(lambda: (folder / "flushed").write_text("x") and None, grace_s=5.0)
    if how == "own handler":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(9 if (folder / "flushed").exists() else 1))
    flusher.install()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (folder / "ready").write_text("x")
    if how == "stuck":
        store.wait(["never"], timedelta(seconds=60))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        pass


def forked(body: Callable[..., None], *args: Any) -> int:
    """The process id of a child that runs `body`, which ends it; exit code 3 if it comes back."""
    process = os.fork()
    if process == 0:
        try:
            body(*args)
        finally:
            os._exit(3)
    return process


class SlowDisk(Shards):
    """Writes when the test says so."""

    def write(self, copy: Copy, attempt: int, holder: int) -> Path:
        (self.folder / "ready").touch()
        wait_for(self.folder / "go")
        (self.folder / "writing").touch()
        time.sleep(0.5)  # so long that the signal comes in the middle of it
        return super().write(copy, attempt, holder)


def flush_before_leaving(folder: Path, how: str) -> None:
    """What a rank does after a decision, on its main thread."""
    shards = SlowDisk(folder, run_id="run", topology_digest="t", world_size=1)
    gemini = Gemini(HostMemory(0), shards, None, rank=0, attempt=0, hosts=["a"], flush_interval=0)
    gemini.begin(7, TrustState.RECOVERY_VERIFIED, {"w": torch.ones(9)})
    if how == "own handler":
        signal.signal(signal.SIGTERM, lambda *_: os._exit(9))
    FlushOnSignal(gemini.flush, grace_s=30.0).install()
    HandOver(RunFolder(folder), JobChannel(10, "test"), gemini, 30.0, unwatched)._flush()
    wait_for(folder / "never")


@pytest.mark.parametrize("how", ["plain", "own handler"])
def test_sigterm_during_a_flush_lets_it_end(tmp_path: Path, how: str) -> None:
    process = forked(flush_before_leaving, tmp_path, how)
    wait_for(tmp_path / "ready")
    (tmp_path / "go").touch()
    wait_for(tmp_path / "writing")
    os.kill(process, signal.SIGTERM)
    status = end_of(process)
    assert list(Shards(tmp_path, run_id="run", topology_digest="t", world_size=1).find(0)[0])
    if how == "plain":
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
    else:
        assert os.WEXITSTATUS(status) == 9


def hang(folder: Path) -> None:
    (folder / "flushing").touch()
    threading.Event().wait()


def wait_with_a_flush_that_hangs(folder: Path) -> None:
    FlushOnSignal(lambda: hang(folder), grace_s=0.5).install()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (folder / "ready").touch()
    store.wait(["never"], timedelta(seconds=60))


def test_a_flush_that_hangs_is_waited_for_no_longer_than_the_grace(tmp_path: Path) -> None:
    process = forked(wait_with_a_flush_that_hangs, tmp_path)
    wait_for(tmp_path / "ready")
    os.kill(process, signal.SIGTERM)
    status = end_of(process)
    assert os.WIFSIGNALED(status) and (tmp_path / "flushing").exists()


@pytest.mark.parametrize(("how", "signalled"), [("stuck", True), ("running", True), ("own handler", False)])
def test_sigterm_flushes_and_then_does_what_it_did_before(tmp_path: Path, how: str, signalled: bool) -> None:
    process = forked(child, tmp_path, how)
    wait_for(tmp_path / "ready")
    os.kill(process, signal.SIGTERM)
    status = os.waitpid(process, 0)[1]
    assert (tmp_path / "flushed").exists()
    if signalled:
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
    else:
        assert os.WEXITSTATUS(status) == 9


def end_a_worker(folder: Path, how: str) -> None:
    """Fork a worker that waits, end it, and say how it ended; a second SIGTERM is then for this process."""
    before = signal.getsignal(signal.SIGTERM)
    flusher = FlushOnSignal(lambda: (folder / f"flushed-by-{os.getpid()}").touch(), grace_s=5.0)
    flusher.install()
    if how == "chained":  # as frameworks do that take signals over later on
        ours = signal.getsignal(signal.SIGTERM)
        assert callable(ours)
        signal.signal(signal.SIGTERM, lambda number, frame: ours(number, frame))
    worker = os.fork()
    if worker == 0:
        if how == "plain" and signal.getsignal(signal.SIGTERM) == before:
            (folder / "given-back").touch()
        (folder / "ready").touch()
        time.sleep(60)
        os._exit(3)
    wait_for(folder / "ready")
    os.kill(worker, signal.SIGTERM)
    status = os.waitpid(worker, 0)[1]
    time.sleep(0.5)  # a watcher that was woken would end this process meanwhile
    (folder / f"worker-ended-by-{os.WTERMSIG(status)}").touch()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


@pytest.mark.parametrize("how", ["plain", "chained"])
def test_ending_a_forked_worker_neither_ends_nor_flushes_its_parent(tmp_path: Path, how: str) -> None:
    process = forked(end_a_worker, tmp_path, how)
    status = os.waitpid(process, 0)[1]
    assert (tmp_path / f"worker-ended-by-{int(signal.SIGTERM)}").exists(), "the parent ended with its worker"
    assert [path.name for path in tmp_path.glob("flushed-by-*")] == [f"flushed-by-{process}"]
    assert (tmp_path / "given-back").exists() is (how == "plain")
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM


def test_removing_puts_the_handlers_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    flusher = FlushOnSignal(lambda: None, grace_s=1.0)
    flusher.install()
    assert signal.getsignal(signal.SIGTERM) != before[0]
    flusher.remove()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
