"""Section F of the case list, the out-of-band part: the monitor must not alarm, harm the job, leak, or outlive it."""

from __future__ import annotations

import gc
import json
import logging.handlers
import os
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils.checkpoint import checkpoint

from scout_core.oob.channel import Channel, Scope, sweep
from scout_core.oob.fingerprints import describe
from scout_core.oob.instrument import Checkpoints, WatchedLoader
from scout_core.oob.layout import CallState
from scout_core.oob.reader import read_progress
from scout_core.oob.writer import Publisher
from scout_core.replay.guard import logger
from tests.oob.jobs import STALL_S, WIDTH, TinyJob, idle, records, reports, running, say, wait_reports, wait_until
from tests.oob.launches import segments_of


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


def compiles_too_long(run_dir: str) -> None:
    job = TinyJob(run_dir, stall_compile_s=3 * STALL_S)
    job.step()
    if job.rank == 3:
        with job.scout.phase("compile"):
            say(run_dir, "compiling")
            idle()
    job.step()


def test_f04_compilation_beyond_its_own_grace_is_a_stall_and_none_before(tmp_path: Path) -> None:
    with running(compiles_too_long, tmp_path):
        report = wait_reports(tmp_path, 1)[0]
        took = time.time() - float(read(tmp_path / "compiling"))
    assert (report["kind"], report["ranks"], report["phase"]) == ("process_stall", [3], "compile"), report["message"]
    assert took >= 3 * STALL_S


def evaluates(run_dir: str, compiled: bool) -> None:
    """Accumulation in all, and each batch of the evaluation, takes longer than training may be quiet."""
    job = TinyJob(run_dir, wrap=(lambda model: torch.compile(model, backend="eager")) if compiled else None)
    job.step()
    for _ in range(4):
        job.compute()
        time.sleep(0.6 * STALL_S)
    reduce_and_update(job)
    job.model.eval()
    with torch.no_grad():
        for _ in range(1 if job.rank == 3 else 2):
            job.model(torch.ones(1, WIDTH))
            time.sleep(1.5 * STALL_S)
    dist.barrier()
    job.model.train()
    job.step()
    say(run_dir, f"done{job.rank}")
    job.scout.close()


@pytest.mark.parametrize("compiled", [False, True])
def test_f05_an_evaluation_longer_than_the_threshold_of_training_is_no_alarm(tmp_path: Path, compiled: bool) -> None:
    with running(evaluates, tmp_path, compiled) as ranks:
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
    say(run_dir, f"observer{job.rank}-{job.scout.observer_pid}")
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


def test_f12_a_stopped_observer_is_reported_and_its_peers_judge_without_it(tmp_path: Path) -> None:
    with running(long_job, tmp_path, "warn") as ranks:
        observers = [psutil.Process(observer_of(tmp_path, rank)) for rank in range(4)]
        observers[1].suspend()
        lost = wait_reports(tmp_path, 1)[0]
        assert (lost["kind"], lost["ranks"], lost["evidence"]["unmonitored_rank"]) == ("oob_daemon_failure", [], 1)
        assert "stopped" in lost["message"]
        before = psutil.Process(ranks.pids[0]).cpu_times().user
        wait_until(lambda: psutil.Process(ranks.pids[0]).cpu_times().user > before, 20)
        assert len(reports(tmp_path)) == 1, "training goes on, and nobody calls that a hang"
        os.kill(ranks.pids[2], signal.SIGSTOP)
        stalled = wait_reports(tmp_path, 2)[1]
        assert (stalled["kind"], stalled["ranks"]) == ("process_stall", [2]), stalled["message"]
    wait_until(lambda: all(map(ended, observers)), 20)


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
        wait_until(lambda: all(map(ended, observers)), poll_s=0.01)
        assert time.monotonic() - begun <= 2.0, "seconds from SIGKILL"
        sweep()
        assert segments_of(ranks.pids) == ()


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
    heard = logging.handlers.BufferingHandler(1000)
    logger.addHandler(heard)
    job = TinyJob(run_dir, hang_master_port=port)
    job.step()
    told = [record.getMessage() for record in heard.buffer if "rendezvous" in record.getMessage()]
    say(run_dir, f"told{job.rank}", "\n".join(told) or "nothing")
    say(run_dir, f"watched{job.rank}-{job.scout.observer_pid is not None}")
    job.scout.close()


def test_f10_a_port_in_use_is_left_for_another(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with running(with_port, tmp_path, port) as ranks:
            ranks.wait(150)
    reasons = {(tmp_path / f"told{rank}").read_text() for rank in range(4)}
    assert len(reasons) == 1 and f"port {port} cannot be used" in reasons.pop(), "every rank says why, alike"
    assert len(list(tmp_path.glob("watched?-True"))) == 4 and reports(tmp_path) == []


_SCRIPT = """
import json, os, signal, subprocess, sys, time
import torch, scout_core
from torch import nn

def main():
    started = []
    for body in json.loads(sys.argv[1]):
        for watched in (False, True):
            (ready_out, ready_in), (go_out, go_in) = os.pipe(), os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(go_in)
                return body, watched, ready_in, go_out
            os.close(ready_in)
            started.append((body, watched, pid, ready_out, go_in))
    for *_, ready, _ in started:  # all have started before the first one ends
        os.read(ready, 1)
    for body, watched, pid, _, go in started:
        begun = time.monotonic()
        os.write(go, b"x")
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps([body, watched, code, time.monotonic() - begun]), flush=True)
    os._exit(0)

body, watched, ready, go = main()
model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scout = scout_core.attach(model, optimizer, check_interval=0) if watched else None
assert scout is None or scout.observer_pid is not None
os.write(ready, b"x")
os.read(go, 1)
exec(body)
"""


def test_f07_exit_code_and_time_are_the_jobs_own() -> None:
    """Each end with SCOUT and without it, as the main program of a process that only loaded torch before."""
    bodies = {"sys.exit(3)": 3, "raise ValueError('x')": 1, "os.kill(os.getpid(), signal.SIGINT)": -signal.SIGINT}
    command = [sys.executable, "-c", _SCRIPT, json.dumps(list(bodies))]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = [json.loads(line) for line in process.stdout.splitlines()]
    assert [(body, watched) for body, watched, *_ in found] == [(b, w) for b in bodies for w in (False, True)]
    seconds = {(body, watched): took for body, watched, _, took in found}
    for body, watched, code, _ in found:
        assert code == bodies[body], (body, watched, process.stderr)
    for body in bodies:
        assert seconds[body, True] - seconds[body, False] <= 2.0, seconds


def slow_teardown(run_dir: str) -> None:
    """Rank 2 holds the others up; their reduction gives up, and their teardown takes longer than its threshold."""
    job = TinyJob(run_dir, stall_teardown_s=STALL_S)
    say(run_dir, f"observer{job.rank}-{job.scout.observer_pid}")
    group = dist.new_group(timeout=timedelta(seconds=3 * STALL_S))
    job.step()
    if job.rank == 2:
        idle()
    try:
        dist.all_reduce(torch.ones(4), group=group)
    except RuntimeError:
        with job.scout.phase("teardown"):
            say(run_dir, f"teardown{job.rank}")
            wait_until(lambda: (Path(run_dir) / "enough").exists())
        sys.exit(1)


def test_f03_a_slow_teardown_does_not_hide_the_cause(tmp_path: Path) -> None:
    with running(slow_teardown, tmp_path) as ranks:
        first = wait_reports(tmp_path, 1)[0]
        begun = [float(wait_until(lambda r=r: read(tmp_path / f"teardown{r}"))) for r in (0, 1, 3)]
        wait_until(lambda: time.time() > max(begun) + 2.5 * STALL_S)
        observers = [psutil.Process(observer_of(tmp_path, rank)) for rank in (0, 1, 3)]
        say(str(tmp_path), "enough")
        assert [ranks.wait(100, ranks=[0, 1, 3])[rank].exitcode for rank in (0, 1, 3)] == [1, 1, 1]
        wait_until(lambda: all(map(ended, observers)))
    assert (first["kind"], first["ranks"]) == ("process_stall", [2])
    told = [r for r in records(tmp_path) if r["type"] == "SCOUTFaultReport" and r is not first]
    later = [r["evidence"].get("secondary_to") for r in told if r["incident_id"] != first["incident_id"]]
    assert later == [first["incident_id"]] * len(later), "all that follows is marked as a consequence"
    bundle = Path(first["evidence"]["bundle"])
    assert {f"gloo_flight_{rank}" for rank in range(4)} <= {path.name for path in bundle.iterdir()}


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def skips_under_detail(run_dir: str) -> None:
    """A04 with torch's own collective checker on, which compares less and blames the wrong ranks."""
    dist.barrier()
    dist.destroy_process_group()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", store=dist.PrefixStore("detail", store), rank=rank, world_size=world)
    job = TinyJob(run_dir)
    for step in range(5):
        job.compute()
        if not (rank == 2 and step == 2):
            dist.all_reduce(torch.ones(4))
        job.update()


def test_f15_the_skipper_is_named_under_torchs_own_checker_too(tmp_path: Path) -> None:
    with running(skips_under_detail, tmp_path):
        report = wait_reports(tmp_path, 1)[0]
    assert (report["kind"], report["ranks"], report["step"]) == ("collective_desync", [2], 2), report["message"]


def skips_at_first(run_dir: str) -> None:
    """The loss scale of float16 is found in the first steps: every rank leaves the update out."""
    job = TinyJob(run_dir, check_interval=2)
    for step in range(12):
        job.compute()
        overflown = torch.tensor([float("inf") if step < 6 else 1.0])
        dist.all_reduce(overflown)
        if torch.isfinite(overflown).all():
            job.update()
        else:
            job.optimizer.zero_grad()
    result = job.scout.last_result
    say(run_dir, f"done{job.rank}-{job.scout.step_count}-{result is not None and result.step}")
    job.scout.close()


def test_f17_updates_skipped_by_every_rank_raise_no_alarm(tmp_path: Path) -> None:
    with running(skips_at_first, tmp_path) as ranks:
        ranks.wait(150)
    assert sorted(path.name for path in tmp_path.glob("done*")) == [f"done{rank}-6-6" for rank in range(4)]
    assert reports(tmp_path) == []


def attempt(run_dir: str, number: int, restarts: int, state_dir: str | None) -> None:
    """One attempt of a run under torchrun, with what its predecessor left in the store where they share one."""
    os.environ["TORCHELASTIC_RUN_ID"], os.environ["TORCHELASTIC_RESTART_COUNT"] = "f21", str(restarts)
    dist.PrefixStore("scout-oob/0/0/1", c10d._get_default_store()).set("where", "127.0.0.1|1|of the dead")
    job = TinyJob(run_dir, hang_state_dir=state_dir)
    for _ in range(3):
        job.step()
    say(run_dir, f"watched{number}-{job.rank}-{job.scout.observer_pid is not None}")
    if number == 0:
        idle()
    job.scout.close()


@pytest.mark.parametrize("how", ["store", "file", "file of the same name"])
def test_f21_a_restart_meets_nothing_of_the_attempt_before(tmp_path: Path, how: str) -> None:
    """Jobs of torchrun's default run id, or of mpirun, name their files alike."""
    state = str(tmp_path / "state") if how != "store" else None
    if state is not None:
        with running(attempt, tmp_path, 0, 0, state):
            wait_until(lambda: len(list(tmp_path.glob("watched0-?-True"))) == 4)
    second = tmp_path / "second"  # what the observers of the killed attempt still report is theirs
    second.mkdir()
    left = set(tmp_path.glob("state/rendezvous*"))
    with running(attempt, second, 1, 0 if "same" in how else 1, state) as ranks:
        ranks.wait(150)
    assert len(list(second.glob("watched1-?-True"))) == 4
    assert len(left) == (state is not None) and set(tmp_path.glob("state/rendezvous*")) == left, "it removes its own"
    assert reports(second) == []


def test_f22_what_is_kept_of_100_000_steps_is_bounded(tmp_path: Path) -> None:
    scope = Scope(run="f22", attempt=0, pid=os.getpid(), peers=(0, 1), rank=0)
    channel = Channel.create(scope, world=2, folder=tmp_path)
    publisher = Publisher(channel.memory, (0, 1))
    files = Checkpoints(publisher)
    kept: list[int] = []
    spent = 0.0
    tracemalloc.start()
    for leg in range(2):
        loader = iter(WatchedLoader(range(50_000), "train", publisher))
        started = time.process_time()
        for step in range(50_000):
            next(loader)
            publisher.begin_pass()
            for layer in range(8):
                publisher.layer(layer + 1)
            what = describe("all_reduce", (f"float32[{step}]", "SUM"), "train.py:7")  # a new shape in each step
            publisher.end_call(*publisher.begin_call((0, 1), what), CallState.RETURNED)
            if step % 10 == 0:
                with files.io("write", f"step{step}"):
                    pass
            publisher.boundary(leg * 50_000 + step + 1)
        spent = time.process_time() - started
        gc.collect()
        kept.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert read_progress(channel.memory).step == 100_000
    assert kept[1] - kept[0] < 100_000, "bytes"
    assert spent / 50_000 < 0.005 * 0.05, "0.5% of a 50 ms step, even while memory is traced"
    channel.close(unlink=True, folder=tmp_path)
