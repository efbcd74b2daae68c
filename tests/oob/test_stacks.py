"""Stacks of a process that goes on running: the right thread's, and the process survives it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scout_core.oob.process import ask_for_stack, interrupt
from scout_core.oob.supervisor import STACKS_SIGNAL

_BUSY = """
import sys, threading
from pathlib import Path
from scout_core.oob.supervisor import register_stacks

def deeper(n):
    return deeper(n - 1) if n else [i for i in range(3)]

def churn():
    while True:
        deeper(20)

def in_training():
    print("ready", flush=True)
    while True:
        deeper(5)

file = register_stacks(Path(sys.argv[1]))
sys.setswitchinterval(1e-5)
for _ in range(4):
    threading.Thread(target=churn, daemon=True).start()
in_training()
"""


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", _BUSY, str(tmp_path / "stacks")], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.communicate()


def test_the_training_thread_is_shown_and_no_other(busy: subprocess.Popen[bytes], tmp_path: Path) -> None:
    text = ask_for_stack(busy.pid, busy.pid, STACKS_SIGNAL, tmp_path / "stacks", 10)
    assert "in in_training" in text and "churn" not in text


def test_a_busy_process_survives_having_its_stack_taken(busy: subprocess.Popen[bytes], tmp_path: Path) -> None:
    for _ in range(500):
        interrupt(busy.pid, busy.pid, STACKS_SIGNAL)
        assert busy.poll() is None, f"it ended with {busy.returncode}"
        time.sleep(0.0005)
    assert (tmp_path / "stacks").read_text().count("in in_training") > 20


def test_a_process_that_is_gone_has_no_stack(tmp_path: Path) -> None:
    (tmp_path / "stacks").touch()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert ask_for_stack(gone.pid, gone.pid, STACKS_SIGNAL, tmp_path / "stacks", 1).startswith("none: ")
    assert ask_for_stack(os.getpid(), os.getpid(), 0, tmp_path / "stacks", 1).startswith("none: ")
