"""Sections B and C of the case list: what replay on real ranks says of slow ranks, wrong values and NaN.

Each job does what the report describes; asserted is whom SCOUT names, as what, and what it advises. Cases whose answer
needs collective timing, host telemetry or checkpoints belong to other tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import scout_core
from scout_core import faults
from tests.distributed.models import BATCH, LENGTH, WIDTH, WORDS, Block, Case, Job, LanguageModel, replicated_by_hand
from tests.distributed.pool import RankPool

pytestmark = pytest.mark.distributed
QUIET = {"straggler_absolute_ms": 1e4}
Answer = dict[str, Any]


class HeavyBlock(Block):
    """Some milliseconds of work, so that thresholds in time mean something."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        self.up = nn.Linear(WIDTH, 1 << 12)
        self.down = nn.Linear(1 << 12, WIDTH)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return super().body(x) + self.drop(self.down(F.gelu(self.up(x))))


class LogModel(LanguageModel):
    """A layer that takes a logarithm of what a batch brings with it."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids) * (ids != 0).sum().float().log()


def tell(scout: scout_core.Scout) -> Answer:
    """What the newest check said, and every report until now, in plain values."""
    result = scout.last_result
    assert result is not None
    return {
        "status": result.status.value,
        "trusted": result.trustworthy,
        "sdc": result.sdc_ranks,
        "slow": result.straggler_ranks,
        "sources": result.sdc_sources,
        "active": scout.active,
        "reports": [
            (r.kind.value, r.severity, r.ranks, r.recommended_action, r.incident_id, r.message) for r in scout.reports
        ],
    }


def run(job: Job, steps: int, each: Callable[[Job, int], None] | None = None, **options: Any) -> list[Answer]:
    """Checks of a job after every step; `each(job, step)` stands in for `job.step()`."""
    answers = []
    with scout_core.attach(job.wrapped, job.optimizer, check_interval=1, **options) as scout:
        for number in range(steps):
            each(job, number) if each is not None else job.step()
            answers.append(tell(scout))
    return answers


def step(job: Job, *, loss_factor: float = 1.0, length: int = LENGTH, zero: bool = True) -> None:
    """One training step by hand, so that ranks may differ in it."""
    if zero:
        job.optimizer.zero_grad()
    batch = torch.randint(1, WORDS, (BATCH, length + 1), generator=job.data)
    logits = job.wrapped(batch[:, :-1])
    (F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()) * loss_factor).backward()
    job.optimizer.step()


def agreed(by_rank: list[list[Answer]]) -> list[Answer]:
    """The answers of rank 0, once every rank is seen to give them."""
    assert all(answers == by_rank[0] for answers in by_rank)
    assert by_rank[0][-1]["active"]
    return by_rank[0]


def kinds(answers: list[Answer]) -> set[tuple[str, tuple[int, ...]]]:
    return {(kind, ranks) for kind, _, ranks, *_ in answers[-1]["reports"]}


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


# B: stragglers


def slow_spells() -> list[Answer]:
    """Rank 2 computes at a third of its pace for some steps, recovers, and does so again."""
    job = Job(Case(model=lambda: LanguageModel(HeavyBlock)))
    with scout_core.attach(job.wrapped, job.optimizer, check_interval=1, straggler_window=4) as scout:
        job.train(4)
        usual_ms = max(scout.last_result.times_ms["hidden:0"])
        answers = []
        for slow in (True, False, True, False):
            slowed = []
            if slow and dist.get_rank() == 2:
                slowed = [faults.slow_module(block, 3 * usual_ms / 1e3 + 2e-2) for block in job.model.blocks]
            for _ in range(4):
                job.step()
                answers.append(tell(scout))
            for fault in slowed:
                fault.remove()
        return answers


def test_b13_two_slow_spells_of_one_rank_are_two_warnings_to_observe(ranks4: RankPool) -> None:
    answers = agreed(ranks4.run(slow_spells, timeout=60))
    assert kinds(answers) == {("compute_straggler", (2,))}
    assert {(severity, action) for _, severity, _, action, *_ in answers[-1]["reports"]} == {("warning", "observe")}
    assert len({incident for *_, incident, _ in answers[-1]["reports"]}) == 2
    assert answers[7]["slow"] == answers[15]["slow"] == ()


def outside_the_layers(kind: str) -> list[Answer]:
    """Time goes by on one rank where no device is slow: loading, logging, one pause, longer samples."""
    job = Job(Case(model=lambda: LanguageModel(HeavyBlock)))
    mine, lengths = dist.get_rank() == 3, torch.Generator().manual_seed(dist.get_rank())

    def each(job: Job, number: int) -> None:
        if kind == "loader" and mine:
            spin(0.04)
        length = LENGTH
        if kind == "random lengths":
            length = int(torch.randint(2, LENGTH + 1, (), generator=lengths))
        elif kind == "longest samples":
            length = LENGTH if mine else 2
        step(job, length=length)
        if (kind == "logging" and mine) or (kind == "one pause" and mine and number == 4):
            spin(0.3 if kind == "one pause" else 0.03)

    return run(job, 6, each)


@pytest.mark.parametrize("kind", ["loader", "logging", "one pause", "random lengths", "longest samples"])
def test_b05_b07_b08_b14_time_lost_outside_the_device_makes_no_straggler(ranks4: RankPool, kind: str) -> None:
    for answers in ranks4.run(outside_the_layers, kind, timeout=60):
        assert {answer["slow"] for answer in answers} == {()}
        assert answers[-1]["reports"] == [] and answers[-1]["active"]


# C: wrong values, numbers that are none, replicas that part


def poison_gradient(module: nn.Module) -> None:
    """NaN in the gradient of the module's next output, once."""

    def after(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        handle.remove()
        output.register_hook(lambda gradient: gradient * float("nan"))

    handle = module.register_forward_hook(after)


def nan_once(where: str) -> list[Answer]:
    job = Job(Case())

    def each(job: Job, number: int) -> None:
        now = number == 1
        if where == "gradient" and now and dist.get_rank() == 3:
            poison_gradient(job.model.head)
        factor = float("nan") if where == "loss" and now and dist.get_rank() == 2 else 1.0
        step(job, loss_factor=factor)

    return run(job, 3, each, **QUIET)


@pytest.mark.parametrize(("where", "rank"), [("gradient", 3), ("loss", 2)], ids=["c01", "c15"])
def test_c01_c15_the_rank_that_had_the_nan_before_the_reduction_is_named(
    ranks4: RankPool, where: str, rank: int
) -> None:
    healthy, hit, _ = answers = agreed(ranks4.run(nan_once, where, timeout=30))
    assert healthy["trusted"] and not hit["trusted"]
    assert [(kind, ranks) for kind, _, ranks, *_ in hit["reports"]] == [("numeric", (rank,))]
    assert all(ranks in ((rank,), ()) for _, ranks in kinds(answers))
    assert "before any reduction" in hit["reports"][0][-1]
    assert not any(answer["trusted"] for answer in answers[1:]), "a state that holds NaN is never certified"


def nan_data() -> list[Answer]:
    """Rank 3 gets a batch of padding alone, of which a layer takes the logarithm: wherever it is replayed it is NaN."""
    job = Job(Case(model=LogModel))

    def each(job: Job, number: int) -> None:
        job.optimizer.zero_grad()
        low, high = (0, 1) if number == 2 and dist.get_rank() == 3 else (1, WORDS)
        batch = torch.randint(low, high, (BATCH, LENGTH), generator=job.data)
        job.wrapped(batch).sum().backward()
        job.optimizer.step()

    return run(job, 4, each, **QUIET)


def test_c04_a_batch_that_gives_nan_anywhere_is_numeric_and_excludes_nobody(ranks4: RankPool) -> None:
    answers = agreed(ranks4.run(nan_data, timeout=30))
    assert answers[1]["trusted"] and not answers[2]["trusted"]
    assert {kind for kind, _ in kinds(answers)} == {"numeric"}
    assert "restart_excluding" not in {action for _, _, _, action, *_ in answers[-1]["reports"]}
    assert all(answer["sdc"] == () for answer in answers)


def nan_everywhere() -> list[Answer]:
    job = Job(Case())
    return run(job, 2, lambda job, number: step(job, loss_factor=float("nan")), **QUIET)


def test_c05_nan_that_follows_a_switch_and_no_rank_names_no_rank(ranks4: RankPool) -> None:
    answers = agreed(ranks4.run(nan_everywhere, timeout=30))
    assert kinds(answers) == {("numeric", ())} and not answers[-1]["trusted"]


def wrong_micro_step() -> list[Answer]:
    """Gradients are averaged after the first of two micro-batches only; each rank adds the second for itself."""
    job = Job(Case())

    def each(job: Job, number: int) -> None:
        job.optimizer.zero_grad()
        batch = torch.randint(0, WORDS, (BATCH, LENGTH), generator=job.data)
        job.wrapped(batch).square().mean().backward()
        with job.wrapped.no_sync():  # type: ignore[operator]
            job.wrapped(batch).square().mean().backward()
        job.optimizer.step()

    return run(job, 4, each, **QUIET)


def test_c07_replicas_that_all_part_are_softwares_and_no_ranks(ranks4: RankPool) -> None:
    answers = agreed(ranks4.run(wrong_micro_step, timeout=30))
    assert ("replica_divergence", ()) in kinds(answers)
    assert {ranks for _, ranks in kinds(answers)} == {()}
    assert not answers[-1]["trusted"] and {action for *_, action, _, _ in answers[-1]["reports"]} == {"stop"}


def drift() -> tuple[list[Answer], list[float]]:
    """Rank 2 adds a little to every weight after each step."""
    job = Job(Case(wrap=replicated_by_hand, optimizer=lambda p: torch.optim.SGD(p, lr=0.0)))
    grown = []
    answers = []
    with scout_core.attach(job.wrapped, job.optimizer, check_interval=1, **QUIET) as scout:
        job.step()
        for _ in range(4):
            if dist.get_rank() == 2:
                for parameter in job.model.parameters():
                    parameter.data.add_(1e-7)
            job.step()
            answers.append(tell(scout))
            details = scout.last_result.details
            grown.append(max(details["state"].largest_difference))
    return answers, grown


def test_c09_weights_that_drift_on_one_rank_are_divergence_of_that_rank_with_its_growth(ranks4: RankPool) -> None:
    told = ranks4.run(drift, timeout=30)
    answers = agreed([answers for answers, _ in told])
    assert kinds(answers) == {("replica_divergence", (2,))}
    grown = told[0][1]
    assert grown == sorted(set(grown)) and grown[0] == pytest.approx(1e-7, rel=0.5)
    assert len({incident for *_, incident, _ in answers[-1]["reports"]}) == 1


class AtomicAdds(torch.autograd.Function):
    """A gradient summed in an order that changes from call to call."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        AtomicAdds.calls += 1
        noise = 1 + 1e-6 * ((AtomicAdds.calls * 7 + dist.get_rank() * 3) % 11)
        return gradients[0] * noise


class AtomicBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return AtomicAdds.apply(self.body(x))


def atomic_adds() -> list[Answer]:
    AtomicAdds.calls = 0
    return run(Job(Case(model=lambda: LanguageModel(AtomicBlock))), 9, **QUIET)


def test_c10_a_backward_that_repeats_itself_nowhere_is_named_nondeterministic_and_nobody_blamed(
    ranks4: RankPool,
) -> None:
    answers = agreed(ranks4.run(atomic_adds, timeout=40))
    assert kinds(answers) == {("nondeterministic", ())} and len(answers[-1]["reports"]) == 3
    assert {(severity, action) for _, severity, _, action, *_ in answers[-1]["reports"]} == {("info", "continue")}
    assert all(answer["sdc"] == () for answer in answers)


def gradients_kept() -> list[Answer]:
    return run(Job(Case()), 6, lambda job, number: step(job, zero=number < 2), **QUIET)


def test_c13_gradients_that_nobody_clears_are_no_corruption(ranks4: RankPool) -> None:
    answers = agreed(ranks4.run(gradients_kept, timeout=30))
    assert answers[-1]["reports"] == [] and {answer["status"] for answer in answers} == {"Agree"}


def early_read() -> list[Answer]:
    """Rank 1 writes into its reduced gradient before the optimizer reads it, once."""
    job = Job(Case(wrap=replicated_by_hand))

    def each(job: Job, number: int) -> None:
        batch = torch.randint(0, WORDS, (BATCH, LENGTH), generator=job.data)
        job.wrapped(batch).square().mean().backward()
        for parameter in job.model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
        if number == 1 and dist.get_rank() == 1:
            job.model.norm.weight.grad[3] += 0.5
        job.optimizer.step()
        job.optimizer.zero_grad()

    return run(job, 2, each, **QUIET)


def test_c14_a_gradient_that_differs_after_its_reduction_names_rank_and_tensor(ranks4: RankPool) -> None:
    healthy, hit = agreed(ranks4.run(early_read, timeout=30))
    assert healthy["status"] == "Agree" and hit["sdc"] == (1,)
    assert "optimizer/gradient" in hit["sources"] and not hit["trusted"]
    assert any("norm.weight" in message for *_, message in hit["reports"])


def rare_flip(every: int, steps: int) -> list[Answer]:
    job = Job(Case())
    job.train(1)
    if dist.get_rank() == 1:
        for block in job.model.blocks:
            faults.corrupt_output(block, 5, 14, every=every)
    return run(job, steps, **QUIET)


def test_c17_a_bit_that_flips_in_one_call_of_13_is_found_and_only_ever_that_ranks(ranks4: RankPool) -> None:
    answers = agreed(ranks4.run(rare_flip, 13, 45, timeout=90))
    assert {answer["sdc"] for answer in answers} == {(), (1,)}
    assert {ranks for _, ranks in kinds(answers) if ranks} == {(1,)}
    assert all(ranks == (1,) for _, severity, ranks, *_ in answers[-1]["reports"] if severity == "fatal")
