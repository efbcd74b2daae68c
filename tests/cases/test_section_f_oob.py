"""Section F of the case list, the out-of-band part: the monitor must not alarm, harm the job, leak, or outlive it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from scout_core.oob.channel import leftovers, sweep
from tests.oob.jobs import STALL_S, WIDTH, TinyJob, idle, records, reports, running, say, wait_reports, wait_until


def healthy(run_dir: str) -> None:
    """What looks odd and is legal, each part longer than the threshold of training where it may be."""
    job = TinyJob(run_dir)
    for _ in range(2):  # F16: several passes to one optimizer step
        for _ in range(4):
            job.compute()
        reduce_and_update(job)
    pair = dist.new_group([1, 2])  # F14: a barrier of two ranks more
    if job.rank in (1, 2):
        dist.barrier(group=pair)
    dist.barrier()
    with job.scout.phase("checkpoint"):  # F01: the first rank saves, the others wait
        if job.rank == 0:
            time.sleep(2 * STALL_S)
        dist.barrier()
    with job.scout.phase("compile"):  # F04: a cold cache on one rank
        if job.rank == 3:
            time.sleep(2 * STALL_S)
    job.step()
    job.model.eval()  # F05: evaluation, a batch fewer on the last rank
    with torch.no_grad():
        for _ in range(3 if job.rank == 3 else 4):
            job.model(torch.ones(1, WIDTH))
    dist.barrier()
    job.model.train()
    inner = job.model[0]  # type: ignore[index]
    for reentrant in (True, False):  # F06: layers whose hooks fire again in backward
        out = checkpoint(inner, torch.ones(1, WIDTH, requires_grad=True), use_reentrant=reentrant)
        out.sum().backward()
        reduce_and_update(job)
    assert job.scout.step_count == 5
    say(run_dir, f"done{job.rank}")
    job.scout.close()


def reduce_and_update(job: TinyJob) -> None:
    dist.all_reduce(torch.ones(4))
    job.update()


def test_f01_f04_f05_f06_f14_f16_legal_oddities_raise_no_alarm(tmp_path: Path) -> None:
    with running(healthy, tmp_path) as ranks:
        ranks.wait(150)
    assert len(list(tmp_path.glob("done*"))) == 4 and reports(tmp_path) == []


def stalls_twice(run_dir: str) -> None:
    job = TinyJob(run_dir)
    for step in range(7):
        job.step()
        if job.rank == 2 and step in (2, 4):
            wanted = 1 if step == 2 else 2
            wait_until(lambda wanted=wanted: len(reports(Path(run_dir))) >= wanted)
    say(run_dir, f"done{job.rank}")
    idle()


def test_f02_a_second_stall_is_a_second_incident(tmp_path: Path) -> None:
    with running(stalls_twice, tmp_path):
        first, second = wait_reports(tmp_path, 2)[:2]
        wait_until(lambda: [r for r in records(tmp_path) if r["type"] == "incident_closed"])
    assert first["kind"] == second["kind"] == "process_stall" and first["ranks"] == second["ranks"] == [2]
    assert first["incident_id"] != second["incident_id"]


def long_job(run_dir: str, policy: str) -> None:
    job = TinyJob(run_dir, oob_failure=policy, hang_state_dir=f"{run_dir}/state")
    say(run_dir, f"observer{job.rank}-{job.scout._oob.observer_pid}")
    while True:
        job.step()
        time.sleep(0.02)


def observer_of(run_dir: Path, rank: int) -> int:
    return int(wait_until(lambda: list(run_dir.glob(f"observer{rank}-*")))[0].name.rpartition("-")[2])


def ended(process: psutil.Process) -> bool:
    """Whether a process is over. When init reaps what is left of an orphan is its own matter."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_f12_a_killed_observer_is_reported_and_no_hang(tmp_path: Path) -> None:
    with running(long_job, tmp_path, "warn") as ranks:
        observers = [observer_of(tmp_path, rank) for rank in range(4)]
        os.kill(observers[1], signal.SIGKILL)
        report = wait_reports(tmp_path, 1)[0]
        assert report["kind"] == "oob_daemon_failure" and report["evidence"]["unmonitored_rank"] == 1
        before = psutil.Process(ranks.pids[0]).cpu_times().user
        wait_until(lambda: psutil.Process(ranks.pids[0]).cpu_times().user > before, 20)
    assert len(reports(tmp_path)) == 1


def test_a_lost_observer_ends_the_job_when_that_is_the_policy(tmp_path: Path) -> None:
    with running(long_job, tmp_path, "raise") as ranks:
        os.kill(observer_of(tmp_path, 1), signal.SIGKILL)
        outcome = ranks.wait(100, ranks=[1])[1]
    assert outcome.exitcode == 1


def test_f09_f11_killed_training_leaves_no_observer_and_no_segment(tmp_path: Path) -> None:
    with running(long_job, tmp_path, "warn") as ranks:
        observers = [psutil.Process(observer_of(tmp_path, rank)) for rank in range(4)]
        observers[3].kill()
        for pid in ranks.pids:
            os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        wait_until(lambda: all(map(ended, observers)))
        assert time.monotonic() - begun < 3.0
    sweep()
    assert leftovers() == ()


def progressing(run_dir: str) -> None:
    """Steps for longer than the threshold, each well within it."""
    job = TinyJob(run_dir, hang_state_dir=f"{run_dir}/state")
    end = time.monotonic() + 2 * STALL_S
    going = torch.ones(1)
    while going.item():
        job.step()
        going = torch.tensor([float(time.monotonic() < end)])
        dist.broadcast(going, 0)
    job.scout.close()


def test_observers_send_nothing_while_training_progresses(tmp_path: Path) -> None:
    with running(progressing, tmp_path) as ranks:
        ranks.wait(100)
    told = [json.loads((tmp_path / "state" / f"observer-{rank}.json").read_text()) for rank in range(4)]
    assert [one["bytes_sent_watching"] for one in told] == [0] * 4
    assert all(one["bytes_sent"] > 0 for one in told), "a farewell is sent, so the counter counts"


def with_port(run_dir: str, port: int) -> None:
    job = TinyJob(run_dir, hang_master_port=port)
    job.step()
    say(run_dir, f"watched{job.rank}-{job.scout._oob._lost}")
    job.scout.close()


def test_f10_a_port_in_use_is_left_for_another(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with running(with_port, tmp_path, taken.getsockname()[1]) as ranks:
            ranks.wait(150)
    assert len(list(tmp_path.glob("watched?-"))) == 4 and reports(tmp_path) == []


_SCRIPT = """
import sys, os, signal, torch, scout_core
from torch import nn
model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scout = scout_core.attach(model, optimizer, check_interval=0)
{body}
"""


@pytest.mark.parametrize(
    ("body", "code"),
    [("sys.exit(3)", 3), ("raise ValueError('x')", 1), ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT)],
)
def test_f07_the_exit_code_is_the_jobs_own(body: str, code: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", _SCRIPT.format(body=body)], stderr=subprocess.PIPE)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
