"""Jobs that SCOUT cannot check as it would like: a clear message with the fix, and training goes on; or a refusal at
attach when the configuration cannot be used."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import scout_core
from scout_core import ConfigError
from tests.distributed.models import Case, Job, LanguageModel, StubbornOptimizer
from tests.distributed.pool import RankPool

QUIET = {"straggler_absolute_ms": 1e4}


@pytest.fixture(scope="module")
def pairs() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


class Lines(logging.Handler):
    """What SCOUT tells the user on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        raised = f": {record.exc_info[1]}" if record.exc_info else ""
        self.lines.append(f"{record.levelname} {record.getMessage()}{raised}")

    def __enter__(self) -> Lines:
        logging.getLogger("scout").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("scout").removeHandler(self)


class Shapeless(nn.Module):
    """Neither embedding nor layers nor a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(32, 32))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids]


class Callback(torch.optim.SGD):
    """Cannot do without a closure."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class Alone:
    """A job of one rank without a process group."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self.model = model or nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self) -> None:
        self.model(torch.ones(1, 4)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_one_rank_is_told_that_nothing_is_checked_and_trains_on(caplog: pytest.LogCaptureFixture) -> None:
    job = Alone()
    with (
        caplog.at_level(logging.WARNING, "scout"),
        scout_core.attach(job.model, job.optimizer, check_interval=1) as scout,
    ):
        before = job.model[0].weight.clone()
        job.step()
        first = scout.last_result
        assert first is not None and (first.status.value, first.trustworthy) == ("Inconclusive", False)
        told = {reason.recipe: reason.message for reason in first.inconclusive_reasons}
        assert set(told) == {"hidden:0", "optimizer", "state"} and all("nothing to compare" in t for t in told.values())
        assert scout.active and scout.step_count == 1 and list(scout.reports) == []
        result = scout.check_now()
        assert not result.trustworthy and result.sdc_ranks == () and result.peer_ranks == (0,)
        job.step()
    assert not torch.equal(before, job.model[0].weight)
    assert "one rank has no peer" in caplog.text and "train on 3 or more replicas" in caplog.text


def train(kind: str) -> dict[str, Any]:
    """Four steps of a job with something odd about it: what SCOUT said, and whether training went on."""
    cases = {
        "plain": Case(),
        "shapeless": Case(model=Shapeless),
        "stubborn": Case(optimizer=StubbornOptimizer),
        "callback": Case(optimizer=Callback, closure=True),
        "sparse": Case(model=lambda: LanguageModel(sparse=True), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)),
    }
    with Lines() as told:
        job = Job(cases[kind])
        before = [p.detach().clone() for p in job.model.parameters()]
        with scout_core.attach(job.wrapped, job.optimizer, check_interval=1, **QUIET) as scout:
            job.train(4)
            result = scout.last_result
            assert result is not None
            return {
                "rank": dist.get_rank(),
                "lines": [line for line in told.lines if not line.startswith("INFO")],
                "moved": any(not torch.equal(a, b) for a, b in zip(before, job.model.parameters(), strict=True)),
                "steps": scout.step_count,
                "active": scout.active,
                "status": result.status.value,
                "reasons": [(reason.recipe, reason.field) for reason in result.inconclusive_reasons],
                "checked": set(result.checked_recipe_ids),
                "reports": [report.message for report in scout.reports],
            }


def answers(pool: RankPool, kind: str) -> list[dict[str, Any]]:
    found = pool.run(train, kind, timeout=60)
    for answer in found:
        assert answer["moved"] and answer["active"] and answer["steps"] == 4, answer
        assert answer["reports"] == [], "what cannot be checked is no fault"
    return found


def test_two_ranks_are_told_once_what_two_cannot_tell(pairs: RankPool) -> None:
    first, second = answers(pairs, "plain")
    assert first["status"] == "Agree" and [line for line in first["lines"] if "two peers" in line] == first["lines"]
    assert "3 or more replicas name the rank" in first["lines"][0] and second["lines"] == []


def test_a_model_without_recognizable_parts_gets_its_options_named_and_what_is_left_is_checked(pairs: RankPool) -> None:
    first, _ = answers(pairs, "shapeless")
    said = "\n".join(first["lines"])
    for option in ("hidden_modules", "embedding_module", "output_module"):
        assert f"set {option} to" in said
    assert first["checked"] == {"optimizer"} and first["status"] == "Agree"


@pytest.mark.parametrize(
    ("kind", "field", "why"),
    [
        ("stubborn", "evidence", "these are not my parameters"),
        ("callback", "readiness", "optimizer.step(closure) computes its gradients inside the step"),
        ("sparse", "readiness", "sparse gradients"),
    ],
)
def test_an_optimizer_that_cannot_be_replayed_is_named_with_the_reason_and_the_rest_is_checked(
    pairs: RankPool, kind: str, field: str, why: str
) -> None:
    found = answers(pairs, kind)
    for answer in found:
        assert answer["status"] == "Inconclusive" and ("optimizer", field) in answer["reasons"], answer
        assert {recipe for recipe, _ in answer["reasons"]} == {"optimizer"}
        assert {"embedding", "output"} <= answer["checked"]
        assert why in "\n".join(answer["lines"])


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        ({"check_intervall": 1}, "did you mean 'check_interval'"),
        ({"straggler_relative": 1.0}, "greater than 1"),
        ({"straggler_absolute_ms": -1}, "greater than or equal to 0"),
        ({"straggler_persistence": 40}, "lower it"),
        ({"optimizer_slice_elements": 0}, "greater than or equal to 1"),
        ({"check_interval": "daily"}, "valid integer"),
        ({"hidden_modules": "layers"}, "has no such module"),
        ({"embedding_module": "wte"}, "its top level is 0, 1"),
        ({"config": 3}, "give a ScoutConfig, a dict, or a .json/.toml path"),
        ({"config": "no/such/file.toml"}, "cannot read the configuration file"),
    ],
)
def test_a_configuration_that_cannot_be_used_fails_at_attach_and_leaves_nothing_behind(
    overrides: dict[str, Any], fix: str
) -> None:
    job = Alone()
    with pytest.raises(ConfigError, match=fix):
        scout_core.attach(job.model, job.optimizer, **overrides)
    assert not job.model._forward_pre_hooks and not job.optimizer._optimizer_step_post_hooks
    job.step()


def test_a_handle_that_was_closed_says_so_and_training_goes_on() -> None:
    job = Alone()
    scout = scout_core.attach(job.model, job.optimizer, check_interval=1)
    scout.close()
    scout.close()
    with pytest.raises(RuntimeError, match="closed"):
        scout.check_now()
    job.step()
    assert not job.model._forward_pre_hooks and not job.optimizer._optimizer_step_post_hooks
