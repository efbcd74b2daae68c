"""Slices of an update: recomputed on copies they give the live optimizer's bits, and the live one does not notice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from scout_core.pytorch.optimizer import SliceableOptimizer

SIZES = ((3, 4), (7,), (), (5, 2))
TOTAL = sum(torch.Size(size).numel() for size in SIZES)
Make = Callable[[Any], torch.optim.Optimizer]


class Counting(torch.optim.Optimizer):
    """The user's own: a norm over the whole parameter, a count that is no tensor, settings on the object."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.seen: list[int] = []

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                self.state[p]["count"] = self.state[p].get("count", 0) + 1
                self.seen.append(p.numel())
                p.sub_(p.grad / (1 + p.grad.norm()), alpha=self.state[p]["count"] * 0.1)


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "own": Counting,
}


def job(make: Make, steps: int = 2) -> tuple[list[nn.Parameter], torch.optim.Optimizer, SliceableOptimizer]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]
    middle = len(parameters) // 2
    optimizer = make([{"params": parameters[:middle]}, {"params": parameters[middle:], "lr": 0.05}])
    for _ in range(steps):
        gradients(parameters, generator)
        optimizer.step()
    gradients(parameters, generator)
    return parameters, optimizer, SliceableOptimizer(optimizer, {id(p): f"p{i}" for i, p in enumerate(parameters)})


def gradients(parameters: list[nn.Parameter], generator: torch.Generator) -> None:
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def frozen(parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> list[Any]:
    plain = {k: v for k, v in vars(optimizer).items() if isinstance(v, (list, int)) and k != "param_groups"}
    state = copy.deepcopy((optimizer.state_dict(), plain))
    return [*(p.detach().clone() for p in parameters), *(p.grad.clone() for p in parameters), state]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("steps", [0, 2], ids=["first step", "later"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize(("cursor", "budget"), [(0, 1 << 20), (5, 9), (21, 8)])
def test_a_slice_gets_the_bits_of_the_live_update(make: Make, steps: int, cursor: int, budget: int) -> None:
    parameters, optimizer, slices = job(make, steps)
    before = frozen(parameters, optimizer)
    captured = slices.capture(cursor, budget, step=steps + 1)
    assert not isinstance(captured, str)
    updated = slices.apply(captured)
    assert same(updated, slices.apply(captured)) and same(before, frozen(parameters, optimizer))
    optimizer.step()
    assert same(updated, slices.apply(captured)), "the copies must not alias what the step has changed"
    live = {f"p{i}": parameter.detach().reshape(-1) for i, parameter in enumerate(parameters)}
    for part, tensor in zip(captured.parts, updated, strict=False):
        assert torch.equal(tensor.reshape(-1), live[part.name][part.start : part.stop])
    covered = sum(part.stop - part.start for part in captured.parts)
    assert covered == min(budget, TOTAL) if slices.elementwise else covered >= min(budget, TOTAL)


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 40))
def test_consecutive_slices_cover_every_element_and_none_twice_in_one(first: int, budget: int) -> None:
    _, _, slices = job(OPTIMIZERS["sgd"], steps=0)
    seen: set[tuple[str, int]] = set()
    for number in range(-(-TOTAL // budget) + 1):
        captured = slices.capture((first + number) * budget, budget, step=1)
        assert not isinstance(captured, str)
        elements = [(part.name, i) for part in captured.parts for i in range(part.start, part.stop)]
        assert len(elements) == len(set(elements)) == min(budget, TOTAL)
        seen |= set(elements)
    assert len(seen) == TOTAL


def test_an_empty_parameter_is_passed_over() -> None:
    parameters = [nn.Parameter(torch.ones(size)) for size in (0, 3, 0, 2)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    slices = SliceableOptimizer(torch.optim.SGD(parameters, lr=0.1), {id(p): str(i) for i, p in enumerate(parameters)})
    for cursor in range(6):
        captured = slices.capture(cursor, 5, step=1)
        assert sorted((part.name, part.start) for part in captured.parts if part.start == 0) == [("1", 0), ("3", 0)]
        assert sum(part.stop - part.start for part in captured.parts) == 5


def test_a_wrong_moment_gradient_or_setting_changes_the_recomputed_update() -> None:
    parameters, optimizer, slices = job(OPTIMIZERS["adam"])
    healthy = slices.apply(slices.capture(0, TOTAL, step=3))
    for spoil in (
        lambda: optimizer.state[parameters[0]]["exp_avg"].mul_(2),
        lambda: parameters[1].grad.neg_(),
        lambda: optimizer.param_groups[1].update(lr=0.5),
    ):
        spoil()
        wrong = slices.apply(slices.capture(0, TOTAL, step=3))
        assert not same(healthy, wrong)
        healthy = wrong


def test_identity_names_the_elements_and_not_their_values() -> None:
    one, two = job(OPTIMIZERS["adam"])[2], job(OPTIMIZERS["adam"], steps=4)[2]
    assert one.capture(3, 8, step=3).identity == two.capture(3, 8, step=5).identity
    assert one.capture(3, 8, step=3).identity != one.capture(4, 8, step=3).identity


def test_parameters_without_a_gradient_are_left_out() -> None:
    parameters, _, slices = job(OPTIMIZERS["sgd"])
    parameters[0].grad = None
    captured = slices.capture(0, 1 << 20, step=3)
    assert "p0" not in {part.name for part in captured.parts}


def test_drawn_gradients_are_alike_on_every_rank_and_draw_nothing_from_training() -> None:
    state = torch.get_rng_state()
    drawn = []
    for _ in range(2):
        parameters, _, slices = job(OPTIMIZERS["sgd"])
        for parameter in parameters:
            parameter.grad = None
        captured = slices.capture(0, TOTAL, step=3, draw_missing=True)
        drawn.append([part.gradient for part in captured.parts])
        assert all(parameter.grad is None for parameter in parameters)
    assert same(*drawn) and all(bool(g.abs().max() > 0) for g in drawn[0])
    assert torch.equal(state, torch.get_rng_state())


def test_why_there_is_no_slice_is_said() -> None:
    parameters, optimizer, slices = job(OPTIMIZERS["sgd"])
    parameters[0].grad = torch.ones(3, 4).to_sparse()
    assert "sparse" in slices.capture(0, 8, step=3)
    optimizer.zero_grad()
    assert slices.capture(0, 8, step=3) == "no parameter has a gradient"
    lbfgs = torch.optim.LBFGS(parameters)
    assert "LBFGS.step(closure)" in SliceableOptimizer(lbfgs, {}).capture(0, 8, step=1)


def test_hooks_and_schedulers_of_the_live_optimizer_are_not_set_off_by_a_replay() -> None:
    _, optimizer, slices = job(OPTIMIZERS["adamw"])
    called: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: called.append(1))
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = schedule.last_epoch, optimizer.param_groups[0]["lr"], getattr(optimizer, "_opt_called", None)
    slices.apply(slices.capture(0, 8, step=3))
    assert called == []
    assert before == (schedule.last_epoch, optimizer.param_groups[0]["lr"], getattr(optimizer, "_opt_called", None))


def test_live_state_is_listed_in_parameter_order_without_copies() -> None:
    parameters, optimizer, slices = job(OPTIMIZERS["adam"])
    listed = list(slices.state_tensors())
    assert [name for _, name, _ in listed][:4] == ["p0.step", "p0.exp_avg", "p0.exp_avg_sq", "p0.max_exp_avg_sq"]
    assert {surface for surface, _, _ in listed} == {"optimizer_state"} and len(listed) == 4 * len(SIZES)
    live = [tensor for parameter in parameters for tensor in optimizer.state[parameter].values()]
    assert len(live) == len(listed)
    for tensor, (_, _, shown) in zip(live, listed, strict=True):
        tensor.fill_(7)  # seen through what was listed: the same memory
        assert shown.data_ptr() == tensor.data_ptr() and torch.equal(shown, tensor)
