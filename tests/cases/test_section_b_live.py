"""Section B of the case list in live steps: whose own time per step grows, and what explains it.

Real ranks train with `DistributedDataParallel`, where a slow rank makes the steps of all equally long; a check every
ten steps judges what each spent itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import scout_core
from tests.distributed.models import LENGTH, WORDS, Case, Job, LanguageModel, ddp, replicated_by_hand
from tests.distributed.pool import RankPool

pytestmark = pytest.mark.distributed
STEPS, ONSET = 120, 85
COST_S = 0.008


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def loader(kind: str, rank: int) -> Iterator[torch.Tensor]:
    """Batches of token ids, and the time that they take to come."""
    generator = torch.Generator().manual_seed(rank)
    for number in range(STEPS):
        if kind == "slow loader" and rank == 1 and number >= ONSET:
            time.sleep(2 * COST_S)
        if kind == "all loaders" and number % 4 == 0:
            time.sleep(10 * COST_S)
        rows = 12 if kind == "longest samples" and rank == 3 else 3
        yield torch.randint(1, WORDS, (rows, LENGTH + 1), generator=generator)


def live_steps(kind: str, by_hand: bool = False) -> dict[str, Any]:
    """A job whose every step costs some milliseconds per sample, and what becomes of its pace on one rank."""
    rank = dist.get_rank()
    job = Job(Case(model=LanguageModel, wrap=replicated_by_hand if by_hand else ddp))
    options: dict[str, Any] = {"check_interval": 10, "straggler_absolute_ms": 1e4, "oob_enabled": True}
    options["live_observation_ms"] = 0.0  # each step by itself, for a short test
    with scout_core.attach(job.wrapped, job.optimizer, **options) as scout:
        for number, batch in enumerate(scout.instrument_dataloader(loader(kind, rank))):
            job.optimizer.zero_grad()
            logits = job.wrapped(batch[:, :-1])
            spin(COST_S * len(batch) / 3)
            late = number >= ONSET
            if rank == 2 and ((kind == "device" and late) or (kind == "burst" and ONSET <= number < ONSET + 6)):
                spin(0.75 * COST_S)
            F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
            if by_hand:
                for parameter in job.model.parameters():
                    if parameter.grad is not None:
                        dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
            job.optimizer.step()
            if kind == "logging" and rank == 0:
                spin(COST_S)
        result = scout.last_result
        assert result is not None and result.live is not None
        return {
            "reports": [
                (r.kind.value, r.ranks, r.severity, r.recommended_action, r.first_seen_step, r.incident_id)
                for r in scout.reports
                if r.kind.value != "host_contention"  # four ranks on a small host: true, and not what is asked here
            ],
            "own_ms": result.live.own_ms,
        }


@pytest.mark.parametrize("by_hand", [False, True], ids=["ddp", "by hand"])
def test_b01_a_rank_that_becomes_slower_is_named_with_its_onset_and_watched(ranks4: RankPool, by_hand: bool) -> None:
    told = ranks4.run(live_steps, "device", by_hand, timeout=120)
    assert all(one["reports"] == told[0]["reports"] for one in told)
    reports = told[0]["reports"]
    assert {report[:4] for report in reports} == {("compute_straggler", (2,), "warning", "observe")}
    assert len({incident for *_, incident in reports}) == 1
    assert ONSET - 12 <= reports[0][4] <= ONSET + 12
    own = told[0]["own_ms"]
    assert own[2] > 1.2 * max(own[0], own[1], own[3])  # the others waited for it, which is no time of theirs


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("burst", set()),
        ("logging", set()),
        ("slow loader", {("dataloader_stall", (1,), "warning", "observe")}),
        ("longest samples", {("data_imbalance", (3,), "warning", "observe")}),
        ("all loaders", {("dataloader_stall", (), "info", "continue")}),
    ],
    ids=["burst", "b14 logging", "b08 slow loader", "b07 longest samples", "b11 all loaders"],
)
def test_what_is_no_fault_of_a_device_is_told_apart(ranks4: RankPool, kind: str, expected: set[Any]) -> None:
    told = ranks4.run(live_steps, kind, timeout=120)
    assert {report[:4] for report in told[0]["reports"]} == expected
