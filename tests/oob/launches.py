"""Launches by the hundred: ranks as torchrun starts them, each with its observer, some steps, and an end.

Ranks are forked from the server of the rank pool. An observer is forked by its rank before that has any thread, and
waits for its seat: it saves the two seconds that Python and torch take to start, and is in all else the child process
that `attach()` starts. A launch that asks for `fresh` observers starts them as `attach()` does.
"""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from scout_core.oob import observer, supervisor
from scout_core.oob.channel import FOLDER, PREFIX, read_owner, start_ticks, sweep
from tests.distributed.pool import _PRELOAD
from tests.distributed.rank_process import _die_with_parent
from tests.oob.endings import ENDS, LASTING, THREE_RANKS, come_to_end, fault_time
from tests.oob.jobs import STALL_S, TinyJob, as_script, reports, wait_until

_START_S = 120.0
_LEAVE_S = 60.0
_GONE_S = 10.0  # 2 s on an idle machine
_CHILDREN = threading.Lock()
"""Starting a process polls every other one. Two threads that poll the same one share the one exit code that its pipe
holds, and who comes second reads the end of the pipe and takes it for exit code 255."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One launch. `culprit` is the rank that the end is about; without `watched` there is no SCOUT."""

    number: int
    end: str
    ranks: int
    culprit: int
    step: int
    delay_s: float
    run_dir: str
    fresh: bool = False
    watched: bool = True


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was left of a launch. `late_s`: from the moment at which the stall threshold was reached to the report, of
    faults that stall; `unwatched`: ranks without a ready observer; `leaked`: segments after a sweep."""

    plan: Plan
    codes: tuple[int | None, ...]
    late_s: float | None
    unwatched: tuple[int, ...]
    orphans: tuple[int, ...]
    leaked: tuple[str, ...]
    said: tuple[tuple[str, tuple[int, ...]], ...]


def plans(count: int, folder: Path, fresh_every: int, seed: int = 0, share: tuple[int, int] = (1, 1)) -> Iterator[Plan]:
    """`count` launches over all ends, with rank, step and time drawn; of these every n-th from the i-th, by `share`.

    Shares of one campaign are disjoint, together the whole, and may run at once: each launch has a store, a run id and
    a folder of its own.
    """
    draw = random.Random(seed)
    for number, end in zip(range(count), itertools.cycle(ENDS), strict=False):
        ranks = 3 if end in THREE_RANKS else 2
        plan = Plan(
            number=number,
            end=end,
            ranks=ranks,
            culprit=draw.randrange(ranks),
            step=draw.randrange(1, 5),
            delay_s=draw.uniform(0.0, 0.6),
            run_dir=str(folder / str(number)),
            fresh=number % fresh_every == fresh_every - 1,
        )
        if number % share[1] == share[0] - 1:
            yield plan


def launch(plan: Plan) -> Outcome:
    """Start the ranks, see them end, and look for what they left."""
    Path(plan.run_dir).mkdir(parents=True)
    with _started(plan) as (processes, links):
        pids = [process.pid for process in processes]
        observers = [] if plan.fresh or not plan.watched else [_observer(link) for link in links]
        ready: list[bool | None] = [None] * plan.ranks
        if plan.end == "early kill":
            wait([processes[0].sentinel], plan.delay_s)
            _signal(pids, signal.SIGKILL)
        else:
            ready = [_heard(link) for link in links]
            observers += _fresh_observers(pids) if plan.fresh else []
            _end_from_outside(plan, pids)
        reported = None
        if plan.end in LASTING and plan.watched:
            with suppress(AssertionError):  # what was not said shows in the outcome
                reported = wait_until(lambda: reports(Path(plan.run_dir)) and time.time(), _LEAVE_S)
        if plan.end in LASTING:
            workers = _loader_workers(pids)
            _signal(pids, signal.SIGKILL)
            _signal(workers, signal.SIGKILL)  # a stopped one would outlive its rank
        codes = tuple(_exit_code(process, _LEAVE_S) for process in processes)
    began = fault_time(plan.run_dir)
    alive = _left_over([process for process in observers if process is not None])
    sweep()
    return Outcome(
        plan=plan,
        codes=codes,
        late_s=None if reported is None or began is None else reported - began - STALL_S,
        unwatched=tuple(rank for rank, said in enumerate(ready) if said is False),
        orphans=tuple(process.pid for process in alive),
        leaked=segments_of(pids),
        said=tuple((r["kind"], tuple(r["ranks"])) for r in reports(Path(plan.run_dir))),
    )


def without_scout(plan: Plan) -> tuple[int | None, ...]:
    """The exit codes of the same launch without SCOUT."""
    return launch(replace(plan, watched=False, run_dir=f"{plan.run_dir}-bare")).codes


def segments_of(pids: Sequence[int]) -> tuple[str, ...]:
    """Names of the segments that belong to these processes, dead or alive."""
    found = []
    for path in FOLDER.glob(f"{PREFIX}*"):
        try:
            owner = read_owner(path.read_bytes()[:4096])
        except FileNotFoundError:
            continue
        if owner is not None and owner.pid in pids:
            found.append(path.name)
    return tuple(found)


# -- from outside -----------------------------------------------------------------------------------------------------


@contextmanager
def _started(plan: Plan) -> Iterator[tuple[list[Any], list[Connection]]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, links = [], []
    try:
        for rank in range(plan.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(rank, store.port, plan, theirs))
            with _CHILDREN:
                process.start()
            theirs.close()
            processes.append(process)
            links.append(ours)
        yield processes, links
    finally:
        for process in processes:
            if _exit_code(process, 0.0) is None:
                process.kill()
            _exit_code(process, _GONE_S)
        for link in links:
            link.close()


def _exit_code(process: Any, timeout_s: float) -> int | None:
    """How a process ended, once it has; None when it still runs after that time."""
    wait([process.sentinel], timeout_s)
    with _CHILDREN:
        code: int | None = process.exitcode
    return code


def _observer(link: Connection) -> psutil.Process | None:
    """The observer that a rank has forked; None when it is over already."""
    pid = _heard(link)
    try:
        return psutil.Process(pid) if pid is not None else None
    except psutil.NoSuchProcess:
        return None


def _heard(link: Connection) -> Any:
    """What a rank says next; None when it ended instead."""
    try:
        return link.recv() if link.poll(_START_S) else None
    except (EOFError, ConnectionResetError):
        return None


def _fresh_observers(pids: Sequence[int]) -> list[psutil.Process]:
    found = [child for pid in pids if psutil.pid_exists(pid) for child in psutil.Process(pid).children()]
    return [child for child in found if "scout_core.oob.observer" in child.cmdline()]


def _loader_workers(pids: Sequence[int]) -> list[int]:
    """Children of the ranks that are no observers: these lead process groups of their own."""
    found = [child.pid for pid in pids if psutil.pid_exists(pid) for child in psutil.Process(pid).children()]
    return [pid for pid in found if os.getpgid(pid) != pid]


def _end_from_outside(plan: Plan, pids: Sequence[int]) -> None:
    if plan.end == "kill one":
        _signal([pids[plan.culprit]], signal.SIGKILL)
    elif plan.end == "kill all":
        _signal(pids, signal.SIGKILL)
    elif plan.end == "terminate":
        _signal(pids, signal.SIGTERM)


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _left_over(observers: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those that are still there after their time."""
    deadline = time.monotonic() + _GONE_S
    while (alive := [process for process in observers if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return alive


def _runs(process: psutil.Process) -> bool:
    """Whether it is more than a zombie that nobody has reaped."""
    return process.is_running() and start_ticks(process.pid) is not None


# -- inside a rank ----------------------------------------------------------------------------------------------------


class Forked:
    """A child process that waits for its seat, with the part of `subprocess.Popen` that a supervisor uses."""

    def __init__(self) -> None:
        seat_out, self._seat_in = os.pipe()
        in_out, in_in = os.pipe()
        out_out, out_in = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _observe(seat_out, in_out, out_in)
        for descriptor in (seat_out, in_out, out_in):
            os.close(descriptor)
        self.stdin, self.stdout = io.FileIO(in_in, "wb"), io.FileIO(out_out, "rb")
        self._code: int | None = None

    def seat(self, command: Sequence[str], **_: Any) -> Forked:
        """What `subprocess.Popen(command, ...)` would be."""
        os.write(self._seat_in, command[-1].encode())
        os.close(self._seat_in)
        return self

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("observer", timeout)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def _observe(seat_out: int, stdin: int, stdout: int) -> None:
    """The child: an observer once it has its seat, nothing if its rank ends before."""
    code = 1
    try:
        os.dup2(stdin, 0), os.dup2(stdout, 1)
        os.dup2(seat_out, 3)
        os.closerange(4, 4096)
        seat = b"".join(iter(lambda: os.read(3, 1 << 16), b"")).decode()
        if seat:
            sys.argv, sys.stdin = ["observer", seat], os.fdopen(0)  # multiprocessing has put another one there
            code = observer.main(seat)
    finally:
        os._exit(code)


def _rank(rank: int, port: int, plan: Plan, link: Connection) -> None:
    _die_with_parent()
    torch.set_num_threads(1)
    if plan.watched and not plan.fresh:
        forked = Forked()
        link.send(forked.pid)
        supervisor.subprocess = _Subprocess(forked)  # type: ignore[attr-defined]
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # the errors of a hundred broken jobs
    world = str(plan.ranks)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=world, LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=world, MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), TORCHELASTIC_RUN_ID=f"launch-{os.getppid()}-{plan.number}",
        TORCHELASTIC_RESTART_COUNT="0", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan.ranks)
    as_script(_train, rank, plan, link)


class _Subprocess:
    """The module `subprocess`, but for the one process that is there already."""

    PIPE, TimeoutExpired = subprocess.PIPE, subprocess.TimeoutExpired

    def __init__(self, forked: Forked) -> None:
        self.Popen = forked.seat


def _train(rank: int, plan: Plan, link: Connection) -> None:
    job = TinyJob(plan.run_dir, oob_enabled=plan.watched)
    link_said = job.scout.observer_pid is not None or not plan.watched
    for step in range(plan.step):
        job.step()
        if step == 0:
            link.send(link_said)
    come_to_end(plan.end, plan.culprit, plan.run_dir, job)
