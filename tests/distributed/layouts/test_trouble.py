"""Ranks that are not ready for a check, under every layout: nobody hangs or is blamed, and the next check is whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import scout_core
from tests.distributed.layouts import CASES, SMALL, LayoutCase
from tests.distributed.layouts.model import LENGTH
from tests.distributed.layouts.test_clean import QUIET
from tests.distributed.pool import RankPool

ODD = 3
UNEVEN = [name for name in SMALL if CASES[name].lengths_vary]
IN_SHORT = ("ddp", "sp", "tp_by_hand", "ep")
SHORTER = LENGTH - 2


def told(scout: scout_core.Scout) -> dict[str, Any]:
    result = scout.last_result
    assert result is not None
    return {
        "step": result.step,
        "status": result.status.value,
        "trusted": result.trustworthy,
        "named": sorted({rank for reason in result.inconclusive_reasons for rank in reason.ranks}),
        "fields": sorted({reason.field for reason in result.inconclusive_reasons}),
        "checked": sorted(result.checked_recipe_ids),
        "blamed": result.sdc_ranks,
        "sources": result.sdc_sources,
        "alarms": [(report.kind.value, report.ranks) for report in scout.reports if report.severity != "info"],
        "active": scout.active,
    }


def is_odd(case: LayoutCase, rank: int) -> bool:
    """Whether `rank` trains on the batch of `ODD`, which must have one length."""
    return case.replica(rank) == case.replica(ODD)


def trouble(name: str, length: int | None) -> list[dict[str, Any]]:
    """A healthy check, one in which `ODD` has no capture or its replica another `length`, and a healthy one again."""
    case = CASES[name]
    job = case.build(1)
    answers = []
    settings = {**QUIET, **case.options}
    with scout_core.attach(job.model, job.optimizer, mesh=job.mesh, check_interval=1, **settings) as scout:
        for step in range(3):
            unseen = step == 1 and length is None and dist.get_rank() == ODD
            shorter = step == 1 and length is not None and is_odd(case, dist.get_rank())
            job.step(length=length if shorter else LENGTH, unseen=unseen)
            answers.append(told(scout))
    return answers


def assert_calm(name: str, by_rank: list[list[dict[str, Any]]]) -> None:
    """All checks came to an end, in the healthy steps whole; nobody blames anybody."""
    for rank, answers in enumerate(by_rank):
        assert [answer["step"] for answer in answers] == [1, 2, 3], (name, rank, answers)
        for answer in answers:
            assert answer["blamed"] == () and answer["alarms"] == [] and answer["active"], (name, rank, answer)
        for answer in (answers[0], answers[2]):
            assert answer["status"] == "Agree" and answer["trusted"], (name, rank, answer)


@pytest.mark.parametrize("name", SMALL)
def test_a_rank_without_a_capture(name: str, request: pytest.FixtureRequest) -> None:
    case = CASES[name]
    by_rank = request.getfixturevalue(f"ranks{case.ranks}").run(trouble, name, None, timeout=60)
    assert_calm(name, by_rank)
    for peer in case.expected_peers(ODD):
        answer = by_rank[peer][1]
        assert answer["status"] == "Inconclusive" and not answer["trusted"], (peer, answer)
        assert answer["named"] == [ODD] and answer["fields"] == ["readiness"], (peer, answer)
    for partner in case.expected_lockstep(ODD):
        assert by_rank[partner][1]["status"] == "Inconclusive", "cannot replay without its partner"


def judge_shorter(pool: RankPool, name: str, length: int) -> None:
    case = CASES[name]
    by_rank = pool.run(trouble, name, length, timeout=60)
    assert_calm(name, by_rank)
    for rank in range(case.ranks):
        answer = by_rank[rank][1]
        if any(is_odd(case, peer) for peer in case.expected_peers(rank)):
            assert answer["status"] == "Inconclusive" and not answer["trusted"], (rank, answer)
            assert answer["fields"] == ["shape"], (rank, answer)


@pytest.mark.parametrize("name", IN_SHORT)
def test_a_replica_of_another_length(name: str, request: pytest.FixtureRequest) -> None:
    judge_shorter(request.getfixturevalue(f"ranks{CASES[name].ranks}"), name, SHORTER)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in UNEVEN if name not in IN_SHORT])
def test_a_replica_of_another_length_elsewhere(name: str, request: pytest.FixtureRequest) -> None:
    judge_shorter(request.getfixturevalue(f"ranks{CASES[name].ranks}"), name, SHORTER)


@pytest.mark.slow
@pytest.mark.parametrize("length", [None, SHORTER], ids=["unseen", "shorter"])
def test_trouble_in_products_of_three(length: int | None, ranks12: RankPool) -> None:
    for name in CASES.keys() - set(SMALL):
        if length is None or CASES[name].lengths_vary:
            assert_calm(name, ranks12.run(trouble, name, length, timeout=100))
