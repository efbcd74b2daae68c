"""Real ranks for tests, without waiting for Python and torch to start.

`RankPool` keeps its processes for the session and runs one function at a time on all of them; `own_ranks` and
`one_shot_ranks` give a test ranks that it may stop or kill. Linux only. Processes are forked from a server that has
imported torch, so a set of ranks starts in a fraction of a second once the server is up.

What a test's function finds in each rank: an initialized default process group (new for every call, so groups left by
an earlier call are gone and names are counted from zero), seed 0, one thread, and the variables that torchrun sets.
Anything else that it changes (environment, module globals, default dtype) it must put back. Functions are sent by name:
module-level ones only, with arguments and results that pickle.
"""

import atexit
import multiprocessing
import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal

import psutil
import torch.distributed as dist

from tests.distributed.rank_process import STACKS_SIGNAL, Call, FunctionRef, RankFailure, RankSeat, rank_main

START_DEADLINE_S = 90.0
# How long the others may still take to answer once one rank has failed: they may be stuck waiting for it.
GRACE_S = 1.0
_STACKS_DEADLINE_S = 2.0
_END_DEADLINE_S = 10.0
_PRELOAD = [
    "torch",
    "torch._dynamo",  # imported by the first optimizer
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "pytest",
    "scout_core.session",  # which `scout_core` itself loads when asked for attach()
]


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """How a rank's call stands. `exitcode` is set only when the process ended (negative: killed by that signal)."""

    rank: int
    state: Literal["returned", "raised", "exited", "running"]
    value: Any = None
    failure: RankFailure | None = None
    exitcode: int | None = None


class RankError(AssertionError):
    """A call failed. `outcomes` has one entry per rank, `failures` the exceptions by rank, the earliest first."""

    def __init__(self, name: str, outcomes: list[RankOutcome], failures: dict[int, RankFailure]) -> None:
        self.outcomes = outcomes
        self.failures = failures
        lines = [f"{name} failed on {len(outcomes)} ranks:"]
        lines += [f"rank {f.rank} raised {f.kind}: {f.message}\n{f.traceback}" for f in failures.values()]
        lines += [f"rank {o.rank} ended with exit code {o.exitcode}" for o in outcomes if o.state == "exited"]
        running = [str(o.rank) for o in outcomes if o.state == "running"]
        if running:
            lines.append(f"no answer from rank(s) {', '.join(running)}")
        super().__init__("\n".join(lines))


class RankTimeout(RankError):
    """A call ran into its deadline. `stacks` has the Python stacks of every rank that had not answered."""

    def __init__(self, name: str, outcomes: list[RankOutcome], stacks: dict[int, str], timeout_s: float) -> None:
        super().__init__(f"{name} (deadline {timeout_s:g} s)", outcomes, {})
        self.stacks = stacks
        text = "\n".join(f"stacks of rank {rank}:\n{stack}" for rank, stack in stacks.items())
        self.args = (f"{self.args[0]}\n{text}",)


class Ranks:
    """Processes with ranks 0..world_size-1 that were started together and end together."""

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="scout-ranks-")
        # The store lives here, so a killed rank takes no other rank's rendezvous with it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._links: list[connection.Connection] = []
        self._processes: list[Any] = []
        self._outcomes: dict[int, RankOutcome] = {}
        self._worlds = 0
        atexit.register(self.kill)
        started = False
        try:
            for rank in range(world_size):
                self._start(context, rank, backend)
            self._await_ready()
            started = True
        finally:
            if not started:
                self.kill()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], deadline_s: float) -> None:
        """Start `fn` on every rank; `wait` brings the outcomes."""
        self._outcomes = {}
        self._worlds += 1
        request = Call(
            function=FunctionRef.of(fn),
            payload=pickle.dumps((args, kwargs)),
            world=self._worlds,
            deadline_s=deadline_s,
        )
        for link in self._links:
            link.send_bytes(pickle.dumps(request))

    def wait(
        self, timeout_s: float, ranks: Iterable[int] | None = None, grace_s: float | None = None
    ) -> list[RankOutcome]:
        """Outcomes of all ranks, once `ranks` (default: all) have one, or the time is over.

        With `grace_s`, a rank that raises or ends shortens what is left for the others to that.
        """
        wanted = set(range(self.world_size) if ranks is None else ranks)
        deadline = time.monotonic() + timeout_s
        while (missing := wanted - self._outcomes.keys()) and (left := deadline - time.monotonic()) > 0:
            for rank in self._answered(missing, left):
                self._outcomes[rank] = outcome = self._receive(rank)
                if grace_s is not None and outcome.state != "returned":
                    deadline = min(deadline, time.monotonic() + grace_s)
        return [self._outcomes.get(r, RankOutcome(rank=r, state="running")) for r in range(self.world_size)]

    @property
    def failures(self) -> dict[int, RankFailure]:
        """The exceptions of the present call, in the order in which they arrived."""
        return {rank: o.failure for rank, o in self._outcomes.items() if o.failure is not None}

    def stacks(self, ranks: Iterable[int]) -> dict[int, str]:
        """Python stacks of all threads of `ranks`, also of one that is stuck in native code."""
        before = {rank: self._stacks_size(rank) for rank in ranks}
        for rank in before:
            os.kill(self.pids[rank], STACKS_SIGNAL)
        deadline = time.monotonic() + _STACKS_DEADLINE_S
        return {rank: self._read_stacks(rank, size, deadline) for rank, size in before.items()}

    def close(self) -> list[int | None]:
        """Let idle ranks leave by themselves, kill those that do not; returns the exit codes."""
        for link in self._links:
            link.close()
        deadline = time.monotonic() + _END_DEADLINE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return self.kill()

    def kill(self) -> list[int | None]:
        """SIGKILL whatever still runs; returns the exit codes. May be called again."""
        for process in self._processes:
            if process.exitcode is None:
                process.kill()
        for process in self._processes:
            process.join(_END_DEADLINE_S)
        for link in self._links:
            link.close()
        self._folder.cleanup()
        atexit.unregister(self.kill)
        return [process.exitcode for process in self._processes]

    def _start(self, context: Any, rank: int, backend: str) -> None:
        ours, theirs = context.Pipe()
        seat = RankSeat(
            rank=rank,
            world_size=self.world_size,
            backend=backend,
            store_port=self._store.port,
            stacks_file=str(self._stacks_file(rank)),
        )
        process = context.Process(target=rank_main, args=(seat, theirs), name=f"rank{rank}")
        process.start()
        theirs.close()
        self._links.append(ours)
        self._processes.append(process)

    def _await_ready(self) -> None:
        deadline = time.monotonic() + START_DEADLINE_S
        for rank, link in enumerate(self._links):
            if not link.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"rank {rank} was not ready within {START_DEADLINE_S:g} s")
            link.recv_bytes()

    def _answered(self, ranks: set[int], timeout_s: float) -> list[int]:
        # The sentinel too: a rank's own children may keep its end of the link open after it is gone.
        waited: dict[Any, int] = {self._links[rank]: rank for rank in ranks}
        waited |= {self._processes[rank].sentinel: rank for rank in ranks}
        return sorted({waited[ready] for ready in connection.wait(list(waited), timeout_s)})

    def _receive(self, rank: int) -> RankOutcome:
        link = self._links[rank]
        try:
            reply = pickle.loads(link.recv_bytes()) if link.poll(0) else None
        except (EOFError, ConnectionResetError):
            reply = None
        if reply is None:
            self._processes[rank].join(_END_DEADLINE_S)
            return RankOutcome(rank=rank, state="exited", exitcode=self._processes[rank].exitcode)
        if reply.failure is not None:
            return RankOutcome(rank=rank, state="raised", failure=reply.failure)
        return RankOutcome(rank=rank, state="returned", value=reply.value)

    def _stacks_file(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}.stacks"

    def _stacks_size(self, rank: int) -> int:
        return self._stacks_file(rank).stat().st_size

    def _read_stacks(self, rank: int, before: int, deadline: float) -> str:
        """The text that the signal's handler appends, complete once it has stopped growing."""
        last = before
        while time.monotonic() < deadline:
            time.sleep(0.05)
            size = self._stacks_size(rank)
            if size > before and size == last:
                break
            last = size
        text = self._stacks_file(rank).read_text()[before:].rstrip()
        return text or f"none: the process does not answer (state: {psutil.Process(self.pids[rank]).status()})"


class RankPool:
    """Ranks that are started by the first `run` and used again by the next ones.

    They are used again only when nothing can be stuck or half undone in them: after a call in which every rank
    returned, or every rank raised. In any other case they are killed, and the next `run` starts fresh ones.
    """

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size = world_size
        self._backend = backend
        self._ranks: Ranks | None = None

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank; empty while no ranks are running."""
        return [] if self._ranks is None else self._ranks.pids

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """`fn(*args, **kwargs)` on every rank, within `timeout` seconds; returns the values by rank.

        Raises RankError if a rank raised or ended, RankTimeout if one had not answered in time.
        """
        FunctionRef.of(fn)
        if self._ranks is None:
            self._ranks = Ranks(self.world_size, self._backend)
        ranks = self._ranks
        reusable = False
        try:
            ranks.call(fn, args, kwargs, timeout)
            outcomes = ranks.wait(timeout, grace_s=GRACE_S)
            states = {outcome.state for outcome in outcomes}
            reusable = states in ({"returned"}, {"raised"})
            if states == {"returned"}:
                return [outcome.value for outcome in outcomes]
            name = f"{fn.__module__}.{fn.__qualname__}"
            if states <= {"returned", "running"}:
                raise RankTimeout(name, outcomes, ranks.stacks(_running(outcomes)), timeout)
            raise RankError(name, outcomes, ranks.failures)
        finally:
            if not reusable:
                ranks.kill()
                self._ranks = None

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


@contextmanager
def own_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any
) -> Iterator[Ranks]:
    """Ranks that run `fn` and nothing else. The test may signal `pids`, `wait` for some of them, take `stacks`.

    They are killed at the end of the block. `timeout` bounds the collectives inside; `wait` has a time of its own.
    """
    ranks = Ranks(world_size)
    try:
        ranks.call(fn, args, kwargs, timeout)
        yield ranks
    finally:
        ranks.kill()


def one_shot_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any
) -> list[RankOutcome]:
    """`fn` on ranks of its own, which may end or be killed; outcomes by rank, `running` where the time was over."""
    with own_ranks(world_size, fn, *args, timeout=timeout, **kwargs) as ranks:
        return ranks.wait(timeout)


def _running(outcomes: list[RankOutcome]) -> list[int]:
    return [outcome.rank for outcome in outcomes if outcome.state == "running"]
