"""Ranks that are not ready for a check, under every layout: nobody hangs or is blamed, and the next check is whole."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

import scout_core
from tests.distributed.layouts import CASES, SMALL
from tests.distributed.layouts.model import LENGTH
from tests.distributed.layouts.ready import needs_core
from tests.distributed.layouts.test_clean import QUIET
from tests.distributed.pool import RankPool

pytestmark = needs_core

ODD = 3
UNEVEN = [name for name in SMALL if CASES[name].lengths_vary]


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


def trouble(name: str, kind: str) -> list[dict[str, Any]]:
    """A healthy check, one in which `ODD` or its replica is not like the others, and healthy ones again."""
    case = CASES[name]
    job = case.build(1)
    answers = []
    started = time.monotonic()
    settings = {**QUIET, **case.options}
    with scout_core.attach(job.model, job.optimizer, mesh=job.mesh, check_interval=1, **settings) as scout:
        for step in range(4):
            odd = step == 1
            shorter = odd and kind == "shorter" and case.replica(dist.get_rank()) == case.replica(ODD)
            unseen = odd and kind == "unseen" and dist.get_rank() == ODD
            job.step(length=LENGTH - 2 if shorter else LENGTH, unseen=unseen)
            answers.append(told(scout))
        answers[-1]["elapsed_s"] = time.monotonic() - started
    return answers


def assert_calm(name: str, by_rank: list[list[dict[str, Any]]]) -> None:
    """All checks came to an end, in the healthy steps whole; nobody blames anybody."""
    for rank, answers in enumerate(by_rank):
        assert [answer["step"] for answer in answers] == [1, 2, 3, 4], (name, rank, answers)
        for answer in answers:
            assert answer["blamed"] == () and answer["alarms"] == [] and answer["active"], (name, rank, answer)
        for answer in (answers[0], *answers[2:]):
            assert answer["status"] == "Agree" and answer["trusted"], (name, rank, answer)


@pytest.mark.parametrize("name", SMALL)
def test_a_rank_without_a_capture(name: str, request: pytest.FixtureRequest) -> None:
    case = CASES[name]
    by_rank = request.getfixturevalue(f"ranks{case.ranks}").run(trouble, name, "unseen", timeout=60)
    assert_calm(name, by_rank)
    for peer in case.expected_peers(ODD):
        answer = by_rank[peer][1]
        assert answer["status"] == "Inconclusive" and not answer["trusted"], (peer, answer)
        assert answer["named"] == [ODD] and answer["fields"] == ["readiness"], (peer, answer)
    for partner in case.expected_lockstep(ODD):
        assert by_rank[partner][1]["status"] == "Inconclusive", "cannot replay without its partner"


@pytest.mark.parametrize("name", UNEVEN)
def test_a_replica_of_another_length(name: str, request: pytest.FixtureRequest) -> None:
    case = CASES[name]
    by_rank = request.getfixturevalue(f"ranks{case.ranks}").run(trouble, name, "shorter", timeout=60)
    assert_calm(name, by_rank)
    for rank, answers in enumerate(by_rank):
        assert answers[1]["status"] == "Inconclusive" and not answers[1]["trusted"], (rank, answers[1])
        assert answers[1]["fields"] == ["shape"], (rank, answers[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["unseen", "shorter"])
def test_trouble_in_products_of_three(kind: str, ranks12: RankPool) -> None:
    for name in CASES.keys() - set(SMALL):
        if kind == "unseen" or CASES[name].lengths_vary:
            assert_calm(name, ranks12.run(trouble, name, kind, timeout=100))
