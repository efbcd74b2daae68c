"""Partners that replay together although something is wrong with one of them: the job goes on, and so do the checks.

Two replicas of two partners each, on 4 ranks: rank 1 is the partner of rank 0, rank 3 its peer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
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


def broken_replay(name: str, at: int) -> list[dict[str, Any]]:
    """Eight steps; in the one of number `at` the replays of blocks raise on rank 1, in the midst of their collectives.

    What the check learned is what its partner, rank 0, goes by: from the fifth on every block has been replayed.
    """
    job, answers = build(name), []

    def broken(x: torch.Tensor) -> torch.Tensor:
        if torch.are_deterministic_algorithms_enabled():  # in replays alone
            raise ValueError("broken replay")
        return x

    with attached(job) as scout:
        for step in range(1, 9):
            broken_here = step == at and dist.get_rank() == 1
            handles = [
                block.norm_feed.register_forward_hook(lambda module, args, x: broken(x))
                for block in (job.plain.blocks.values() if broken_here else ())
            ]
            job.step()
            for handle in handles:
                handle.remove()
            answers.append(told(scout))
    return answers


def judge_broken(name: str, by_rank: list[list[dict[str, Any]]], at: int) -> None:
    for rank, answers in enumerate(by_rank):
        assert [answer["step"] for answer in answers] == list(range(1, 9)), (rank, answers)
        for answer in answers:
            assert answer["active"] and answer["blamed"] == () and answer["alarms"] == [], (rank, answer)
            assert answer["status"] == ("Inconclusive" if answer["step"] == at else "Agree"), (rank, answer)
        assert "the replay raised on" in str(answers[at - 1]["reasons"]), (rank, answers[at - 1])


@pytest.mark.parametrize("name", ["hsdp", "ep"])
def test_a_replay_that_raises_when_its_collectives_are_known(name: str, ranks4: RankPool) -> None:
    judge_broken(name, ranks4.run(broken_replay, name, 6, timeout=DEADLINE_S), 6)


def test_a_replay_that_raises_at_first(ranks4: RankPool) -> None:
    judge_broken("ep", ranks4.run(broken_replay, "ep", 1, timeout=DEADLINE_S), 1)
