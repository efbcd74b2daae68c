"""Functions that pool ranks run: the job of `job.py`, with checkpoints and ways to break them."""

from __future__ import annotations

import contextlib
import resource
import socket
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

import scout_core
from scout_core.manager_api import OrchestrationHooks
from scout_core.replay.local_tensors import local_part
from scout_core.trust import trust as trust_module
from scout_core.trust.durable import (
    CheckpointContext,
    DistributedCheckpointCallbacks,
    DurableCallbacks,
    DurableCheckpointConfig,
    TorchSaveCallbacks,
)
from tests.trust.job import Sampler, build, misbehave, settle, train_step
from tests.trust.late import seen_late

_FILE_LIMIT = resource.getrlimit(resource.RLIMIT_FSIZE)


class Breaking(TorchSaveCallbacks):
    """Saves as told wrong on rank 2 at step 4; counts what it is asked."""

    def __init__(self, how: str, folder: Path) -> None:
        self.how = how
        self.folder = folder
        self.calls: list[tuple[str, int]] = []

    def save_candidate(self, context: CheckpointContext, state: Any) -> Sequence[Path]:
        self.calls.append(("save", context.step))
        written = super().save_candidate(context, state)
        if context.rank != 2 or context.step != 4:
            return written
        path = written[0]
        if self.how == "sibling":
            other = self.folder / "elsewhere" / path.name
            other.parent.mkdir(parents=True, exist_ok=True)
            path.rename(other)
            return [other]
        if self.how == "empty":
            path.write_bytes(b"")
        elif self.how == "tmp":
            path.rename(path.with_suffix(".tmp"))
        elif self.how == "raise":
            raise FileExistsError(17, "File exists", str(path))
        elif self.how == "late":
            path.rename(path.with_suffix(".hidden"))
            path.write_bytes(path.with_suffix(".hidden").read_bytes())
        return written

    def commit_candidate(self, context: CheckpointContext) -> None:
        self.calls.append(("commit", context.step))
        if self.how == "collective":
            dist.barrier()

    def quarantine_candidate(self, context: CheckpointContext) -> None:
        self.calls.append(("quarantine", context.step))


def train(
    run_dir: Path,
    steps: int,
    *,
    fault: str = "none",
    at: int = -1,
    callbacks: DurableCallbacks | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Train to `steps` from wherever the run stands; what came of it, as plain values."""
    rank = dist.get_rank()
    model, ddp, optimizer = build(rank)
    sampler = Sampler()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    durable = None
    if callbacks is not None:
        durable = DurableCheckpointConfig(callbacks=callbacks, folder=run_dir / "durable", visibility_s=2.0)
    delivered: list[Any] = []
    hooks = OrchestrationHooks(report_fault=delivered.append, report_recovery=delivered.append)
    settings = {"check_interval": 2, "gemini": True, "flush_interval": 1, **more}
    with scout_core.attach(
        ddp,
        optimizer,
        run_dir=run_dir,
        hooks=hooks,
        stateful={"sampler": sampler, "scheduler": scheduler},
        durable=durable,
        **settings,
    ) as scout:
        start = scout.step_count
        while scout.step_count < steps and scout.active:
            if scout.step_count == at and fault == "hardware":
                if rank == 2:
                    scout._trust.hardware_fault(at, (2,), ("a host",), taints=True)
            elif scout.step_count == at and fault == "full":
                if rank == 2:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (256, _FILE_LIMIT[1]))
            elif scout.step_count == at:
                misbehave(fault, rank, model)
            train_step(ddp, optimizer, sampler, scheduler)
            settle(scout)
        decision, active = scout.last_recovery_decision, scout.active
        resource.setrlimit(resource.RLIMIT_FSIZE, _FILE_LIMIT)
    return {
        "start": start,
        "weights": [local_part(p).clone() for p in (*model.state_dict().values(), torch.get_rng_state())]
        + [sampler.position],
        "decision": None if decision is None else decision.model_dump(mode="json"),
        "reports": [(r.kind.value, list(r.ranks), r.message) for r in scout.reports],
        "delivered": [value.type for value in delivered],
        "active": active,
        "survivors": [copy.step for copies in trust_module._SURVIVORS.values() for _, copy in copies],
        "calls": getattr(callbacks, "calls", []),
    }


def fail_and_ask(run_dir: Path, steps: int, how: str, kind: str, accessible: bool) -> dict[str, Any]:
    """Train to `steps` under the dynamic rule, let something happen, and ask what to go back to.

    An odd interval of cycles: hidden layers take turns, so a cycle is two checks, four steps.
    """
    rank = dist.get_rank()
    _, ddp, optimizer = build(rank)
    sampler = Sampler()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    short = dist.new_group(timeout=timedelta(seconds=1))
    delivered: list[Any] = []
    hooks = OrchestrationHooks(report_fault=delivered.append, report_recovery=delivered.append)
    with scout_core.attach(
        ddp,
        optimizer,
        run_dir=run_dir,
        hooks=hooks,
        stateful={"sampler": sampler, "scheduler": scheduler},
        durable=DurableCheckpointConfig(callbacks=TorchSaveCallbacks(), folder=run_dir / "durable"),
        check_interval=2,
        gemini=True,
        certification="dynamic",
        readiness_timeout_s=3 if how == "breaks" else 60,
    ) as scout:
        while scout.step_count < steps:
            train_step(ddp, optimizer, sampler, scheduler)
            settle(scout)
        happen(how, rank, scout, ddp.module, short)
        decision = None
        if accessible or rank == 0:  # nobody else needs to come
            decision = scout.prepare_recovery(kind, all_ranks_accessible=accessible).model_dump(mode="json")
    return {"decision": decision, "delivered": [value.type for value in delivered]}


def happen(how: str, rank: int, scout: Any, model: Any, short: Any) -> None:
    if how == "hang" and rank != 2:
        with contextlib.suppress(RuntimeError):  # rank 2 never comes
            dist.all_reduce(torch.ones(1), group=short)
    elif how == "corrupt" and rank == 2:
        misbehave("sdc", rank, model)
    elif how == "nan":
        misbehave("nan", rank, model)
    elif how == "unable" and rank == 1:
        scout._stop_checks()
    elif how == "apart" and rank == 3:
        scout.step_count += 1
    elif how == "breaks" and rank == 1:
        scout._runner.run = lambda plan: 1 / 0


def train_on_hosts(run_dir: Path, steps: int, hosts: Sequence[str], **more: Any) -> dict[str, Any]:
    """`train` where each rank lives on the host of this name, with a disk of the host's own."""
    host = hosts[dist.get_rank()]
    with patch.object(socket, "gethostname", lambda: host):
        return train(run_dir, steps, gemini_dir=run_dir / "disks" / host, **more)


def lose_host(hosts: Sequence[str], lost: str) -> None:
    """The processes on a host are gone with their memory."""
    if hosts[dist.get_rank()] == lost:
        forget_memory()


def ask_on_hosts(run_dir: Path, steps: int, hosts: Sequence[str], excluded: Sequence[str], **more: Any) -> Any:
    """What a rank decides without asking the others: when it cannot reach somebody, and when its own GPU dies."""
    rank = dist.get_rank()
    with patch.object(socket, "gethostname", lambda: hosts[rank]):
        _, ddp, optimizer = build(rank)
        sampler = Sampler()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        settings = {"check_interval": 2, "gemini": True, "gemini_dir": run_dir / "disks" / hosts[rank], **more}
        with scout_core.attach(ddp, optimizer, run_dir=run_dir, **settings) as scout:
            while scout.step_count < steps:
                train_step(ddp, optimizer, sampler, scheduler)
                settle(scout)
            lost = scout.prepare_recovery("inaccessible", all_ranks_accessible=False)
            dying = scout._trust.hardware_fault(scout.step_count, (rank,), tuple(excluded), taints=False)
    forget_memory()
    return [(one.mode, one.source, one.step) for one in (lost, dying)]


def train_beside_own_callback(run_dir: Path, steps: int, order: str) -> dict[str, Any]:
    """The job saves by itself at each step, in a hook before SCOUT's, after it, or before two of them."""
    rank = dist.get_rank()
    model, ddp, optimizer = build(rank)
    sampler = Sampler()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    own: dict[int, list[torch.Tensor]] = {}
    watching: list[Any] = []

    def save(*_: Any) -> None:
        own[len(own) + 1] = [p.detach().clone() for p in model.parameters()]

    if order != "after":
        optimizer.register_step_post_hook(save)
    callbacks = Breaking("fine", run_dir)
    for name in ("run", "again") if order == "twice" else ("run",):
        durable = DurableCheckpointConfig(callbacks=callbacks, folder=run_dir / name / "durable")
        watching.append(
            scout_core.attach(
                ddp,
                optimizer,
                run_dir=run_dir / name,
                stateful={"sampler": sampler, "scheduler": scheduler},
                durable=durable,
                check_interval=2,
            )
        )
    if order == "after":
        optimizer.register_step_post_hook(save)
    while watching[0].step_count < steps:
        train_step(ddp, optimizer, sampler, scheduler)
    for scout in watching:
        scout.close()
    return {
        "own": own,
        "calls": callbacks.calls,
        "counts": [scout.step_count for scout in watching],
        "reports": [report.kind.value for scout in watching for report in scout.reports],
        "weights": [p.clone() for p in (*model.state_dict().values(), torch.get_rng_state())] + [sampler.position],
    }


def train_late(run_dir: Path, steps: int, viewer: int, writer: int, delay_s: float, **more: Any) -> dict[str, Any]:
    """`train_with` durable checkpoints whose `writer`'s files `viewer` sees late."""
    late = delay_s if dist.get_rank() == viewer else 0.0
    with seen_late(lambda name: "/durable/" in name and name.endswith(f"rank-{writer:05d}.pt"), late):
        return train_with(run_dir, steps, "save", gemini=False, **more)


def train_with(run_dir: Path, steps: int, how: str, **more: Any) -> dict[str, Any]:
    """`train` with durable checkpoints: `save`, `dcp`, or a way to break them."""
    kinds = {"save": TorchSaveCallbacks, "dcp": DistributedCheckpointCallbacks}
    callbacks = kinds[how]() if how in kinds else Breaking(how, run_dir)
    return train(run_dir, steps, callbacks=callbacks, **more)


def forget_memory() -> None:
    """As if the process were a new one."""
    trust_module._SURVIVORS.clear()


def resume_from(run_dir: Path, first: int, steps: int, *, where: str) -> dict[str, Any]:
    """Train to `first`, lose everything but `where` (own, peer, disk), come back, and train to `steps`."""
    rank = dist.get_rank()
    before = train(run_dir, first, flush_interval=1 if where == "disk" else 0)
    if where == "disk":
        forget_memory()
    elif where == "peer":
        for run, copies in trust_module._SURVIVORS.items():
            if rank == 1:  # this rank's own copy is gone; the peer's copy of it must do
                trust_module._SURVIVORS[run] = [c for c in copies if c[1].owner != 1]
    after = train(run_dir, steps, flush_interval=0)
    forget_memory()
    return {"before": before["start"], **after}
