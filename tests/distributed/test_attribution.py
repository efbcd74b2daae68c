"""Faults on real ranks: the right rank is named in the first check that covers it, and never another one."""

from __future__ import annotations

import copy
import functools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

import scout_core
from scout_core import faults
from scout_core.replay.result import ReplayResult
from tests.distributed.models import LAYERS, WIDTH, Block, Case, Job, LanguageModel, break_block, ddp
from tests.distributed.pool import RankPool, one_shot_ranks

QUIET = {"straggler_absolute_ms": 1e4}
SURFACES = (
    "output",
    "input_gradient",
    "parameter_gradient",
    "weight",
    "norm",
    "position",
    "embedding",
    "head",
    "moment",
    "update",
    "buffer",
)
WIDTHS = {"float32": 32, "bfloat16": 16, "float64": 64, "autocast": 32}


class BufferedBlock(Block):
    """A layer with a constant of its own, which no optimizer and no reduction ever touches."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.register_buffer("gain", torch.linspace(0.9, 1.1, WIDTH))

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(x) * self.gain


class TypedModel(LanguageModel):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(BufferedBlock)
        self.to(dtype)


@dataclass(frozen=True, kw_only=True)
class Injection:
    """One fault: `where` on `rank`, in layer `layer` if it is in a layer, `element` modulo what there is."""

    where: str
    rank: int
    layer: int
    element: int
    bit: int

    @property
    def covered_by(self) -> str:
        inside = ("output", "input_gradient", "parameter_gradient", "weight", "buffer")
        return f"hidden:{self.layer}" if self.where in inside else "optimizer"


def injections(count: int, width: int, ranks: int, seed: int) -> list[Injection]:
    """`count` faults that walk over surfaces, ranks and bit positions, so that each is met whatever the count."""
    chance = random.Random(seed)
    return [
        Injection(
            where=SURFACES[i % len(SURFACES)],
            rank=(i + i // len(SURFACES)) % ranks,
            layer=chance.randrange(LAYERS),
            element=chance.randrange(1 << 20),
            bit=(i * 7 + i // len(SURFACES)) % width,
        )
        for i in range(count)
    ]


def inject(fault: Injection, model: Any, optimizer: torch.optim.Optimizer) -> faults.Fault:
    layer = model.blocks[fault.layer]
    element, bit = fault.element, fault.bit
    weights = {
        "weight": layer.mix.weight,
        "buffer": layer.gain,
        "norm": model.norm.weight,
        "position": model.position,
        "head": model.head.weight,
    }
    if fault.where in weights:
        tensor = weights[fault.where]
        return faults.corrupt_weight(tensor, element % tensor.numel(), bit)
    if fault.where == "embedding":
        return faults.corrupt_rows(model.embedding, element % model.embedding.num_embeddings, bit)
    if fault.where == "moment":
        key = ("exp_avg", "exp_avg_sq")[element % 2]
        parameter = layer.qkv.weight
        return faults.corrupt_optimizer_state(optimizer, parameter, key, element % parameter.numel(), bit)
    if fault.where == "update":
        return faults.corrupt_optimizer_update(optimizer, element, bit)
    if fault.where == "parameter_gradient":
        return faults.corrupt_parameter_gradient(layer, "mix.weight", element, bit)
    return getattr(faults, f"corrupt_{fault.where}")(layer, element, bit)


def named(result: ReplayResult) -> set[int]:
    """Ranks that a result points at: for values that differ, or for numbers that were none before any reduction."""
    numeric = result.nonfinite_ranks if 2 * len(result.nonfinite_ranks) < len(result.peer_ranks) else ()
    return {*result.sdc_ranks, *numeric}


def campaign(chosen: list[Injection], dtype: str) -> list[dict[str, Any]]:
    """Each injection in a job of its own, from one state: what the checks said until one covered it."""
    kind = getattr(torch, "float32" if dtype == "autocast" else dtype)
    # DDP would overwrite every rank's constants with those of rank 0 before each forward
    wrap = functools.partial(ddp, broadcast_buffers=False)
    job = Job(Case(model=lambda: TypedModel(kind), wrap=wrap, autocast=dtype == "autocast"))
    job.train(1)
    saved = copy.deepcopy((job.model.state_dict(), job.optimizer.state_dict()))
    told = []
    for fault in chosen:
        job.model.load_state_dict(saved[0])
        job.optimizer.load_state_dict(copy.deepcopy(saved[1]))
        with scout_core.attach(job.wrapped, job.optimizer, check_interval=1, **QUIET) as scout:
            job.step()
            results = [scout.last_result]
            handle = inject(fault, job.model, job.optimizer) if dist.get_rank() == fault.rank else None
            while len(results) < 2 or fault.covered_by not in results[-1].checked_recipe_ids:
                job.step()
                results.append(scout.last_result)
            if handle is not None:
                handle.remove()
        told.append(
            {
                "healthy": results[0].status.value,
                "blamed": [sorted(named(result)) for result in results[1:]],
                "sdc": list(results[-1].sdc_ranks),
                "sources": list(results[-1].sdc_sources),
                "trusted": results[-1].trustworthy,
                "reports": sorted({rank for r in scout.reports for rank in r.ranks if r.severity != "info"}),
            }
        )
    return told


def judge_campaign(pool: RankPool, count: int, dtype: str, seed: int, timeout: float) -> None:
    chosen = injections(count, WIDTHS[dtype], pool.world_size, seed)
    told = pool.run(campaign, chosen, dtype, timeout=timeout)
    assert all(ranks_told == told[0] for ranks_told in told), "peers must reach the same verdicts"
    for fault, what in zip(chosen, told[0], strict=True):
        assert what["healthy"] == "Agree", (fault, what)
        assert what["blamed"][-1] == [fault.rank], (fault, what)
        assert all(set(blamed) <= {fault.rank} for blamed in what["blamed"]), (fault, what)
        assert what["reports"] == [fault.rank] and not what["trusted"], (fault, what)


@pytest.mark.parametrize(("dtype", "count"), [("float32", 22), ("bfloat16", 16), ("float64", 11), ("autocast", 11)])
def test_each_fault_is_the_right_ranks(ranks4: RankPool, dtype: str, count: int) -> None:
    judge_campaign(ranks4, count, dtype, seed=0, timeout=100)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("dtype", "count"), [("float32", 352), ("bfloat16", 176), ("float64", 64), ("autocast", 66)])
def test_campaign(ranks4: RankPool, dtype: str, count: int) -> None:
    judge_campaign(ranks4, count, dtype, seed=1, timeout=1500)


def broken_outputs(ranks: tuple[int, ...], layer: int = 1, steps: int = 3, **fault: Any) -> dict[str, Any]:
    """A layer that computes wrongly on `ranks`, each with a bit of its own: what the checks said."""
    job = Job(Case())
    with scout_core.attach(job.wrapped, job.optimizer, check_interval=1, **QUIET) as scout:
        job.step()
        if dist.get_rank() in ranks:
            faults.corrupt_output(job.model.blocks[layer], dist.get_rank(), 14, **fault)
        results = []
        for _ in range(steps):
            job.step()
            results.append(scout.last_result)
        return {
            "active": scout.active,
            "ranks": [result.sdc_ranks for result in results],
            "statuses": [result.status.value for result in results],
            "trusted": [result.trustworthy for result in results],
            "bases": [
                (v.basis, v.persistence) for result in results for v in result.verdicts.values() if v.basis != "none"
            ],
            "reports": [(r.kind.value, r.severity, r.ranks) for r in scout.reports],
            "reasons": [reason.message for result in results for reason in result.inconclusive_reasons],
            "elapsed_ms": [result.elapsed_ms for result in results],
        }


def test_two_faulty_ranks_of_five_are_both_named() -> None:
    outcomes = one_shot_ranks(5, broken_outputs, (1, 4), timeout=60)
    for outcome in outcomes:
        assert outcome.state == "returned", outcome
        assert outcome.value["ranks"] == [(1, 4), (), ()]
        assert outcome.value["reports"] == [("sdc", "fatal", (1, 4))]


def test_two_ranks_only_say_that_they_differ_and_blame_nobody(ranks2: RankPool) -> None:
    for told in ranks2.run(broken_outputs, (1,)):
        assert told["statuses"] == ["Inconclusive", "Agree", "Agree"]
        assert told["ranks"] == [(), (), ()] and not told["trusted"][0]
        assert told["reports"] == [("sdc", "fatal", ())]
        assert "third peer" in told["reasons"][0]


def test_one_of_two_that_contradicts_itself_is_named(ranks2: RankPool) -> None:
    for told in ranks2.run(broken_outputs, (1,), every=2, steps=6):
        named_ones = [ranks for ranks in told["ranks"] if ranks]
        assert named_ones and set(named_ones) == {(1,)}
        assert all(basis == "self" for basis, _ in told["bases"])


def both_halves() -> dict[str, Any]:
    job = Job(Case())
    with scout_core.attach(job.wrapped, job.optimizer, check_interval=1, **QUIET) as scout:
        job.step()
        if dist.get_rank() in (1, 3):
            faults.corrupt_output(job.model.blocks[1], 5, 14)
        job.step()
        result = scout.last_result
        return {"ranks": result.sdc_ranks, "status": result.status.value, "reports": [r.ranks for r in scout.reports]}


def test_half_against_half_blames_nobody(ranks4: RankPool) -> None:
    for told in ranks4.run(both_halves):
        assert told == {"ranks": (), "status": "Inconclusive", "reports": [()]}


@pytest.mark.parametrize("every", [2, 3, 7])
def test_a_fault_in_some_calls_only_is_intermittent_and_that_ranks(ranks4: RankPool, every: int) -> None:
    for told in ranks4.run(broken_outputs, (2,), every=every, steps=16):
        assert {ranks for ranks in told["ranks"] if ranks} == {(2,)}, told
        assert all(severity != "fatal" or ranks == (2,) for _, severity, ranks in told["reports"])
        assert ("self", "intermittent") in told["bases"]
        assert not any(t for t, ranks in zip(told["trusted"], told["ranks"], strict=True) if ranks)


def unrepeatable(layers: tuple[int, ...], steps: int, every: int) -> dict[str, Any]:
    job = Job(Case())
    for layer in layers:
        faults.nondeterministic_kernel(job.model.blocks[layer], every=every)
    with scout_core.attach(job.wrapped, job.optimizer, check_interval=1, **QUIET) as scout:
        blamed: set[int] = set()
        complete = []
        for _ in range(steps):
            job.step()
            blamed |= set(scout.last_result.sdc_ranks)
            complete.append(scout.last_result.complete)
        return {
            "blamed": blamed,
            "active": scout.active,
            "complete": complete,
            "reports": [(r.kind.value, r.severity, r.surface) for r in scout.reports],
            "reasons": scout.last_result.inconclusive_reasons,
        }


def test_a_layer_that_repeats_itself_nowhere_blames_nobody_in_100_checks(ranks4: RankPool) -> None:
    for told in ranks4.run(unrepeatable, (0, 1, 2), 100, 1, timeout=100):
        assert told["blamed"] == set() and told["active"] and not any(told["complete"])
        assert told["reports"] == [("nondeterministic", "info", f"hidden:{layer}") for layer in range(LAYERS)]
        assert "known not to repeat itself" in told["reasons"][0].message


@pytest.mark.parametrize("config", ["replayed", "off schedule"])
def test_a_fault_is_found_off_schedule_too(ranks4: RankPool, config: str) -> None:
    for told in ranks4.run(off_schedule, config == "replayed"):
        assert told == (3,)


def off_schedule(attached_before: bool) -> tuple[int, ...]:
    """`check_now` after a fault in the last layer, with or without scheduled checks before it."""
    job = Job(Case())
    with scout_core.attach(job.wrapped, job.optimizer, check_interval=1 if attached_before else 0, **QUIET) as scout:
        job.step()
        if dist.get_rank() == 3:
            break_block(job, 2)
        return scout.check_now().sdc_ranks


def test_a_wrong_weight_outside_every_layer_keeps_one_incident(ranks4: RankPool) -> None:
    for told in ranks4.run(stray_weight):
        assert told["ranks"] == [(1,)] * 4 and len(told["incidents"]) == 1 and told["steps"] == {2}
        assert "norm.weight" in told["message"]


def stray_weight() -> dict[str, Any]:
    job = Job(Case())
    with scout_core.attach(job.wrapped, job.optimizer, check_interval=1, **QUIET) as scout:
        job.step()
        if dist.get_rank() == 1:
            faults.corrupt_weight(job.model.norm.weight, 3, 20)
        ranks = []
        for _ in range(4):
            job.step()
            ranks.append(scout.last_result.sdc_ranks)
        reports = list(scout.reports)
        return {
            "ranks": ranks,
            "incidents": {r.incident_id for r in reports},
            "steps": {r.first_seen_step for r in reports},
            "message": reports[0].message,
        }
