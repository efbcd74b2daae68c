"""Flushes when the process is told to end, also while its main thread is stuck in native code."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from scout_core.trust.signals import FlushOnSignal


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"


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


@pytest.mark.parametrize(("how", "signalled"), [("stuck", True), ("running", True), ("own handler", False)])
def test_sigterm_flushes_and_then_does_what_it_did_before(tmp_path: Path, how: str, signalled: bool) -> None:
    process = os.fork()
    if process == 0:
        try:
            child(tmp_path, how)
        finally:
            os._exit(3)
    wait_for(tmp_path / "ready")
    os.kill(process, signal.SIGTERM)
    status = os.waitpid(process, 0)[1]
    assert (tmp_path / "flushed").exists()
    if signalled:
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM
    else:
        assert os.WEXITSTATUS(status) == 9


def test_removing_puts_the_handlers_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    flusher = FlushOnSignal(lambda: None, grace_s=1.0)
    flusher.install()
    assert signal.getsignal(signal.SIGTERM) != before[0]
    flusher.remove()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
