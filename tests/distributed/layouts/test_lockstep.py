"""Partners that replay together although something is wrong with one of them: the job goes on, and so do the checks.

Two replicas of two partners each, on 4 ranks: rank 1 is the partner of rank 0, rank 3 its peer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

import scout_core
from tests.distributed.layouts import CASES, Job
from tests.distributed.layouts.model import LENGTH
from tests.distributed.layouts.test_clean import QUIET
from tests.distributed.pool import RankPool

PARTNERS = {"hsdp": "dp_shard", "tp": "tp", "tp_by_hand": "tp", "cp": "cp", "ep": "ep"}
DEADLINE_S = 60
"""A replay that waits for a partner in vain ends a call here; what SCOUT's own groups wait for gives up before."""


def build(name: str) -> Job:
    return replace(CASES[name], dims=(("dp_replicate", 2), (PARTNERS[name], 2))).build(1)


def attached(job: Job, **options: Any) -> scout_core.Scout:
    settings = {**QUIET, "readiness_timeout_s": 10, "check_interval": 1, **job.case.options, **options}
    return scout_core.attach(job.model, job.optimizer, mesh=job.mesh, **settings)


def told(scout: scout_core.Scout) -> dict[str, Any]:
    result = scout.last_result
    assert result is not None
    return {
        "step": result.step,
        "active": scout.active,
        "status": result.status.value,
        "source": result.source_rank,
        "fields": sorted({reason.field for reason in result.inconclusive_reasons}),
        "reasons": [reason.message for reason in result.inconclusive_reasons],
        "blamed": result.sdc_ranks,
        "checked": set(result.checked_recipe_ids),
        "alarms": [(report.kind.value, report.ranks) for report in scout.reports if report.severity != "info"],
    }


def unequal_partners(name: str, odd: dict[int, int]) -> list[dict[str, Any]]:
    """Four steps; in step k rank `odd[k]` has a shorter batch than the other three."""
    job, answers = build(name), []
    with attached(job) as scout:
        for step in range(1, 5):
            job.step(length=LENGTH - 2 if odd.get(step) == dist.get_rank() else LENGTH)
            answers.append(told(scout))
    return answers


@pytest.mark.parametrize("name", ["hsdp", "ep"])  # elsewhere partners share their data
def test_partners_of_unequal_lengths_replay_in_those_of_the_source(name: str, ranks4: RankPool) -> None:
    """Ranks of the source's row have other lengths than each other, and one of them the length that is known."""
    odd = {2: 2, 4: 1}
    by_rank = ranks4.run(unequal_partners, name, odd, timeout=DEADLINE_S)
    for rank, answers in enumerate(by_rank):
        assert [answer["step"] for answer in answers] == [1, 2, 3, 4], (rank, answers)
        assert all(answer["active"] and answer["alarms"] == [] for answer in answers), (rank, answers)
        for step, answer in enumerate(answers, start=1):
            apart = step in odd and rank % 2 == odd[step] % 2
            assert answer["status"] == ("Inconclusive" if apart else "Agree"), (rank, answer)
            assert answer["fields"] == (["shape"] if apart else []), (rank, answer)
            assert "hidden" in str(answer["checked"]), "it was replayed all the same"
    for step, rank in odd.items():
        assert by_rank[rank][step - 1]["source"] == rank, "the row with the odd length is the source's"
