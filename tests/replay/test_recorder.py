"""What a rank has in hand for a check: hooks for one step only, and a contract that says what is missing and why."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scout_core import ReplayHarnessConfig
from scout_core.consensus.readiness import Readiness
from scout_core.pytorch import PyTorchAdapter
from scout_core.replay.recorder import Prepared, Recorder
from scout_core.replay.schedule import Plan, plan_all, plan_step

EVERYTHING = ("embedding", "hidden", "output", "optimizer")
CONFIG = ReplayHarnessConfig(check_interval=1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 8)
        self.skipped: int | None = None

    def forward(self, ids: torch.Tensor, note: Any = None) -> torch.Tensor:
        x = self.embedding(ids)
        for index, block in enumerate(self.blocks):
            x = x if index == self.skipped else block(x)
        return self.head(x)


class Bench:
    """One rank's model, optimizer and recorder, driven by hand."""

    def __init__(self) -> None:
        self.model = Model()
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.adapter = PyTorchAdapter(self.model, self.optimizer, CONFIG)
        self.recorder = Recorder(self.adapter, self.adapter.surfaces(), CONFIG)

    def plan(self, step: int = 1) -> Plan:
        plan = plan_step(step, CONFIG, (0, 1), EVERYTHING)
        assert plan is not None
        return plan

    def forward_backward(self, length: int = 3) -> None:
        self.model(torch.ones(2, length, dtype=torch.int64)).square().sum().backward()

    def check(self, step: int = 1, length: int = 3, keep: bool = True) -> Prepared:
        plan = self.plan(step)
        self.recorder.arm(plan, keep=keep)
        self.forward_backward(length)
        self.recorder.capture_slice(plan)
        prepared = self.recorder.prepare(plan, keep=keep)
        self.recorder.disarm()
        return prepared

    def hooks(self) -> int:
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        return sum(len(getattr(module, kind)) for module in self.model.modules() for kind in kinds)


def readiness(prepared: Prepared) -> dict[str, Readiness]:
    return {name: contract.readiness for name, contract in prepared.contracts.items()}


def test_after_a_step_that_was_armed_everything_is_ready() -> None:
    prepared = Bench().check()
    assert set(readiness(prepared).values()) == {Readiness.READY} and len(prepared.contracts) == 5
    assert set(prepared.invocations) == {"embedding", "hidden:0", "output"} and prepared.slice is not None
    assert {surface for surface, _, _ in prepared.state} == {"parameter_state"}


def test_hooks_stand_for_the_armed_step_only_and_one_on_the_root_until_the_end() -> None:
    bench = Bench()
    assert bench.hooks() == 1
    bench.recorder.arm(bench.plan(), keep=True)
    assert bench.hooks() == 1 + 3 * 2
    bench.recorder.disarm()
    assert bench.hooks() == 1
    bench.recorder.close()
    assert bench.hooks() == 0


def test_a_step_that_was_not_armed_or_not_run_has_no_capture() -> None:
    bench = Bench()
    bench.forward_backward()
    prepared = bench.recorder.prepare(bench.plan(), keep=True)
    missing = {name for name, state in readiness(prepared).items() if state is Readiness.NO_CAPTURE}
    assert missing == set(EVERYTHING)
    bench.model.skipped = 0
    assert readiness(bench.check())["hidden"] is Readiness.NO_CAPTURE


def test_equal_ranks_state_equal_contracts_and_other_sizes_differ_in_shape_alone() -> None:
    one, same, longer = Bench().check(), Bench().check(keep=False), Bench().check(length=5)
    assert one.contracts == same.contracts
    for name in ("embedding", "hidden", "output"):
        mine, other = one.contracts[name], longer.contracts[name]
        assert (mine.identity, mine.structure, mine.capture_step) == (other.identity, other.structure, 1)
        assert mine.shape != other.shape
    assert one.contracts["optimizer"] == longer.contracts["optimizer"]


def test_another_step_or_another_module_differs_in_the_field_for_it() -> None:
    bench, frozen = Bench(), Bench()
    frozen.model.head.bias.requires_grad_(False)
    one, later = bench.check(1).contracts, Bench().check(2).contracts
    assert one["embedding"].capture_step == 1 and later["embedding"].capture_step == 2
    assert one["hidden"].identity != later["hidden"].identity, "the next layer's turn"
    assert one["output"].identity != frozen.check().contracts["output"].identity


def test_off_schedule_everything_is_recomputed_from_the_last_input_without_gradients_at_hand() -> None:
    bench = Bench()
    plan = plan_all(1, 1, CONFIG, (0, 1), EVERYTHING)
    assert readiness(bench.recorder.prepare(plan, keep=True))["hidden"] is Readiness.NO_CAPTURE, "nothing ran yet"
    bench.forward_backward()
    bench.optimizer.zero_grad()
    random_state = torch.get_rng_state()
    prepared = bench.recorder.prepare(plan, keep=True)
    assert set(readiness(prepared).values()) == {Readiness.READY}
    assert set(prepared.invocations) == {"embedding", "hidden:0", "hidden:1", "output"}
    assert torch.equal(random_state, torch.get_rng_state())
    assert all(p.grad is None for p in bench.model.parameters()) and bench.hooks() == 1


def test_what_raises_while_preparing_becomes_part_of_the_contract() -> None:
    bench = Bench()

    def broken() -> Any:
        raise MemoryError("no room")

    bench.adapter.state_tensors = broken  # type: ignore[method-assign]
    bench.adapter.capture_optimizer_slice = lambda *_, **__: broken()  # type: ignore[method-assign]
    found = readiness(bench.check())
    assert found["state"] is found["optimizer"] is Readiness.FAILED and found["hidden"] is Readiness.READY


def test_an_argument_that_cannot_be_carried_makes_the_recipe_unavailable() -> None:
    bench = Bench()
    bench.model.blocks[0].forward = lambda x, cache=None: x  # type: ignore[method-assign]
    plan = bench.plan()
    bench.recorder.arm(plan, keep=True)
    bench.model.blocks[0](torch.ones(1, 4, requires_grad=True), cache=iter([1])).sum().backward()
    assert readiness(bench.recorder.prepare(plan, keep=True))["hidden"] is Readiness.UNAVAILABLE
