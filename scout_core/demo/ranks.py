"""One rank of the demo: trains, injects, watches, and, on the first rank, tells the parent."""

from __future__ import annotations

import logging
import signal
from contextlib import closing
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import scout_core
from scout_core.demo.events import (
    CHECK_INTERVAL,
    CLEAN_STEPS,
    HEALTHY,
    HEALTHY_STEPS,
    PATIENCE_S,
    Finished,
    Progress,
    Ready,
    Setup,
    Tell,
)
from scout_core.demo.job import Job, Snapshot
from scout_core.demo.judge import Observed
from scout_core.demo.scenarios import Scenario, build
from scout_core.demo.stalls import StallJob, build_stalls


def run_rank(rank: int, setup: Setup, pipe: Connection) -> None:
    """Entry point of a rank's process. Events go to the parent from rank 0."""
    # dies at once with Ctrl-C or with the parent, also inside a collective
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    tell: Tell = pipe.send if rank == 0 else lambda event: None
    device = torch.device("cuda", rank % setup.gpus) if setup.gpus else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", setup.port, is_master=False)  # type: ignore[attr-defined]
    dist.init_process_group(
        setup.backend, store=store, rank=rank, world_size=setup.ranks, timeout=timedelta(seconds=PATIENCE_S)
    )
    try:
        _run_all(Job(rank, device), setup, tell)
    finally:
        dist.destroy_process_group()


def _run_all(job: Job, setup: Setup, tell: Tell) -> None:
    tell(Ready(parameters=sum(p.numel() for p in job.model.parameters()), text_bytes=job.text_bytes))
    log = _collect_log()
    _Run(job, setup, tell, log, None).healthy()
    state = job.snapshot()
    for number, scenario in enumerate(build(setup.ranks, CHECK_INTERVAL), start=1):
        if not setup.only or scenario.name in setup.only:
            job.seed(number)
            _Run(job, setup, tell, log, state).faulty(scenario)
    stalls = [stall for stall in build_stalls(setup.ranks) if not setup.only or stall.name in setup.only]
    if stalls:
        job.restore(state)
        with closing(StallJob(job, setup, tell, log)) as stalled:
            for stall in stalls:
                stalled.run(stall)


class _Run:
    """One scenario on one rank: its own SCOUT, from the same training state as every other."""

    def __init__(self, job: Job, setup: Setup, tell: Tell, log: list[str], state: Snapshot | None) -> None:
        if state is not None:
            job.restore(state)
        self._job, self._tell, self._log = job, tell, log
        self._log.clear()
        self._scout = scout_core.attach(
            job.ddp,
            job.optimizer,
            check_interval=CHECK_INTERVAL,
            readiness_timeout_s=PATIENCE_S,
            run_dir=setup.run_dir,
            oob_enabled=False,  # nothing hangs here, and four processes more for each fault would take the time
        )
        self._loss = 0.0
        self._checks = 0
        self._untrusted: list[str] = []

    def healthy(self) -> None:
        for _ in range(HEALTHY_STEPS):
            self._step(HEALTHY, injected=False)
        self._finish(HEALTHY, early=tuple(self._scout.reports))

    def faulty(self, scenario: Scenario) -> None:
        for _ in range(CLEAN_STEPS):
            self._step(scenario.name, injected=False)
        early = tuple(self._scout.reports)
        start = self._scout.step_count
        fault = scenario.inject(self._job) if self._job.rank in scenario.ranks else None
        found: dict[str, Any] = {}
        remaining = scenario.patience
        while remaining > 0 and self._scout.active:
            self._step(scenario.name, injected=True)
            remaining -= 1
            result = self._scout.last_result
            if not found and result is not None and len(self._scout.reports) > len(early):
                found = {"step": result.step, "steps": result.step - start, "trusted": result.trustworthy}
                remaining = scenario.linger
        if fault is not None:
            fault.remove()
        reports = tuple(self._scout.reports)[len(early) :]
        self._finish(scenario.name, early=early, reports=reports, injected_after=start, **found)

    def _step(self, name: str, *, injected: bool) -> None:
        """One step and, if one was due, its check. Every rank calls and sees the same result."""
        self._loss = self._job.step()
        result = self._scout.last_result
        checked = result is not None and result.step == self._scout.step_count
        if checked and result is not None:
            self._checks += 1
            if not injected and not result.trustworthy:
                why = "; ".join(reason.message for reason in result.inconclusive_reasons) or result.status.value
                self._untrusted.append(f"the check of healthy step {result.step} was not trusted: {why}")
        self._tell(
            Progress(
                scenario=name,
                step=self._scout.step_count,
                loss=self._loss,
                injected=injected,
                check=result.status.value if checked and result is not None else None,
            )
        )

    def _finish(self, name: str, *, injected_after: int | None = None, **seen: Any) -> None:
        observed = Observed(
            checks=self._checks, active=self._scout.active, untrusted_early=tuple(self._untrusted), **seen
        )
        self._scout.close()
        self._tell(
            Finished(
                scenario=name,
                observed=observed,
                loss=self._loss,
                injected_after=injected_after,
                log=tuple(self._log),
            )
        )


def _collect_log() -> list[str]:
    """Keep SCOUT's own log off the terminal, whose lines the parent writes; failures inside SCOUT are collected."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.exc_info:
                lines.append(self.format(record))

    logger = logging.getLogger("scout")
    logger.addHandler(Collect())
    logger.propagate = False
    return lines
