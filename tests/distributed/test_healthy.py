"""Healthy jobs raise no alarm, on an idle host or a crowded one; slow ranks are told apart from slow moments."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import scout_core
from scout_core import faults
from tests.distributed.models import LAYERS, LENGTH, WIDTH, Block, Case, Job, LanguageModel
from tests.distributed.pool import RankPool

SLOW = 1
CATALOG = {"embedding", "output", "optimizer", *(f"hidden:{layer}" for layer in range(LAYERS))}


class HeavyBlock(Block):
    """A layer that takes some milliseconds, so that thresholds in time mean something."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        self.up = nn.Linear(WIDTH, 1 << 14)
        self.down = nn.Linear(1 << 14, WIDTH)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(x) + self.drop(self.down(F.gelu(self.up(x))))


@contextmanager
def crowded(processes: int = 4) -> Iterator[None]:
    """A host on which so many other processes compute without a pause."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def train(checks: int, heavy: bool, **options: Any) -> dict[str, Any]:
    """A job that checks after every step: what its checks said, under the default thresholds."""
    job = Job(Case(model=(lambda: LanguageModel(HeavyBlock)) if heavy else LanguageModel))
    with scout_core.attach(job.wrapped, job.optimizer, check_interval=1, **options) as scout:
        statuses: Counter[str] = Counter()
        checked: set[str] = set()
        trusted = 0
        for _ in range(checks):
            job.step()
            statuses[scout.last_result.status.value] += 1
            trusted += scout.last_result.trustworthy
            checked |= set(scout.last_result.checked_recipe_ids)
        reports = [(r.kind.value, r.ranks, r.step, r.message) for r in scout.reports]
        return {"statuses": statuses, "trusted": trusted, "checked": checked, "reports": reports}


def assert_healthy(answers: list[dict[str, Any]], checks: int) -> None:
    for answer in answers:
        assert answer["reports"] == []
        assert answer["statuses"] == {"Agree": checks} and answer["trusted"] == checks
        assert answer["checked"] == CATALOG


def test_60_checks_of_a_healthy_job_raise_no_alarm(ranks4: RankPool) -> None:
    assert_healthy(ranks4.run(train, 60, False, timeout=60), 60)


def test_healthy_on_a_crowded_host(ranks4: RankPool) -> None:
    with crowded():
        assert_healthy(ranks4.run(train, 20, True, timeout=100), 20)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("heavy", [False, True], ids=["light", "heavy"])
@pytest.mark.parametrize("host", ["idle", "crowded"])
def test_1000_checks_of_a_healthy_job_raise_no_alarm(ranks4: RankPool, host: str, heavy: bool) -> None:
    checks = 300 if heavy else 700
    if host == "idle":
        assert_healthy(ranks4.run(train, checks, heavy, timeout=800), checks)
        return
    with crowded():
        assert_healthy(ranks4.run(train, checks, heavy, timeout=1700), checks)


class MaskedModel(LanguageModel):
    """Hands the mask to every layer as an argument."""

    def __init__(self) -> None:
        super().__init__(MaskedLayer)
        self.register_buffer("mask", torch.full((LENGTH, LENGTH), float("-inf")).triu(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.position
        for block in self.blocks:
            x = block(x, self.mask)
        return self.head(self.norm(x)) * self.temperature


class MaskedLayer(nn.Module):
    """Attention under an additive mask, which holds infinities on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]


def train_masked() -> dict[str, Any]:
    job = Job(Case(model=MaskedModel))
    with scout_core.attach(job.wrapped, job.optimizer, check_interval=1) as scout:
        job.train(6)
        return {"trusted": scout.last_result.trustworthy, "reports": [r.message for r in scout.reports]}


def test_infinities_in_a_mask_are_no_numeric_fault(ranks4: RankPool) -> None:
    for answer in ranks4.run(train_masked, timeout=30):
        assert answer == {"trusted": True, "reports": []}


def spin_in_replay(module: nn.Module, seconds: float, times: int) -> None:
    """Lengthen the next `times` replays of `module` on this rank; live steps keep their pace."""
    healthy: Callable[..., Any] = module.forward
    left = [times]

    def forward(*args: Any, **kwargs: Any) -> Any:
        if torch.are_deterministic_algorithms_enabled() and left[0] > 0:
            left[0] -= 1
            end = time.thread_time() + seconds
            while time.thread_time() < end:
                os.getpid()
        return healthy(*args, **kwargs)

    module.forward = forward  # type: ignore[method-assign]


def slow_job(kind: str, checks: int) -> dict[str, Any]:
    """Straggler verdicts of a job in which something is slow: one rank, all of them, or one moment of one rank."""
    job = Job(Case(model=lambda: LanguageModel(HeavyBlock)))
    with scout_core.attach(job.wrapped, job.optimizer, check_interval=1) as scout:
        job.train(LAYERS)
        usual_ms = max(scout.last_result.times_ms[f"hidden:{LAYERS - 1}"])
        extra_s = 2 * usual_ms / 1e3 + 5e-3
        slow_rank = dist.get_rank() == SLOW
        for block in job.model.blocks:
            if kind == "everywhere" or (kind == "one rank" and slow_rank):
                faults.slow_module(block, extra_s)
            elif kind == "one moment" and slow_rank:
                spin_in_replay(block, extra_s, times=1)
        ranks, statuses, trusted = [], set(), True
        for _ in range(checks):
            job.step()
            ranks.append(scout.last_result.straggler_ranks)
            statuses.add(scout.last_result.status.value)
            trusted = trusted and scout.last_result.trustworthy
        reports = [(r.kind.value, r.ranks, r.severity) for r in scout.reports]
        incidents = {r.incident_id for r in scout.reports}
        return {
            "ranks": ranks,
            "statuses": statuses,
            "trusted": trusted,
            "reports": reports,
            "incidents": len(incidents),
        }


def test_a_rank_whose_layers_are_three_times_slower_is_named(ranks4: RankPool) -> None:
    answers = ranks4.run(slow_job, "one rank", 8, timeout=60)
    assert all(answer == answers[0] for answer in answers)
    answer = answers[0]
    assert (SLOW,) in answer["ranks"][:4], "named within four checks"
    assert set(answer["ranks"]) <= {(), (SLOW,)} and answer["ranks"][-1] == (SLOW,)
    assert set(answer["reports"]) == {("compute_straggler", (SLOW,), "warning")}
    assert answer["incidents"] == 1
    assert answer["statuses"] == {"Agree"} and answer["trusted"], "slow is not wrong"


@pytest.mark.parametrize("kind", ["everywhere", "one moment"])
def test_all_slow_alike_or_one_slow_moment_names_nobody(ranks4: RankPool, kind: str) -> None:
    for answer in ranks4.run(slow_job, kind, 8, timeout=60):
        assert set(answer["ranks"]) == {()} and answer["reports"] == []
