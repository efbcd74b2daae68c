"""The faults of the demo that stop a job: a small training loop with its observers, on ranks that get away in the end.

What a job manager would do is done by the hook: it wakes whatever process a report says is stopped. Collectives that
no longer match end by the timeout of a process group that each scenario has for itself.
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

import scout_core
from scout_core.demo.events import CLEAN_STEPS, Finished, Progress, Setup, Tell
from scout_core.demo.job import BATCH, CONTEXT, Job
from scout_core.demo.judge import Expected, Observed
from scout_core.manager_api import OrchestrationHooks
from scout_core.report.fault_report import FaultKind, SCOUTFaultReport

THRESHOLD_S = 2.0
GIVE_UP_S = 6.0
"""Timeout of a scenario's own process group: what frees ranks whose collectives do not match."""
_REPORT_S = 15.0
_STOPPED = "T"


@dataclass(frozen=True, kw_only=True)
class Stall:
    """One fault that stops the job. `ranks` get it, in the first step after `CLEAN_STEPS`."""

    name: str
    title: str
    where: str
    ranks: tuple[int, ...]
    expected: Expected


def build_stalls(ranks: int) -> tuple[Stall, ...]:
    """The scenarios for a job of `ranks` ranks."""
    last = ranks - 1
    return (
        Stall(
            name="stopped-rank",
            title="stopped process",
            where="SIGSTOP to the rank's process, between backward and the reduction of the loss",
            ranks=(2,),
            expected=_stall(FaultKind.PROCESS_STALL, 2, "is stopped (state T)"),
        ),
        Stall(
            name="stopped-worker",
            title="stopped loader worker",
            where="SIGSTOP to the worker process of the rank's DataLoader",
            ranks=(1,),
            expected=_stall(FaultKind.DATALOADER_STALL, 1, "is stopped", "train"),
        ),
        Stall(
            name="slow-checkpoint",
            title="slow checkpoint write",
            where=f"a write that takes {2 * THRESHOLD_S:.0f} s",
            ranks=(0,),
            expected=_stall(FaultKind.CHECKPOINT_IO_STALL, 0, "checkpoint write", "periodic"),
        ),
        Stall(
            name="skipped-collective",
            title="skipped collective",
            where="one reduction of the loss left out",
            ranks=(last,),
            expected=_stall(FaultKind.COLLECTIVE_DESYNC, last, "all_reduce(float32[4], SUM)"),
        ),
        Stall(
            name="other-shape",
            title="collective of another shape",
            where="6 numbers reduced where the others reduce 4",
            ranks=(1,),
            expected=_stall(FaultKind.COLLECTIVE_DESYNC, 1, "all_reduce(float32[6], SUM)"),
        ),
    )


def _stall(kind: FaultKind, rank: int, says: str, *surfaces: str) -> Expected:
    return Expected(kind=kind, ranks=(rank,), status="Attributed", surfaces=surfaces, trusted=None, says=says)


class Batches(IterableDataset[tuple[list[int], int]]):
    """Endless batches: where in the text their sequences start, and the process that drew them."""

    def __init__(self, text_bytes: int, seed: int) -> None:
        self._text_bytes, self._seed = text_bytes, seed

    def __iter__(self) -> Iterator[tuple[list[int], int]]:
        draw = torch.Generator().manual_seed(self._seed)
        while True:
            yield torch.randint(0, self._text_bytes - CONTEXT, (BATCH,), generator=draw).tolist(), os.getpid()


class StallJob:
    """The job on one rank with a SCOUT, a process group and a loader. Every rank constructs it and runs each stall.

    What did not match stays in the rings of the observers, and a group that timed out is of no more use: after such a
    scenario there is another SCOUT and another group.
    """

    def __init__(self, job: Job, setup: Setup, tell: Tell, log: list[str]) -> None:
        self._job, self._setup, self._tell, self._log = job, setup, tell, log
        self._folder = tempfile.TemporaryDirectory(prefix="scout-demo-")  # goes with the process
        self._pids: list[int] = [0] * setup.ranks
        dist.all_gather_object(self._pids, os.getpid())
        self._loss = 0.0
        self._open = False

    def run(self, stall: Stall) -> None:
        """Clean steps, the fault, and its report; all ranks come out together."""
        self._log.clear()
        if not self._open:
            self._attach()
        for _ in range(CLEAN_STEPS):
            self._step(stall, faulty=False)
        self._early = len(self._scout.reports)
        watch = _Stopwatch(lambda: len(self._scout.reports) > self._early)
        with suppress(RuntimeError):  # the group's timeout, where collectives did not match
            self._step(stall, faulty=True)
        seconds = watch.result()
        dist.barrier()
        self._finish(stall, seconds)

    def close(self) -> None:
        """End SCOUT and the loader's worker. A second call does nothing."""
        if self._open:
            self._open = False
            del self._batches
            self._scout.close()

    def _attach(self) -> None:
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=GIVE_UP_S))
        self._scout = scout_core.attach(
            self._job.ddp,
            self._job.optimizer,
            check_interval=0,
            run_dir=self._setup.run_dir or Path(self._folder.name),
            hooks=OrchestrationHooks(report_fault=self._manage),
            stall_train_s=THRESHOLD_S,
            dataloader_stall_s=THRESHOLD_S,
            checkpoint_stall_s=THRESHOLD_S,
        )
        batches = Batches(self._job.text_bytes, seed=self._job.rank)
        loader = DataLoader(batches, batch_size=None, num_workers=1, prefetch_factor=1)
        self._batches = iter(self._scout.instrument_dataloader(loader, name="train"))
        self._seen = 0
        self._open = True

    def _step(self, stall: Stall, *, faulty: bool) -> None:
        """A batch, an optimizer step, the mean loss, and on the first rank a checkpoint, as people write it."""
        fault = stall.name if faulty and self._job.rank in stall.ranks else ""
        starts, worker = next(self._batches)
        if fault == "stopped-worker":
            os.kill(worker, signal.SIGSTOP)
            for _ in range(3):  # past the batches that it had drawn before
                starts, worker = next(self._batches)
        self._loss = self._job.step(starts)
        if fault == "stopped-rank":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault != "skipped-collective":
            dist.all_reduce(torch.full((6 if fault == "other-shape" else 4,), self._loss), group=self._group)
        if self._job.rank == 0:
            self._save(slow=fault == "slow-checkpoint")
        dist.barrier(group=self._group)
        step = self._scout.step_count
        self._tell(Progress(scenario=stall.name, step=step, loss=self._loss, injected=faulty, check=None))

    def _save(self, *, slow: bool) -> None:
        with self._scout.checkpoint_io("write", name="periodic"):
            torch.save(self._job.model.state_dict(), Path(self._folder.name, "checkpoint.pt"))
            if slow:
                time.sleep(2 * THRESHOLD_S)

    def _manage(self, report: SCOUTFaultReport) -> None:
        """The manager's part, on a rank that is not blocked: wake the process that the report says is stopped."""
        workers = report.evidence.get("workers", {})
        stopped = [int(pid) for pid, state in workers.items() if state == _STOPPED]
        if report.kind is FaultKind.PROCESS_STALL:
            stopped += [self._pids[rank] for rank in report.ranks]
        for pid in stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _finish(self, stall: Stall, seconds: float | None) -> None:
        """What was reported since the last scenario goes to the parent; consequences of a first report are none."""
        told = tuple(self._scout.reports)
        early, later = told[self._seen : self._early], told[self._early :]
        first_hand = tuple(report for report in later if "secondary_to" not in report.evidence)
        observed = Observed(checks=None, active=self._scout.active, early=early, reports=first_hand, seconds=seconds)
        self._seen = len(told)
        self._tell(
            Finished(
                scenario=stall.name,
                observed=observed,
                loss=self._loss,
                injected_after=CLEAN_STEPS,
                log=tuple(self._log),
            )
        )
        if stall.expected.kind is FaultKind.COLLECTIVE_DESYNC:
            self.close()


class _Stopwatch:
    """Seconds until something is true, taken in a thread: the main one may be stuck."""

    def __init__(self, true: Callable[[], bool]) -> None:
        self._true, self._seconds = true, math.inf
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def result(self) -> float | None:
        """The seconds, once they are known; None if it did not become true within `_REPORT_S`."""
        self._thread.join()
        return self._seconds if self._seconds < _REPORT_S else None

    def _run(self) -> None:
        started = time.monotonic()
        while (passed := time.monotonic() - started) < _REPORT_S:
            if self._true():
                self._seconds = passed
                return
            time.sleep(0.02)
