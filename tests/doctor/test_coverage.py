"""Coverage of a model: pure rows and findings, and what `examine` reads from real modules."""

import io

import pytest
import torch
from torch import nn

from scout_core import ConfigError
from scout_core.doctor import examine
from scout_core.doctor.coverage import ModelFacts, ParameterFact, coverage_findings, recipe_coverage


class Tiny(nn.Module):
    """Embedding, three layers, a final norm outside them, a head; optionally one of its oddities."""

    def __init__(self, *, sparse: bool = False, tied: bool = False, buffer: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(16, 8, sparse=sparse)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        if buffer:
            self.register_buffer("positions", torch.zeros(4))


class NoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Conv1d(4, 4, 1)


class Shampooish(torch.optim.Optimizer):
    def __init__(self, parameters) -> None:
        super().__init__(parameters, {})

    def step(self, closure=None) -> None:
        return None


def look(model, optimizer=None, **overrides):
    optimizer = optimizer or torch.optim.AdamW(model.parameters())
    return examine(model, optimizer, file=io.StringIO(), **overrides)


def found(examination) -> dict[str, str]:
    return {f.id: f.severity for f in examination.findings}


def test_surfaces_peers_and_cycles_of_a_plain_model():
    told = io.StringIO()
    model = Tiny()
    result = examine(model, torch.optim.AdamW(model.parameters()), file=told, check_interval=10, hidden_interval=20)
    rows = {row.recipe: row for row in result.coverage}
    assert list(rows) == ["embedding", "hidden", "output", "optimizer", "state"]
    assert rows["embedding"].covers == "tokens" and rows["output"].covers == "head"
    assert "blocks.0 ... blocks.2" in rows["hidden"].covers
    assert [(row.every_steps, row.whole_after_steps) for row in rows.values()] == [
        (10, 10), (20, 60), (10, 10), (10, 10), (10, 10),
    ]  # fmt: skip
    assert {row.peers for row in rows.values()} == {1}
    assert found(result)["peers"] == "warning"
    text = told.getvalue()
    assert "blocks.0" in text and "fix: train on 3 or more replicas" in text and "tokens" in text


def test_slices_and_state_windows_take_turns():
    model = Tiny()
    elements = sum(p.numel() for p in model.parameters())
    result = look(model, check_interval=5, optimizer_slice_elements=100)
    row = next(row for row in result.coverage if row.recipe == "optimizer")
    assert row.whole_after_steps == 5 * -(-elements // 100)


def test_parameters_outside_the_recipes_are_named():
    result = look(Tiny(), check_interval=5)
    (outside,) = [f for f in result.findings if f.id == "parameters-outside"]
    assert outside.severity == "info" and "norm.weight, norm.bias" in outside.message
    blind = look(Tiny(), compare_parameters=False)
    (outside,) = [f for f in blind.findings if f.id == "parameters-outside"]
    assert outside.severity == "warning" and "compare_parameters=True" in outside.fix


def test_a_tied_head_is_inside():
    result = look(Tiny(tied=True))
    (shared,) = [p for p in result.model.parameters if p.name == "tokens.weight"]
    assert shared.surfaces == ("tokens", "head")


def test_a_model_without_layers_says_what_to_set():
    result = look(NoLayers())
    missing = [f for f in result.findings if f.id == "surface-missing"]
    assert {f.severity for f in missing} == {"warning"}
    assert any("hidden_modules" in f.fix for f in missing) and any("embedding_module" in f.fix for f in missing)


def test_a_wrong_name_is_an_error():
    with pytest.raises(ConfigError, match="hidden_modules"):
        look(Tiny(), hidden_modules="layers")


def test_buffers_outside_are_named_and_those_inside_are_not():
    result = look(Tiny(buffer=True))
    (outside,) = [f for f in result.findings if f.id == "buffers-outside"]
    assert "positions" in outside.message and "running_mean" not in outside.message
    assert "buffers-outside" not in found(look(Tiny()))


def test_optimizers_that_cannot_be_replayed_or_only_whole():
    model = Tiny()
    lbfgs = look(model, torch.optim.LBFGS(model.parameters()))
    assert found(lbfgs)["optimizer-not-replayed"] == "warning"
    assert "optimizer" not in {row.recipe for row in lbfgs.coverage}
    sparse = Tiny(sparse=True)
    result = look(sparse, torch.optim.SGD(sparse.parameters(), lr=0.1))
    assert found(result)["optimizer-not-replayed"] == "warning"
    other = look(model, Shampooish(model.parameters()))
    assert found(other)["optimizer-whole"] == "info"
    assert not {"optimizer-whole", "optimizer-not-replayed"} & set(found(look(model)))


def test_parameters_that_this_optimizer_does_not_own():
    model, foreign = Tiny(), nn.Linear(3, 3)
    partial = look(model, torch.optim.SGD(model.blocks.parameters(), lr=0.1))
    (idle,) = [f for f in partial.findings if f.id == "parameters-not-stepped"]
    assert "tokens.weight" in idle.message and "blocks" not in idle.message
    more = look(model, torch.optim.SGD([*model.parameters(), *foreign.parameters()], lr=0.1))
    (extra,) = [f for f in more.findings if f.id == "parameters-foreign"]
    assert "12 elements" in extra.message
    model.tokens.weight.requires_grad_(False)
    frozen = look(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    assert "parameters-not-stepped" not in found(frozen)


def test_examining_changes_nothing():
    model = Tiny()
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    look(model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert not model._forward_pre_hooks and not optimizer.state


def facts(**changes) -> ModelFacts:
    base = {
        "peers": (0, 1, 2),
        "embedding": "tokens",
        "hidden": ("blocks.0", "blocks.1"),
        "output": "head",
        "parameters": (ParameterFact(name="tokens.weight", elements=10, surfaces=("tokens",)),),
        "optimizer": "AdamW",
        "intervals": dict.fromkeys(("embedding", "hidden", "output", "optimizer"), 10),
    }
    return ModelFacts(**{**base, **changes})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"compiled": True}, {"compiled": "info"}),
        ({"ignored": ("extra",)}, {"parameters-ignored": "warning"}),
        ({"shards": 4}, {"single-owner": "warning"}),
        ({"shards": 4, "copies": 2}, {}),
        ({"deterministic": False}, {"replay-determinism": "warning"}),
        ({"intervals": {"embedding": 0, "hidden": 5}}, {"recipes-off": "info"}),
        ({"intervals": {"embedding": 0, "hidden": 0}}, {"recipes-off": "info"}),
    ],
)
def test_findings_of_model_facts(changes, expected):
    assert {f.id: f.severity for f in coverage_findings(facts(**changes))} == expected


def test_recipes_without_an_interval_are_never_whole():
    rows = recipe_coverage(facts(intervals=dict.fromkeys(("embedding", "hidden", "output", "optimizer"), 0)))
    assert {(row.every_steps, row.whole_after_steps) for row in rows} == {(0, None)}


def test_state_follows_the_shortest_interval():
    rows = recipe_coverage(
        facts(intervals={"embedding": 0, "hidden": 7, "output": 3, "optimizer": 9}, state_bytes=40 << 20)
    )
    state = rows[-1]
    assert (state.recipe, state.every_steps, state.whole_after_steps) == ("state", 3, 9)
