"""How a job of the launches ends: by itself, by a signal, or by one of the faults that section A of the cases names."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils.data import DataLoader, Dataset

from tests.oob.jobs import TinyJob, idle, reduce, say

FAULT_AT = "fault"
"""Mark of a launch with the time at which its fault began."""

QUIET = ("clean", "closed", "exit 3", "kill all", "terminate", "early kill")
"""Ends with nothing to report, or nobody left to do so in time."""

DESYNC, STALL, EXIT = "collective_desync", "process_stall", "process_exit"
LASTING = {
    "stop": STALL,
    "spin": STALL,
    "idle": STALL,
    "handler": STALL,
    "hang": "collective_hang",
    "skip": DESYNC,
    "extra": DESYNC,
    "order": DESYNC,
    "op": DESYNC,
    "reduction": DESYNC,
    "shape": DESYNC,
    "dtype": DESYNC,
    "root": DESYNC,
    "group": DESYNC,
    "loader stop": "dataloader_stall",
    "read": "checkpoint_io_stall",
    "write": "checkpoint_io_stall",
}
"""Faults after which the job stands still until somebody ends it, and what is to be said."""
ENDING = {"kill one": EXIT, "exit one": EXIT, "loader death": "dataloader_stall"}
"""Faults that end one rank, and with it the job."""
FAULTS = {**LASTING, **ENDING}
ENDS = (*QUIET, *FAULTS)
BY_KILL = ("kill all", "early kill", *LASTING)
"""Ends whose exit codes are the killer's."""
NOBODY = ("hang", "group")
"""Faults for which no rank can be blamed. Of a pair, either took the wrong group or the other left the call out."""
THREE_RANKS = tuple(name for name in FAULTS if name not in ENDING)


def come_to_end(end: str, odd: int, run_dir: str, job: TinyJob) -> None:
    """Come to the end from inside, or go on until it comes from outside. What follows a lasting fault is a barrier.

    `odd` is the rank that the end is about.
    """
    culprit = job.rank == odd
    if end == "closed":
        job.scout.close()
    if end == "exit 3":
        sys.exit(3)
    if end in ("clean", "closed"):
        return
    if end == "group":
        pair = dist.new_group(sorted((odd, (odd + 1) % dist.get_world_size())))
        dist.barrier()
    if end in FAULTS and end != "kill one":
        if culprit:
            say(run_dir, FAULT_AT)
        # a rank may see for itself that the sizes differ, and is to stand still even so
        with suppress(RuntimeError) if end in LASTING else nullcontext():
            if end == "group":
                dist.all_reduce(torch.ones(4), group=pair if culprit else None)
            else:
                (_OF_THE_CULPRIT[end] if culprit else _OF_THE_OTHERS.get(end, _as_ever))(job)
            if end in LASTING:
                dist.barrier()
        if end in LASTING:
            idle()
    while True:
        job.step()


class _WorkerIds(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.tensor(os.getpid())


def _as_ever(job: TinyJob) -> None:
    reduce()


def _spin(job: TinyJob) -> None:
    while True:
        pass


def _linger(job: TinyJob) -> None:
    try:
        raise ValueError("a bad sample")
    except ValueError:
        idle()


def _several(*ops: Any) -> Callable[[TinyJob], None]:
    def issue(job: TinyJob) -> None:
        for op in ops:
            dist.all_reduce(torch.ones(4), op=op)

    return issue


def _lost_in_the_network(job: TinyJob) -> None:
    """Every rank comes to the call, and for none does it end: the process group's part of it never returns."""
    c10d.ProcessGroup.allreduce = lambda *_: idle()  # type: ignore[method-assign, assignment]
    reduce()


def _signal_to_worker(number: int) -> Callable[[TinyJob], None]:
    def load(job: TinyJob) -> None:
        # forked as in a script: a rank of the pool would start a fork server of its own, which outlives it
        workers = DataLoader(_WorkerIds(), batch_size=1, num_workers=1, multiprocessing_context="fork")
        for count, ids in enumerate(job.scout.instrument_dataloader(workers, name="train")):
            if count == 3:  # what is fetched in advance comes first
                say(str(job.scout.config.run_dir), FAULT_AT)
                os.kill(int(ids[0]), number)

    return load


def _file(direction: str) -> Callable[[TinyJob], None]:
    def stall(job: TinyJob) -> None:
        with job.scout.checkpoint_io(direction, name="periodic"):  # type: ignore[arg-type]
            idle()

    return stall


_SUM, _MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX
_OF_THE_CULPRIT: dict[str, Callable[[TinyJob], Any]] = {
    "stop": lambda job: os.kill(os.getpid(), signal.SIGSTOP),
    "spin": _spin,
    "idle": lambda job: idle(),
    "handler": _linger,
    "hang": _lost_in_the_network,
    "skip": lambda job: None,
    "extra": lambda job: (reduce(), reduce()),
    "order": _several(_MAX, _SUM),
    "op": lambda job: dist.broadcast(torch.ones(4), src=0),
    "reduction": _several(_MAX),
    "shape": lambda job: reduce(6),
    "dtype": lambda job: reduce(4, torch.int32),  # as many bytes: Gloo aborts where they differ
    "root": lambda job: dist.broadcast(torch.ones(4), src=1),
    "loader stop": _signal_to_worker(signal.SIGSTOP),
    "loader death": _signal_to_worker(signal.SIGKILL),
    "exit one": lambda job: os._exit(1),
    "read": _file("read"),
    "write": _file("write"),
}
_OF_THE_OTHERS: dict[str, Callable[[TinyJob], Any]] = {
    "hang": _lost_in_the_network,
    "order": _several(_SUM, _MAX),
    "root": lambda job: dist.broadcast(torch.ones(4), src=0),
}


def fault_time(run_dir: str) -> float | None:
    """When the fault of a launch began, by the clock of this host; None when it did not note it."""
    path = Path(run_dir, FAULT_AT)
    return float(path.read_text()) if path.exists() else None
