"""Healthy jobs under every layout: peers are right, checks are clean, and training ends in the bits it would have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import scout_core
from scout_core.faults.bits import own_part
from tests.distributed.layouts import CASES, SMALL, Job, LayoutCase
from tests.distributed.layouts.model import LAYERS
from tests.distributed.live_state import differences, flags, hooks
from tests.distributed.pool import RankPool

SHORT, LONG = (12, 3), (20, 4)
"""Steps, and steps from check to check: in both every block has its turn."""
QUIET = {"straggler_absolute_ms": 1e4, "oob_enabled": False}


def live(job: Job) -> dict[str, Any]:
    """What a check must leave alone: state and gradients of this rank by value, identity and address, and switches."""
    found: dict[str, Any] = dict(job.owned_state())
    for name, parameter in job.plain.named_parameters():
        own, gradient = own_part(parameter), parameter.grad
        found[f"{name}.is"] = (id(parameter), own.data_ptr(), parameter.requires_grad)
        found[f"{name}.grad"] = None if gradient is None else own_part(gradient).clone()
        found[f"{name}.grad.is"] = None if gradient is None else own_part(gradient).data_ptr()
    for name, module in job.model.named_modules():
        found[f"{name}.training"] = module.training
    return {**found, "rng": torch.get_rng_state(), "flags": flags()}


def watch(job: Job, **options: Any) -> tuple[scout_core.Scout, list[Any], list[str]]:
    """Attach between two step hooks: the results of checks, and what they left changed."""
    before: list[dict[str, Any]] = []
    interval = options["check_interval"]
    results: list[Any] = []
    traces: list[str] = []

    def due() -> bool:
        return bool(interval) and job.steps % interval == interval - 1

    def save(*_: Any) -> None:
        before[:] = [live(job)] if due() else []

    def compare(*_: Any) -> None:
        if not due():
            return
        traces.extend(f"step {scout.step_count}: {key}" for key in differences(before[0], live(job)))
        results.append(scout.last_result)

    job.optimizer.register_step_post_hook(save)
    settings = {**QUIET, **job.case.options, **options}
    scout = scout_core.attach(job.model, job.optimizer, mesh=job.mesh, **settings)
    job.optimizer.register_step_post_hook(compare)
    return scout, results, traces


def healthy(name: str, steps: int, interval: int) -> dict[str, Any]:
    """One job without SCOUT, one with it, and what its checks said."""
    alone = CASES[name].build(1)
    alone.train(steps)
    end = {**alone.owned_state(), "rng": torch.get_rng_state()}
    job = CASES[name].build(1)
    untouched = hooks(job.model)
    scout, results, traces = watch(job, check_interval=interval)
    job.train(steps)
    final = {**job.owned_state(), "rng": torch.get_rng_state()}
    scout.close()
    return {
        "peers": {result.peer_ranks for result in results},
        "statuses": [result.status.value for result in results],
        "trusted": [result.trustworthy for result in results],
        "reasons": sorted({reason.message for result in results for reason in result.inconclusive_reasons}),
        "checked": {recipe for result in results for recipe in result.checked_recipe_ids},
        "reports": [(report.kind.value, report.ranks, report.message) for report in scout.reports],
        "traces": traces[:10],
        "final": differences(end, final)[:10],
        "hooks": differences(untouched, hooks(job.model))[:10],
    }


def catalog(case: LayoutCase, rank: int) -> set[str]:
    """Recipes that live on `rank`."""
    stages = dict(case.dims).get("pp", 1)
    stage, share = rank // (case.ranks // stages), LAYERS // stages
    ends = {"embedding"} if stage == 0 else set()
    ends |= {"output"} if stage == stages - 1 else set()
    ends |= {"optimizer" if "dp_replicate" in dict(case.dims) else "owner_update"}
    return ends | {f"hidden:{layer}" for layer in range(stage * share, (stage + 1) * share)}


def judge(pool: RankPool, name: str, steps: int, interval: int) -> None:
    case, checks = CASES[name], steps // interval
    for rank, seen in enumerate(pool.run(healthy, name, steps, interval, timeout=200)):
        assert seen["reasons"] == [] and seen["reports"] == [], (rank, seen)
        assert seen["statuses"] == ["Agree"] * checks and seen["trusted"] == [True] * checks, (rank, seen)
        assert seen["peers"] == {case.expected_peers(rank)}, (rank, seen)
        assert seen["checked"] == catalog(case, rank), (rank, seen)
        assert seen["traces"] == seen["final"] == seen["hooks"] == [], (rank, seen)


@pytest.mark.parametrize("name", SMALL)
def test_checks_are_clean_and_leave_no_trace(name: str, request: pytest.FixtureRequest) -> None:
    judge(request.getfixturevalue(f"ranks{CASES[name].ranks}"), name, *SHORT)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_more_steps_leave_no_trace(name: str, request: pytest.FixtureRequest) -> None:
    judge(request.getfixturevalue(f"ranks{CASES[name].ranks}"), name, *LONG)


def off_schedule(name: str) -> dict[str, Any]:
    job = CASES[name].build(1)
    scout, _, _ = watch(job, check_interval=0)
    job.train(2)
    before = live(job)
    result = scout.check_now()
    changed = differences(before, live(job))
    scout.close()
    return {
        "status": result.status.value,
        "complete": result.complete,
        "reasons": [reason.message for reason in result.inconclusive_reasons],
        "checked": set(result.checked_recipe_ids),
        "changed": changed,
        "rank": dist.get_rank(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_a_check_off_schedule_covers_all(name: str, request: pytest.FixtureRequest) -> None:
    for seen in request.getfixturevalue(f"ranks{CASES[name].ranks}").run(off_schedule, name, timeout=60):
        assert (seen["status"], seen["complete"], seen["changed"]) == ("Agree", True, []), seen
        assert seen["checked"] == catalog(CASES[name], seen["rank"]), seen
