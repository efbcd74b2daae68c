"""Live steps of jobs that are not all alike: whose time it is, and rows that fit one another all the same."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import scout_core
from tests.distributed.layouts import CASES
from tests.distributed.layouts import Job as LayoutJob
from tests.distributed.models import BATCH, LENGTH, WORDS, Case, Job, LanguageModel, ddp
from tests.distributed.pool import RankPool

pytestmark = pytest.mark.distributed
QUIET: dict[str, Any] = {"straggler_absolute_ms": 1e4, "oob_enabled": True, "live_observation_ms": 0.0}
SLOW_S = 0.1


def one_rank_is_another(how: str) -> tuple[bool, bool, list[str]]:
    """Rank 1 alone is compiled, or not watched out of band."""
    job = Job(Case(model=LanguageModel, wrap=ddp))
    options = {**QUIET, "oob_ready_timeout_s": 2.0}
    if dist.get_rank() == 1:
        options |= {"oob_enabled": False} if how == "unwatched" else {}
        if how == "compiled":
            job.model.compile(backend="eager")
    with scout_core.attach(job.wrapped, job.optimizer, check_interval=2, oob_failure="warn", **options) as scout:
        job.train(5)
        assert scout.last_result is not None
        return scout.active, scout.last_result.live is None, [r.kind.value for r in scout.reports]


@pytest.mark.parametrize("how", ["compiled", "unwatched"])
def test_ranks_of_which_one_cannot_be_timed_are_checked_and_none_is_timed(ranks4: RankPool, how: str) -> None:
    for active, untimed, reports in ranks4.run(one_rank_is_another, how, timeout=100):
        assert active and untimed and not {"sdc", "collective_desync"} & set(reports)


def beside_a_thread() -> list[Any]:
    """A thread gathers on a group of its own, as an asynchronous checkpoint does, and its first rank comes late."""
    rank, side = dist.get_rank(), dist.new_group(backend="gloo")
    job = Job(Case(model=LanguageModel, wrap=ddp))

    def save() -> None:
        time.sleep(1.0 if rank == 0 else 0.0)
        dist.gather_object(rank, [None] * 4 if rank == 0 else None, dst=0, group=side)

    with scout_core.attach(job.wrapped, job.optimizer, check_interval=3, **QUIET) as scout:
        job.train(3)
        thread = threading.Thread(target=save)
        thread.start()
        for _ in range(6):
            dist.all_reduce(torch.ones(1))  # the loss, for a log
            job.step()
        thread.join()
        return [(r.kind.value, r.ranks) for r in scout.reports]


def test_what_a_thread_does_beside_training_hides_no_call_of_it(ranks4: RankPool) -> None:
    assert ranks4.run(beside_a_thread, timeout=100) == [[]] * 4


def several_passes(passes: int) -> list[float]:
    job = Job(Case(model=LanguageModel, wrap=ddp))
    with scout_core.attach(job.wrapped, job.optimizer, check_interval=3, **QUIET) as scout:
        for _ in range(6):
            if dist.get_rank() == 0:
                time.sleep(2 * SLOW_S)
            job.optimizer.zero_grad()
            ids = torch.randint(1, WORDS, (BATCH, LENGTH))
            time.sleep(SLOW_S)
            sum(job.wrapped(ids).mean() for _ in range(passes)).backward()
            job.optimizer.step()
        assert scout.last_result is not None and scout.last_result.live is not None
        return [own or 0.0 for own in scout.last_result.live.own_ms]


def test_several_forward_passes_before_one_backward_wait_once(ranks4: RankPool) -> None:
    for first, *others in ranks4.run(several_passes, 3, timeout=100):
        assert first > 2.5e3 * SLOW_S and min(others) > 0.9e3 * SLOW_S and max(others) < first - 0.5e3 * SLOW_S


def a_slow_partner() -> list[float]:
    """Tensor-parallel pairs (0, 1) and (2, 3). Rank 0 is slow, and rank 1 waits for it."""
    job = LayoutJob(replace(CASES["tp"], dims=(("dp_replicate", 2), ("tp", 2))), seed=0)
    if dist.get_rank() == 0:
        job.before_step.append(lambda: time.sleep(3 * SLOW_S))
    options = {**QUIET, **job.case.options, "check_interval": 3}
    with scout_core.attach(job.model, job.optimizer, mesh=job.mesh, **options) as scout:
        job.train(6)
        assert scout.last_result is not None and scout.last_result.live is not None
        return [own or 0.0 for own in scout.last_result.live.own_ms]


def test_waiting_for_a_tensor_parallel_partner_is_no_time_of_its_own(ranks4: RankPool) -> None:
    """Each of the pair beside its peer of the other pair, where nobody waits for anybody."""
    told = ranks4.run(a_slow_partner, timeout=100)
    assert told[0] == told[2] and told[1] == told[3]
    (slow, usual), (waits, usual_there) = told[0], told[1]
    assert slow - usual > 1.5e3 * SLOW_S and waits - usual_there < 1e3 * SLOW_S
