"""What stands in the way of one rank's observer at its start costs that rank its observer, and the others nothing."""

from __future__ import annotations

import errno
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from scout_core.oob.supervisor import ObserverLost
from tests.oob.jobs import TinyJob, first_report, idle, running, say, wait_reports, wait_until

READY_S = 100.0


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def without_room(run_dir: str, what: str, odd: int, policy: str) -> None:
    """Rank `odd` has no room for its segment, its folder or its stacks file. Rank 3 stalls in the end."""
    rank, state_dir = int(os.environ["RANK"]), None
    if what == "stacks":
        state_dir = f"{run_dir}/state"
        if rank == odd:
            Path(state_dir, f"stacks-{rank}-{os.getpid()}").mkdir(parents=True)
    if what == "memory" and rank == odd:
        os.posix_fallocate = full  # type: ignore[assignment]
    if what == "folder" and rank == odd:
        tempfile.tempdir = "/nowhere"
    begun = time.monotonic()
    job = TinyJob(run_dir, oob_failure=policy, check_interval=2, hang_state_dir=state_dir, oob_ready_timeout_s=READY_S)
    watched, took = job.scout.observer_pid is not None, time.monotonic() - begun
    say(run_dir, f"attached{rank}", f"{watched} {took}")
    for _ in range(4):
        try:
            job.step()
        except ObserverLost as error:
            say(run_dir, f"raised{rank}", str(error))
            raise
    result = job.scout.last_result
    say(run_dir, f"checked{rank}", str(result is not None and not result.inconclusive_reasons))
    if rank == 3:
        idle()
    job.step()


@pytest.mark.parametrize(
    ("what", "odd", "policy"), [("memory", 0, "warn"), ("folder", 2, "raise"), ("stacks", 1, "warn")]
)
def test_a_rank_without_room_is_unmonitored_and_nobody_waits_for_it(
    tmp_path: Path, what: str, odd: int, policy: str
) -> None:
    with running(without_room, tmp_path, what, odd, policy):
        lost = first_report(tmp_path)
        if policy == "raise":
            wait_until(lambda: (tmp_path / f"raised{odd}").exists())
        else:
            stalled = wait_reports(tmp_path, 2)[1]
            assert (stalled["kind"], stalled["ranks"]) == ("process_stall", [3]), "the others watch each other"
            assert [(tmp_path / f"checked{rank}").read_text() for rank in range(4)] == ["True"] * 4
    attached = {rank: (tmp_path / f"attached{rank}").read_text().split() for rank in range(4)}
    assert {rank: said for rank, (said, _) in attached.items()} == {r: str(r != odd) for r in range(4)}
    assert max(float(took) for _, took in attached.values()) < READY_S * 0.6, "seconds that attach() took"
    assert lost["kind"] == "oob_daemon_failure" and lost["evidence"]["unmonitored_rank"] == odd
