"""Ranks that are not alike: checks end as Inconclusive with field and rank named, no alarm, no hang, no crash."""

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
from scout_core.adapter import OptimizerSlice
from scout_core.config import ConfigError, ReplayHarnessConfig
from scout_core.pytorch import PyTorchAdapter
from scout_core.trust.states import Outcome
from tests.distributed.models import BATCH, LENGTH, WORDS, Block, Case, Job, LanguageModel, ddp, replicated_by_hand
from tests.distributed.pool import RankPool

ODD = 2
QUIET = {"straggler_absolute_ms": 1e4}


def odd() -> bool:
    return dist.get_rank() == ODD


def step(job: Job, *, length: int = LENGTH, update: bool = True, ids: torch.dtype = torch.int64) -> None:
    """One training step by hand, so that ranks may differ in it."""
    batch = torch.randint(0, WORDS, (BATCH, length + 1), generator=job.data)
    logits = job.wrapped(batch[:, :-1].to(ids))
    F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()).backward()
    if update:
        job.optimizer.step()
    job.optimizer.zero_grad()


def told(scout: scout_core.Scout) -> dict[str, Any]:
    """What a rank's newest check said, in plain values."""
    result = scout.last_result
    assert result is not None
    return {
        "status": result.status.value,
        "complete": result.complete,
        "trusted": result.trustworthy,
        "reasons": [(reason.recipe, reason.field, reason.ranks) for reason in result.inconclusive_reasons],
        "messages": [reason.message for reason in result.inconclusive_reasons],
        "checked": result.checked_recipe_ids,
        "sdc": result.sdc_ranks,
        "sources": result.sdc_sources,
        "active": scout.active,
        "alarms": [(r.kind.value, r.ranks) for r in scout.reports],
    }


def assert_inconclusive(answers: list[dict[str, Any]], *reasons: tuple[str, str]) -> None:
    """All ranks say the same: Inconclusive for these `(recipe, field)`, the odd rank named, nothing alarmed."""
    assert all(answer == answers[0] for answer in answers)
    answer = answers[0]
    assert answer["reasons"] == [(recipe, field, (ODD,)) for recipe, field in reasons], answer
    assert all(f"rank {ODD}" in message for message in answer["messages"])
    assert (answer["status"], answer["complete"], answer["trusted"]) == ("Inconclusive", False, False)
    assert answer["alarms"] == [] and answer["sdc"] == () and answer["sources"] == () and answer["active"]


class SkippingModel(LanguageModel):
    """Leaves out a layer when told to, as early exit, layer drop and sparse routing do."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped: int | None = None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.position[: ids.shape[1]]
        for index, block in enumerate(self.blocks):
            x = x if index == self.skipped else block(x)
        return self.head(self.norm(x)) * self.temperature


def without_capture() -> list[dict[str, Any]]:
    job = Job(Case(model=SkippingModel, wrap=lambda m: ddp(m, find_unused_parameters=True)))
    with scout_core.attach(job.wrapped, job.optimizer, check_interval=1, **QUIET) as scout:
        step(job)
        job.model.skipped = 1 if odd() else None
        step(job)
        missing = told(scout)
        job.model.skipped = None
        step(job)
        return [missing, told(scout)]


def test_a_layer_that_one_rank_did_not_call(ranks4: RankPool) -> None:
    answers = ranks4.run(without_capture, timeout=30)
    assert_inconclusive([answer[0] for answer in answers], ("hidden", "readiness"))
    assert set(answers[0][0]["checked"]) == {"embedding", "output", "optimizer"}
    assert all(answer[1]["status"] == "Agree" and answer[1]["complete"] for answer in answers)


def looked_at_twice() -> list[Any]:
    """A scheduled check that shows nothing, and `check_now` on the same state when all is well."""
    job = Job(Case(model=SkippingModel, wrap=lambda m: ddp(m, find_unused_parameters=True)))
    with scout_core.attach(job.wrapped, job.optimizer, check_interval=1, **QUIET) as scout:
        step(job)
        job.model.skipped = 1 if odd() else None
        step(job)
        job.model.skipped = None
        manual = scout.check_now()
        return [manual.status.value, manual.trustworthy, scout.outcome_at(2), scout.outcome_at(1)]


def test_a_later_check_of_the_same_state_takes_nothing_back(ranks4: RankPool) -> None:
    for told in ranks4.run(looked_at_twice, timeout=30):
        assert told == ["Agree", True, Outcome.INCONCLUSIVE, None]


def another_shape(faulty: int | None) -> list[dict[str, Any]]:
    job = Job(Case())
    with scout_core.attach(job.wrapped, job.optimizer, check_interval=1, **QUIET) as scout:
        if dist.get_rank() == faulty:
            for block in job.model.blocks:
                faults.corrupt_output(block, 3, 20)
        answers = []
        for _ in range(8):  # long enough for each rank to be the source twice
            step(job, length=LENGTH - 2 if odd() else LENGTH)
            answers.append({**told(scout), "source": scout.last_result.source_rank})
        return answers


def test_another_sequence_length_is_no_alarm_and_is_still_replayed(ranks4: RankPool) -> None:
    answers = ranks4.run(another_shape, None, timeout=30)
    for check in range(8):
        at_once = [{k: v for k, v in answer[check].items() if k != "source"} for answer in answers]
        assert_inconclusive(at_once, ("embedding", "shape"), ("hidden", "shape"), ("output", "shape"))
        assert len(at_once[0]["checked"]) == 4
    assert {answer["source"] for answer in answers[0]} == {0, 1, 2, 3}


@pytest.mark.parametrize("faulty", [0, ODD])
def test_a_fault_among_unequal_shapes_is_still_attributed(ranks4: RankPool, faulty: int) -> None:
    answers = ranks4.run(another_shape, faulty, timeout=40)
    for answer in answers[0]:
        assert (answer["status"], answer["sdc"], answer["complete"]) == ("Attributed", (faulty,), False)
        assert {ranks for _, ranks in answer["alarms"]} == {(faulty,)}


def another_dtype(of_ids: bool) -> dict[str, Any]:
    job = Job(Case())
    with scout_core.attach(job.wrapped, job.optimizer, check_interval=1, **QUIET) as scout:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=odd() and not of_ids):
            step(job, ids=torch.int32 if odd() and of_ids else torch.int64)
        return told(scout)


def test_another_dtype_of_the_input_stops_that_recipe_only(ranks4: RankPool) -> None:
    answers = ranks4.run(another_dtype, True, timeout=30)
    assert_inconclusive(answers, ("embedding", "structure"))
    assert set(answers[0]["checked"]) == {"hidden:0", "output", "optimizer"}


def test_autocast_on_one_rank_stops_all_module_recipes(ranks4: RankPool) -> None:
    answers = ranks4.run(another_dtype, False, timeout=30)
    assert_inconclusive(answers, ("embedding", "structure"), ("hidden", "structure"), ("output", "structure"))


def another_step() -> dict[str, Any]:
    job = Job(Case())
    with scout_core.attach(job.wrapped, job.optimizer, check_interval=0, **QUIET) as scout:
        for index in range(3):
            step(job, update=not (odd() and index == 1))
        scout.check_now()
        return told(scout)


def test_a_step_that_one_rank_did_not_make_is_named_when_all_come_to_the_check(ranks4: RankPool) -> None:
    answers = ranks4.run(another_step, timeout=30)
    assert_inconclusive(answers, ("check", "step"))
    assert "(2 against 3)" in answers[0]["messages"][0] and answers[0]["checked"] == ()


def out_of_step() -> dict[str, Any]:
    job = Job(Case())
    started = time.monotonic()
    with scout_core.attach(job.wrapped, job.optimizer, check_interval=2, readiness_timeout_s=2.0, **QUIET) as scout:
        for index in range(8):
            step(job, update=not (odd() and index == 1))
        finite = all(bool(torch.isfinite(p).all()) for p in job.model.parameters())
        return {
            "active": scout.active,
            "finite": finite,
            "steps": job.optimizer.state[job.model.norm.weight]["step"].item(),
            "reports": [(r.kind.value, r.status, r.ranks, r.severity) for r in scout.reports],
            "elapsed_s": time.monotonic() - started,
        }


def test_a_rank_out_of_step_is_named_by_those_that_waited_and_training_goes_on(ranks4: RankPool) -> None:
    answers = ranks4.run(out_of_step, timeout=60)
    for rank, answer in enumerate(answers):
        assert not answer["active"] and answer["finite"]
        assert answer["steps"] == (7 if rank == ODD else 8)
        if rank == ODD:
            assert all(ranks in ((), (ODD,)) for _, _, ranks, _ in answer["reports"])
        else:
            assert answer["reports"] == [("collective_desync", "Attributed", (ODD,), "warning")]


class FailingAdapter(PyTorchAdapter):
    """Fails on the odd rank in the call named `where`, as running out of memory would."""

    where = ""

    def _fail(self, where: str) -> None:
        if odd() and where == self.where:
            raise MemoryError(f"no memory left in {where}")

    def capture_optimizer_slice(self, cursor: int, budget: int, **options: Any) -> OptimizerSlice | str:
        self._fail("capture")
        return super().capture_optimizer_slice(cursor, budget, **options)

    def state_tensors(self) -> list[tuple[str, str, torch.Tensor]]:
        self._fail("state")
        return super().state_tensors()

    def apply_optimizer_slice(self, part: OptimizerSlice) -> list[torch.Tensor]:
        self._fail("apply")
        return super().apply_optimizer_slice(part)

    def materialize(self, module: nn.Module) -> Any:
        self._fail("materialize")
        return super().materialize(module)


def failing(where: str) -> list[dict[str, Any]]:
    """A check before the failure, the check it hits, and a check after it."""
    job = Job(Case())
    adapter = FailingAdapter(job.wrapped, job.optimizer, ReplayHarnessConfig())
    with scout_core.attach(job.wrapped, job.optimizer, check_interval=1, adapter=adapter, **QUIET) as scout:
        answers = []
        for adapter.where in ("", where, ""):
            step(job)
            answers.append(told(scout))
        return answers


@pytest.mark.parametrize(
    ("where", "recipes", "field"),
    [
        ("capture", ["optimizer"], "readiness"),
        ("state", ["state"], "readiness"),
        ("apply", ["optimizer"], "evidence"),
        ("materialize", ["embedding", "hidden:1", "output"], "evidence"),
    ],
)
def test_an_exception_on_one_rank_while_preparing_or_executing(
    ranks4: RankPool, where: str, recipes: list[str], field: str
) -> None:
    answers = ranks4.run(failing, where, timeout=30)
    assert all(answer[0]["status"] == answer[2]["status"] == "Agree" for answer in answers)
    assert_inconclusive([answer[1] for answer in answers], *((recipe, field) for recipe in recipes))


def break_replay(job: Job, where: str) -> Callable[[], None]:
    """Make the layers raise in SCOUT's replay alone, which is where determinism is switched on; returns the repair."""

    class Raise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            raise ValueError("broken backward")

    def broken(block: nn.Module) -> Callable[..., Any]:
        healthy = block.forward

        def forward(x: torch.Tensor) -> torch.Tensor:
            if not torch.are_deterministic_algorithms_enabled():
                return healthy(x)
            if where == "forward":
                raise ValueError("broken forward")
            return Raise.apply(healthy(x))

        return forward

    for block in job.model.blocks:
        block.forward = broken(block)

    def repair() -> None:
        for block in job.model.blocks:
            del block.forward

    return repair


def raising_layers(where: str) -> list[dict[str, Any]]:
    job = Job(Case())
    with scout_core.attach(job.wrapped, job.optimizer, check_interval=1, **QUIET) as scout:
        repair = break_replay(job, where) if odd() else lambda: None
        answers = []
        for _ in range(9):
            step(job)
            answers.append(told(scout))
        repair()
        for _ in range(3):
            step(job)
            answers.append(told(scout))
        return answers


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_layer_that_raises_on_one_rank_in_the_replay_only(ranks4: RankPool, where: str) -> None:
    answers = ranks4.run(raising_layers, where, timeout=40)
    for check in range(9):
        assert_inconclusive([answer[check] for answer in answers], (f"hidden:{check % 3}", "evidence"))
    for answer in answers:
        assert [what["status"] for what in answer[9:]] == ["Agree"] * 3, "raising must not spoil a layer for good"


def raising_model() -> list[dict[str, Any]]:
    """`check_now` on a model whose forward raises on one rank when it is recomputed, then on a whole one."""
    job = Job(Case())
    with scout_core.attach(job.wrapped, job.optimizer, check_interval=0, **QUIET) as scout:
        step(job)
        healthy = job.model.forward

        def forward(ids: torch.Tensor) -> torch.Tensor:
            raise MemoryError("no memory left")

        if odd():
            job.model.forward = forward
        scout.check_now()
        first = told(scout)
        job.model.forward = healthy
        scout.check_now()
        return [first, told(scout)]


def test_a_model_that_raises_on_one_rank_when_recomputed(ranks4: RankPool) -> None:
    answers = ranks4.run(raising_model, timeout=30)
    assert_inconclusive(
        [answer[0] for answer in answers], ("embedding", "readiness"), ("hidden", "readiness"), ("output", "readiness")
    )
    assert answers[0][0]["checked"] == ("optimizer",)
    assert all(answer[1]["status"] == "Agree" for answer in answers)


def another_configuration(overrides: dict[str, Any]) -> tuple[str, int]:
    job = Job(Case())
    with pytest.raises(ConfigError) as error:
        scout_core.attach(job.wrapped, job.optimizer, **{"check_interval": 2, **(overrides if odd() else {})})
    step(job)
    hooks = len(job.wrapped._forward_pre_hooks) + len(job.optimizer._optimizer_step_post_hooks)
    return str(error.value), hooks


@pytest.mark.parametrize(("key", "value"), [("check_interval", 3), ("hidden_interval", 0), ("straggler_relative", 1.5)])
def test_another_configuration_on_one_rank_is_refused_on_every_rank(ranks4: RankPool, key: str, value: Any) -> None:
    for message, hooks in ranks4.run(another_configuration, {key: value}, timeout=30):
        assert key in message and f"on rank {ODD}" in message and "ranks 0, 1, 3" in message
        assert hooks == 0


class NormedBlock(Block):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.pooled = nn.BatchNorm1d(width)
        self.width = width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.pooled(x[..., : self.width].transpose(1, 2)).mean()


def another_model(kind: str) -> list[dict[str, Any]]:
    """One rank built its model differently, in a job that averages nothing."""

    class Longer(LanguageModel):
        def __init__(self) -> None:
            super().__init__()
            self.blocks.append(Block())

    wider = {"width": 8} if odd() else {}
    models = {
        "buffers": lambda: LanguageModel(lambda: NormedBlock(**wider)),
        "layers": Longer if odd() else LanguageModel,
        "frozen": lambda: LanguageModel(frozen=("blocks",) if odd() else ()),
    }
    job = Job(Case(model=models[kind], wrap=replicated_by_hand))
    with scout_core.attach(job.wrapped, job.optimizer, check_interval=1, **QUIET) as scout:
        answers = []
        for _ in range(4):
            step(job)
            answers.append(told(scout))
        return answers


@pytest.mark.parametrize("kind", ["buffers", "layers", "frozen"])
def test_another_model_on_one_rank_is_named_and_nothing_hangs(ranks4: RankPool, kind: str) -> None:
    answers = ranks4.run(another_model, kind, timeout=40)
    for check in range(4):
        at_once = [answer[check] for answer in answers]
        assert all(answer["active"] and not answer["complete"] for answer in at_once)
        assert all(answer["reasons"] == at_once[0]["reasons"] for answer in at_once)
    hidden = [reason for answer in answers[0] for reason in answer["reasons"] if reason[0] == "hidden"]
    assert ("hidden", "identity", (ODD,)) in hidden
