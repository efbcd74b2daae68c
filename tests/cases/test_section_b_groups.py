"""Section B of the case list on slow collectives: four real ranks, whose links one after another become slow."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

import scout_core
from scout_core.faults import slow_collectives
from tests.distributed.layouts import CASES
from tests.distributed.layouts import Job as LayoutJob
from tests.distributed.models import LENGTH, WORDS, Case, Job, LanguageModel, ddp
from tests.distributed.pool import RankPool

pytestmark = pytest.mark.distributed
STEPS, ONSET = 22, 12
PAIRS = list(combinations(range(4), 2))
OPTIONS: dict[str, Any] = {"check_interval": 1, "straggler_absolute_ms": 8, "oob_enabled": True}


def job_of_pairs(slow: str, options: dict[str, Any]) -> dict[str, Any]:
    """Every pair of ranks has a group of its own and reduces something in it at each step."""
    rank = dist.get_rank()
    groups = {pair: dist.new_group(list(pair)) for pair in PAIRS}
    job = Job(Case(model=LanguageModel, wrap=ddp))
    job.steps = 0
    generator = torch.Generator().manual_seed(rank)
    affected = {
        "links of rank 2": lambda ranks: 2 in ranks,
        "one pair": lambda ranks: ranks == (1, 2),
        "switch of ranks 0 and 1": lambda ranks: len({0, 1}.intersection(ranks)) == 1,
        "all": lambda ranks: True,
    }[slow]
    slowed = slow_collectives(lambda ranks: len(ranks) == 2 and job.steps >= ONSET and affected(ranks), seconds=0.02)
    with slowed, scout_core.attach(job.wrapped, job.optimizer, **OPTIONS, **options) as scout:
        for _ in range(STEPS):
            batch = torch.randint(1, WORDS, (2, LENGTH + 1), generator=generator)
            job.optimizer.zero_grad()
            logits = job.wrapped(batch[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
            for pair, group in groups.items():
                if rank in pair:
                    dist.all_reduce(torch.ones(64), group=group)
            if rank == 1:
                time.sleep(0.005)  # whom the others wait for: that is no slowness of the links
            job.optimizer.step()
            job.steps += 1
        return told(scout)


def told(scout: scout_core.Scout) -> dict[str, Any]:
    result = scout.last_result
    assert result is not None
    return {
        "reports": [
            (r.kind.value, r.ranks, r.surface, r.recommended_action, r.first_seen_step)
            for r in scout.reports
            if r.kind.value == "communication_straggler"
        ],
        "others": [r.message for r in scout.reports if r.kind.value != "communication_straggler"],
        "across": result.cross_pg_result,
        "timed": {tuple(t["ranks"]) for t in result.collective_timings if t["recipe"] == "live_step"},
    }


def test_b03_a_rank_all_of_whose_links_are_slow_is_named_and_the_rest_are_cleared(ranks4: RankPool) -> None:
    for rank, one in enumerate(ranks4.run(job_of_pairs, "links of rank 2", {}, timeout=120)):
        assert one["others"] == []
        assert {report[:2] for report in one["reports"]} == {("communication_straggler", (2,))}
        actions = [report[3] for report in one["reports"]]
        assert actions[0] == "observe" and actions[-1] == "restart_excluding"
        assert {report[4] for report in one["reports"]} == {ONSET + 3}
        assert one["across"]["rank"] == 2 and one["across"]["contradicting"] == []
        assert {tuple(group["ranks"]) for group in one["across"]["supporting"]} == {(0, 2), (1, 2), (2, 3)}
        assert {pair for pair in PAIRS if rank in pair} <= one["timed"]


@pytest.mark.parametrize(("slow", "finding"), [("one pair", "one_slow_group"), ("all", "no_healthy_group")])
def test_what_fits_more_than_one_culprit_names_nobody(ranks4: RankPool, slow: str, finding: str) -> None:
    for one in ranks4.run(job_of_pairs, slow, {}, timeout=120):
        assert one["reports"] == [] and one["others"] == []
        assert one["across"]["finding"] == finding


def test_a_switch_that_all_slow_links_run_through_is_named_where_the_map_has_it(ranks4: RankPool) -> None:
    resources = {rank: {"switch": f"leaf{rank // 2}", "nic": f"nic{rank}"} for rank in range(4)}
    resources[3] = {}
    for one in ranks4.run(job_of_pairs, "switch of ranks 0 and 1", {"resources": resources}, timeout=120):
        assert one["others"] == []
        assert {report[:4] for report in one["reports"]} == {
            ("communication_straggler", (), "live_collectives/switch leaf0", "observe")
        }


def product(steps: int, onset: int) -> dict[str, Any]:
    """Two replicas of a model split in two: no rank has a peer in its tensor parallel group."""
    job = LayoutJob(replace(CASES["tp"], dims=(("dp_replicate", 2), ("tp", 2))), seed=0)
    large = torch.ones(1 << 15)  # of the collectives of a group the largest is timed
    job.before_step.append(lambda: [dist.all_reduce(large, group=group) for group in job.mesh.get_all_groups()])
    slowed = slow_collectives(lambda ranks: job.steps >= onset and len(ranks) == 2 and 2 in ranks, seconds=0.008)
    options = {**OPTIONS, **job.case.options, "straggler_absolute_ms": 4}
    with slowed, scout_core.attach(job.model, job.optimizer, mesh=job.mesh, **options) as scout:
        job.train(steps)
        return told(scout)


def test_groups_whose_members_are_no_peers_of_one_another_are_heard_through_partners(ranks4: RankPool) -> None:
    for rank, one in enumerate(ranks4.run(product, 20, 12, timeout=120)):
        assert one["others"] == []
        assert one["across"]["rank"] == 2, one["across"]
        assert {tuple(group["ranks"]) for group in one["across"]["supporting"]} == {(0, 2), (2, 3)}
        # the peers of the rank report it, the other replicas' leave it to them
        assert {report[:2] for report in one["reports"]} == (
            {("communication_straggler", (2,))} if rank in (0, 2) else set()
        )
