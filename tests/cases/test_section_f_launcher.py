"""Case F09 under the real torchrun: the launcher is killed, and its ranks hold their devices on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from scout_core.oob.channel import sweep
from tests.oob.jobs import reports, wait_until
from tests.oob.launches import segments_of

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


def ended(process: psutil.Process) -> bool:
    """Whether it is over. When init reaps what is left of an orphan is its own matter."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_f09_ranks_that_outlive_their_launcher_are_reported_by_pid(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (tmp_path / "torchrun.log").open("w") as log:
        command += [str(Path(__file__).with_name("orphans.py")), str(tmp_path)]
        launcher = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    ranks: list[psutil.Process] = []
    try:
        wait_until(lambda: len(list(tmp_path.glob("step?"))) == 2, 120)
        ranks = psutil.Process(launcher.pid).children()
        observers = [psutil.Process(int(path.name.rpartition("-")[2])) for path in tmp_path.glob("observer*")]
        assert len(ranks) == len(observers) == 2 and reports(tmp_path) == []
        launcher.kill()
        launcher.wait()
        report = wait_until(lambda: reports(tmp_path), 10)[0]
        assert (report["kind"], report["ranks"], report["recommended_action"]) == ("environment_changed", [], "stop")
        assert sorted(report["evidence"]["orphans"].values()) == sorted(rank.pid for rank in ranks)
        assert report["evidence"]["launchers"] == [f"{launcher.pid} on {os.uname().nodename}"]
        before = int((tmp_path / "step0").read_text() or 0)
        wait_until(lambda: int((tmp_path / "step0").read_text() or 0) > before + 40, 60)
        assert len(reports(tmp_path)) == 1, "told once by all, and training that goes on is no fault"
        for pid in report["evidence"]["orphans"].values():
            os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        wait_until(lambda: all(map(ended, observers)), poll_s=0.01)
        assert time.monotonic() - begun <= 2.0, "seconds from SIGKILL"
        sweep()
        assert segments_of([rank.pid for rank in ranks]) == ()
    finally:
        for process in [launcher, *ranks]:
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                process.kill()
