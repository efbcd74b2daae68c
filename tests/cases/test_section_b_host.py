"""Section B: what on its host keeps a rank from its work: storage, the collector of garbage, cores that are taken."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import scout_core
from tests.cases.test_section_b_live import spin
from tests.distributed.models import LENGTH, WORDS, Case, Job, LanguageModel, ddp
from tests.distributed.pool import RankPool
from tests.oob.jobs import TinyJob, first_report, running, say

pytestmark = pytest.mark.distributed


def b10_slow_storage(run_dir: str) -> None:
    job = TinyJob(run_dir)

    def batches() -> Any:
        for number in range(6):
            if job.rank == 1 and number == 3:
                (Path(run_dir) / "fifo").read_bytes()
            yield number

    for _ in job.scout.instrument_dataloader(batches(), name="train"):
        job.step()
    say(run_dir, f"done{job.rank}")
    job.scout.close()


def test_b10_a_read_of_slow_storage_is_the_loaders_stall_and_training_goes_on_after_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with running(b10_slow_storage, tmp_path) as ranks:
        report = first_report(tmp_path)
        (tmp_path / "fifo").write_bytes(b"late")
        ranks.wait(100)
    assert (report["kind"], report["ranks"], report["surface"]) == ("dataloader_stall", [1], "train")
    assert report["recommended_action"] in ("continue", "restart") and report["exonerating"]
    assert len(list(tmp_path.glob("done*"))) == 4


class Node:
    def __init__(self, other: Any) -> None:
        self.other = other


def collecting(every: int) -> list[Any]:
    """Rank 2 holds many objects and collects once, or again and again; 0: once."""
    rank = dist.get_rank()
    job = Job(Case(model=LanguageModel, wrap=ddp))
    with scout_core.attach(job.wrapped, job.optimizer, check_interval=10, straggler_absolute_ms=1e4) as scout:
        held = [Node(None) for _ in range(1_000_000)] if rank == 2 else []
        for number in range(40):
            job.step()
            if rank == 2 and (number % every == 5 if every else number == 5):
                gc.collect()
        del held
        return [
            (r.kind.value, r.ranks, r.severity, r.recommended_action, r.evidence.get("cause")) for r in scout.reports
        ]


def test_b05_collections_that_come_again_and_again_are_told_and_one_is_not(ranks4: RankPool) -> None:
    assert ranks4.run(collecting, 0, timeout=100) == [[], [], [], []]
    again = ranks4.run(collecting, 10, timeout=100)
    assert again[2] == [("process_stall", (2,), "warning", "observe", "gc")]
    assert [again[rank] for rank in (0, 1, 3)] == [[], [], []]


def crowded() -> set[Any]:
    """All ranks on one core: each waits for it most of the time."""
    job = Job(Case(model=LanguageModel, wrap=ddp))
    options: dict[str, Any] = {"live_observation_ms": 0.0, "straggler_absolute_ms": 1e4, "oob_enabled": True}
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        with scout_core.attach(job.wrapped, job.optimizer, check_interval=10, **options) as scout:
            for _ in range(40):
                job.optimizer.zero_grad()
                logits = job.wrapped(torch.randint(1, WORDS, (2, LENGTH)))
                spin(0.008)
                logits.mean().backward()
                job.optimizer.step()
            return {(r.kind.value, r.ranks, r.severity, r.recommended_action) for r in scout.reports}
    finally:
        os.sched_setaffinity(0, cores)


def test_b09_hosts_with_more_work_than_cores_are_told_and_no_rank_is_blamed(ranks4: RankPool) -> None:
    for told in ranks4.run(crowded, timeout=120):
        assert told == {("host_contention", (), "info", "continue")}
