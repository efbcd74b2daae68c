"""Two real ranks, one of them wrong for good: a reference on the CPU tells which, and says so when it cannot."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import scout_core
from scout_core import faults
from scout_core.faults.bits import flip_bit
from tests.distributed.live_state import differences, live_state
from tests.distributed.models import Block, Case, Job, LanguageModel
from tests.distributed.pool import RankPool

QUIET = {"straggler_absolute_ms": 1e4, "tie_break": "reference"}
SIGN_BITS = {"float32": 31, "bfloat16": 15}


class TypedModel(LanguageModel):
    def __init__(self, dtype: torch.dtype, block: Callable[[], torch.nn.Module]) -> None:
        super().__init__(block)
        self.to(dtype)


def job_of(dtype: str = "float32", dropout: float = 0.0, block: Any = Block, **case: Any) -> Job:
    make = functools.partial(TypedModel, getattr(torch, dtype), functools.partial(block, dropout))
    return Job(Case(model=make, **case))


@contextmanager
def wrong_update(scout: Any, bit: int) -> Iterator[None]:
    """The device's update kernel is wrong in one bit; the CPU's, which the reference uses, is not.

    Both are the CPU here. What a reference starts from is told by its copies not being the captured slice.
    """
    adapter, bench = scout._adapter, scout_core.replay.workbench.Workbench
    healthy, observe, inside = adapter.apply_optimizer_slice, bench.observe, []

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        inside.append(True)
        try:
            return observe(self, *args, **kwargs)
        finally:
            inside.pop()

    def apply(part: Any) -> list[torch.Tensor]:
        updated = healthy(part)
        if inside:
            flip_bit(updated[0], int(updated[0].abs().argmax()), bit)
        return updated

    adapter.apply_optimizer_slice, bench.observe = apply, watched
    try:
        yield
    finally:
        adapter.apply_optimizer_slice, bench.observe = healthy, observe


def settled(surface: str, rank: int, bit: int, dtype: str = "float32", job: dict[str, Any] | None = None) -> Any:
    """One layer, or the update, is wrong on `rank` from the second step on: what the first check that covers it says.

    `rank` outside the job breaks nothing."""
    work = job_of(dtype, **(job or {}))
    with scout_core.attach(work.wrapped, work.optimizer, check_interval=1, **QUIET) as scout:
        work.step()
        layer, mine = work.model.blocks[1], dist.get_rank() == rank
        before = live_state(work)
        if surface == "updated_state" and mine:
            with wrong_update(scout, bit):
                result = scout.check_now()
        else:
            if mine and surface == "parameter_gradient":
                faults.corrupt_parameter_gradient(layer, "mix.weight", 5, bit)
            elif mine:
                getattr(faults, f"corrupt_{surface}")(layer, 5, bit)
            before = live_state(work)  # the injector stands in the module's forward
            result = scout.check_now()
        assert not differences(before, live_state(work))
        verdicts = {v.basis: v for v in result.verdicts.values() if v.basis != "none"}
        reports = [r for r in scout.reports if r.severity == "fatal"]
        return {
            "status": result.status.value,
            "ranks": result.sdc_ranks,
            "bases": sorted(verdicts),
            "reasons": [reason.message for reason in result.inconclusive_reasons],
            "sources": result.sdc_sources,
            "ratios": [v.reference for v in result.verdicts.values() if v.reference],
            "reports": [(r.kind.value, r.ranks, r.basis, r.exonerating) for r in reports],
            "trusted": result.trustworthy,
        }


@pytest.mark.parametrize(
    ("surface", "rank"),
    [("output", 0), ("output", 1), ("input_gradient", 1), ("parameter_gradient", 0), ("updated_state", 1)],
)
def test_a_flipped_exponent_bit_names_the_rank_outside_the_bound(ranks2: RankPool, surface: str, rank: int) -> None:
    for told in ranks2.run(settled, surface, rank, 29):
        assert (told["status"], told["ranks"], told["bases"]) == ("Attributed", (rank,), ["reference"]), told
        assert any(source.endswith(surface) for source in told["sources"]) and not told["trusted"]
        assert told["reports"] == [("sdc", (rank,), "reference", {"within_reference_bound": [1 - rank]})]
        for ratios in told["ratios"]:
            assert ratios[rank] > 1 >= ratios[1 - rank]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_flipped_sign_is_attributed(ranks2: RankPool, dtype: str) -> None:
    for told in ranks2.run(settled, "output", 1, SIGN_BITS[dtype], dtype):
        assert (told["status"], told["ranks"], told["bases"]) == ("Attributed", (1,), ["reference"]), told


@pytest.mark.parametrize("surface", ["output", "updated_state"])
def test_a_flip_of_rounding_size_is_too_small_to_tell(ranks2: RankPool, surface: str) -> None:
    for told in ranks2.run(settled, surface, 1, 0):
        assert (told["status"], told["ranks"], told["bases"]) == ("Inconclusive", (), []), told
        assert any("both inside the error bound" in reason for reason in told["reasons"])


def test_random_numbers_of_the_module_leave_it_open(ranks2: RankPool) -> None:
    for told in ranks2.run(settled, "output", 1, 29, "float32", {"dropout": 0.3}):
        assert (told["status"], told["ranks"]) == ("Inconclusive", ()), told
        assert any("draws random numbers" in reason for reason in told["reasons"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_healthy_ranks_have_nothing_to_settle(ranks2: RankPool, dtype: str) -> None:
    for told in ranks2.run(settled, "output", 7, 29, dtype):
        assert told["status"] == "Agree" and told["trusted"] and not told["reports"] and not told["ratios"]


def test_autocast_is_settled_too(ranks2: RankPool) -> None:
    for told in ranks2.run(settled, "output", 0, 29, "float32", {"autocast": True}):
        assert (told["ranks"], told["bases"]) == ((0,), ["reference"]), told


def small_budget() -> Any:
    work = job_of(block=Block)
    options = {**QUIET, "tie_break_budget_mib": 1}
    work.model.blocks[1].ballast = torch.nn.Parameter(torch.zeros(1 << 18), requires_grad=False)
    with scout_core.attach(work.wrapped, work.optimizer, check_interval=1, **options) as scout:
        work.step()
        if dist.get_rank() == 1:
            faults.corrupt_output(work.model.blocks[1], 5, 29)
        result = scout.check_now()
        return result.sdc_ranks, [reason.message for reason in result.inconclusive_reasons]


def test_beyond_the_budget_it_stays_open_with_the_reason(ranks2: RankPool) -> None:
    for ranks, reasons in ranks2.run(small_budget):
        assert ranks == () and any("tie_break_budget_mib" in reason for reason in reasons)


def test_a_module_that_casts_by_hand_leaves_no_crash(ranks2: RankPool) -> None:
    for told in ranks2.run(settled, "output", 1, 29, "float32", {"block": CastingBlock}):
        assert told["ranks"] == () and any("could not be computed" in reason for reason in told["reasons"]), told


class CastingBlock(Block):
    """Insists on single precision, which a float64 reference cannot give it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self.body(x).float(), self.mix.weight)
