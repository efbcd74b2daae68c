"""The error bound of a reference: no honest computation is ever outside, and what is broken is."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from scout_core.adapter import OptimizerSlice, SlicePart
from scout_core.replay.capture import Invocation, TensorMeta
from scout_core.replay.execute import Received, execute
from scout_core.replay.isolation import AutocastState
from scout_core.replay.reference import ModuleSubject, Obstacle, SliceSubject, measure
from scout_core.replay.trees import hollow

WIDTH, ROWS = 48, 5
SURFACES = ("output", "input_gradient", "parameter_gradient")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
BIG = 1 << 30


class Split(nn.Module):
    """y = x W in `pieces` parts of the contraction, each rounded, added from the last to the first: another kernel."""

    def __init__(self, pieces: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / math.sqrt(WIDTH))
        self.bias = nn.Parameter(torch.randn(WIDTH) / 8)
        self.pieces = pieces

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = zip(x.chunk(self.pieces, -1), self.weight.chunk(self.pieces, 0), strict=True)
        products = [a @ b for a, b in parts]
        total = products[-1]
        for product in reversed(products[:-1]):
            total = total + product
        return total + self.bias


class Perceptron(nn.Module):
    def __init__(self, pieces: int = 1, act: Any = F.gelu) -> None:
        super().__init__()
        self.up, self.down, self.act = Split(pieces), Split(pieces), act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


class Normed(nn.Module):
    """A norm whose variance is taken in one of two ways; the inputs have a mean that must cancel."""

    def __init__(self, pieces: int = 1) -> None:
        super().__init__()
        self.gain, self.pieces = nn.Parameter(torch.ones(WIDTH)), pieces

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 3
        mean = x.mean(-1, keepdim=True)
        square = (x - mean).square()
        parts = [part.sum(-1, keepdim=True) for part in square.chunk(self.pieces, -1)]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return (x - mean) * torch.rsqrt(total / WIDTH + 1e-3) * self.gain


class Attending(nn.Module):
    def __init__(self, pieces: int = 1) -> None:
        super().__init__()
        self.query, self.key, self.value, self.pieces = Split(pieces), Split(pieces), Split(pieces), pieces

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.query(x), self.key(x), self.value(x)
        if self.pieces == 1:
            return F.scaled_dot_product_attention(q[None], k[None], v[None])[0]
        return torch.softmax((q @ k.T) / math.sqrt(WIDTH), -1) @ v


class Scaled(nn.Module):
    """One scalar whose gradient is a sum that cancels."""

    def __init__(self, pieces: int = 1) -> None:
        super().__init__()
        self.temperature, self.pieces = nn.Parameter(torch.ones(())), pieces

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([part * self.temperature for part in x.chunk(self.pieces, -1)], -1)


class Looked(nn.Module):
    def __init__(self, pieces: int = 1) -> None:
        super().__init__()
        self.table, self.pieces = nn.Parameter(torch.randn(3, WIDTH)), pieces

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([F.embedding(part, self.table) for part in ids.chunk(self.pieces)], 0)


MODULES = {
    "linear": Split,
    "gelu": Perceptron,
    "relu": lambda pieces=1: Perceptron(pieces, F.relu),
    "norm": Normed,
    "attention": Attending,
    "scalar": Scaled,
    "embedding": Looked,
}


def subject_of(kind: str, dtype: torch.dtype, seed: int) -> tuple[ModuleSubject, nn.Module]:
    """The module on random inputs, and a twin with the same parameters that adds up in another order."""
    torch.manual_seed(seed)
    module, twin = MODULES[kind]().to(dtype), MODULES[kind](pieces=4).to(dtype)
    twin.load_state_dict(module.state_dict())
    x = torch.randint(0, 3, (64,)) if kind == "embedding" else torch.randn(ROWS, WIDTH).to(dtype).requires_grad_()
    gradient = torch.randn(64 if kind == "embedding" else ROWS, WIDTH).to(dtype)
    invocation = Invocation(
        step=0,
        arguments=hollow(((x,), {})),
        input_metas=[TensorMeta.of(x)],
        inputs=None,
        autocast=AutocastState.current(),
        training=True,
        gradient_metas={0: TensorMeta.of(gradient)},
    )
    received = Received(inputs=[x.detach()], gradients={0: gradient}, buffers={})
    return ModuleSubject(module=module, invocation=invocation, received=received, seed=seed), twin


def live_of(subject: ModuleSubject, module: nn.Module) -> dict[str, Any]:
    done = execute(module, subject.invocation, subject.received, seed=subject.seed)
    return {
        "output": done.outputs,
        "input_gradient": done.input_gradients,
        "parameter_gradient": done.parameter_gradients,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", MODULES)
def test_no_honest_order_of_summation_is_outside(kind: str, dtype: torch.dtype) -> None:
    for seed in range(12):
        subject, twin = subject_of(kind, dtype, seed)
        for module in (subject.module, twin):
            measured = measure(subject, live_of(subject, module), SURFACES, BIG)
            assert measured.obstacle is Obstacle.NONE and measured.ratio <= 1, (seed, measured)


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize("kind", ["linear", "gelu", "attention"])
def test_a_sign_or_a_number_that_is_none_is_outside(kind: str, surface: str) -> None:
    subject, _ = subject_of(kind, torch.float32, 3)
    for wrong in (-1.0, float("nan"), float("inf")):
        live = live_of(subject, subject.module)
        tensor = live[surface][0].view(-1)
        tensor[int(tensor.abs().argmax())] *= wrong
        assert measure(subject, live, SURFACES, BIG).ratio > 1


def test_the_reference_is_the_same_wherever_the_result_is_not_and_the_subject_stays_as_it_was() -> None:
    subject, twin = subject_of("gelu", torch.float32, 1)
    before = [p.detach().clone() for p in subject.module.parameters()]
    random = torch.get_rng_state()
    first = measure(subject, live_of(subject, subject.module), SURFACES, BIG)
    second = measure(subject, live_of(subject, twin), SURFACES, BIG)
    assert first.signature == second.signature != 0 and first.ratio != second.ratio
    assert all(torch.equal(a, b) for a, b in zip(before, subject.module.parameters(), strict=True))
    assert all(p.grad is None for p in subject.module.parameters()) and torch.equal(random, torch.get_rng_state())


def test_too_large_and_random_and_infinite_ones_say_so() -> None:
    subject, _ = subject_of("linear", torch.float32, 1)
    live = live_of(subject, subject.module)
    assert measure(subject, live, SURFACES, 64).obstacle is Obstacle.TOO_LARGE
    dropping = ModuleSubject(
        module=nn.Sequential(subject.module, nn.Dropout(0.5)),
        invocation=subject.invocation,
        received=subject.received,
        seed=1,
    )
    assert measure(dropping, live, ("output",), BIG).obstacle is Obstacle.RANDOM
    with torch.no_grad():
        subject.module.weight[0, 0] = float("nan")
    assert measure(subject, live, SURFACES, BIG).obstacle is Obstacle.NONFINITE


def update(part: OptimizerSlice, fused: bool = False) -> list[torch.Tensor]:
    updated, states = [], []
    for piece in part.parts:
        parameter = nn.Parameter(piece.parameter.clone())
        parameter.grad = piece.gradient.clone()
        optimizer = torch.optim.AdamW([parameter], lr=1e-2, fused=fused)
        optimizer.state[parameter] = {key: value.clone() for key, value in piece.state.items()}
        optimizer.step()
        updated.append(parameter.detach())
        states += list(optimizer.state[parameter].values())
    return [*updated, *states]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_update_by_another_kernel_is_inside_and_a_wrong_one_outside(dtype: torch.dtype) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        state = {"step": torch.tensor(3.0 + seed), "exp_avg": torch.randn(99), "exp_avg_sq": torch.rand(99)}
        state = {key: value if key == "step" else value.to(dtype) for key, value in state.items()}
        part = SlicePart(
            name="w",
            start=0,
            stop=99,
            parameter=torch.randn(99).to(dtype),
            gradient=torch.randn(99).to(dtype),
            state=state,
            group=0,
        )
        captured = OptimizerSlice(parts=(part,), hyperparameters=[{}], identity=0, step=1)
        subject = SliceSubject(captured=captured, apply=update)
        for fused in (False, True):
            live = {"updated_state": update(captured, fused)}
            assert measure(subject, live, ("updated_state",), BIG).ratio <= 1
        live["updated_state"][0][int(live["updated_state"][0].abs().argmax())] *= -1
        assert measure(subject, live, ("updated_state",), BIG).ratio > 1
