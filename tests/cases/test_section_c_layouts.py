"""Case C08: a norm that every tensor-parallel group holds apart in the same way, as software does and no device."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import scout_core
from tests.distributed.layouts.job import LayoutCase
from tests.distributed.layouts.wiring import tensor_parallel
from tests.distributed.pool import RankPool

pytestmark = pytest.mark.distributed
PAIRS = LayoutCase(name="pairs", dims=(("dp_replicate", 2), ("tp", 2)), wire=tensor_parallel)


def clipped_on_even_ranks() -> dict[str, Any]:
    """Tensor-parallel pairs (0, 1) and (2, 3); from step 3 on even ranks alone clip the last norm's gradient."""
    job = PAIRS.build(seed=5)

    def clip(*_: Any) -> None:
        if job.steps >= 2 and dist.get_rank() % 2 == 0:
            for parameter in job.plain.norm.parameters():
                parameter.grad.mul_(1e-3)

    job.optimizer.register_step_pre_hook(clip)
    with scout_core.attach(
        job.model, job.optimizer, mesh=job.mesh, check_interval=1, straggler_absolute_ms=1e4
    ) as scout:
        job.train(2)
        healthy = scout.last_result.status.value
        job.train(1)
        reports = [(r.kind.value, r.ranks, r.recommended_action, r.message) for r in scout.reports]
        return {"healthy": healthy, "reports": reports, "trusted": scout.last_result.trustworthy}


def test_c08_a_norm_that_drifts_alike_in_every_tensor_parallel_group_is_softwares(ranks4: RankPool) -> None:
    told = ranks4.run(clipped_on_even_ranks, timeout=60)
    assert all(answer["healthy"] == "Agree" and not answer["trusted"] for answer in told), told
    reports = [report for answer in told for report in answer["reports"]]
    assert reports and {(kind, ranks, action) for kind, ranks, action, _ in reports} == {
        ("replica_divergence", (), "stop")
    }, reports
    for *_, message in reports:
        named = message.partition("; in ")[2].split(", ")
        assert "in every replica" in message and {name.partition(".exp_avg")[0] for name in named} == {
            "norm.weight",
            "norm.bias",
        }, message
