"""torchrun is ended with its workers, which live in sessions of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from scout_core.demo.loop import run_bounded

_LAUNCHER = """
import subprocess, sys
workers = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(2)]
open(sys.argv[1], "w").write(" ".join(str(worker.pid) for worker in workers))
workers[0].wait()
"""


def test_at_the_deadline_nothing_is_left(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    with pytest.raises(subprocess.TimeoutExpired):
        run_bounded([sys.executable, "-ISc", _LAUNCHER, str(pids)], os.environ, tmp_path / "log", 5.0)
    workers = [int(word) for word in pids.read_text().split()]
    assert len(workers) == 2
    assert not [pid for pid in workers if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def test_what_ends_by_itself_gives_its_code(tmp_path: Path) -> None:
    assert run_bounded([sys.executable, "-c", "print(7); exit(3)"], os.environ, tmp_path / "log", 60.0) == 3
    assert (tmp_path / "log").read_text() == "7\n"
