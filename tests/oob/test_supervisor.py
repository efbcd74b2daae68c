"""The training process's end of its observer, as a script that attaches sees it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

_ATTACH = """
import os, sys
import torch, scout_core
from torch import nn

def attach(**options):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"check_interval": 0, "oob_failure": "warn", "oob_ready_timeout_s": 30} | options
    return scout_core.attach(model, optimizer, **options), optimizer
"""


def script(body: str, code: int = 0, **environment: str) -> str:
    """What a process prints that can `attach()`, and that ends with this code."""
    command = [sys.executable, "-c", _ATTACH + body]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environment)
    assert run.returncode == code, run.stderr
    return run.stdout.strip()


_MANY_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
scout, _ = attach()
print(scout.observer_pid is not None, scout._oob._supervisor._thread.is_alive())
scout.close()
"""


def test_a_job_with_many_open_files_is_watched() -> None:
    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 2048:
        pytest.skip("this host allows fewer open files")
    assert script(_MANY_FILES) == "True True"


_ENDING = """
import atexit
from scout_core.oob.reader import read_farewell
atexit.register(lambda: print(read_farewell(scout._oob._channel.memory)[0].name))  # after what attach() registers
scout, optimizer = attach()
"""


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("", "FINISHED"),
        ("sys.excepthook(ValueError, ValueError('x'), None)", "EXCEPTION"),
        ("os.fork() or sys.exit(0); os.wait(); print(read_farewell(scout._oob._channel.memory)[0].name)", "NONE"),
    ],
    ids=["clean", "exception", "of a child"],
)
def test_a_process_says_that_it_ends_in_good_order(end: str, said: str) -> None:
    assert script(_ENDING + end).splitlines()[-2:][0] == said


_KILLED = """
scout, _ = attach()
for pid in scout.observer_pid, os.getpid():
    os.kill(pid, 9)
"""


def test_the_next_start_removes_the_folder_that_a_killed_job_left(tmp_path: Path) -> None:
    script(_KILLED, code=-9, TMPDIR=str(tmp_path))
    assert len(list(tmp_path.glob("scout-oob-*"))) == 1
    script("attach()[0].close()", TMPDIR=str(tmp_path))
    assert list(tmp_path.glob("scout-oob-*")) == []
