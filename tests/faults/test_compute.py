"""Faults of computation act on live calls and on replays of the same instance, as often as asked, and end."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scout_core import faults

Values = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(x)))


@pytest.fixture
def layer() -> Layer:
    torch.manual_seed(0)
    return Layer()


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def live(module: nn.Module) -> Values:
    """Output, input gradient and parameter gradients of one ordinary call."""
    module.zero_grad()
    x = X.clone().requires_grad_()
    out = module(x)
    out.sum().backward()
    gradients = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return out.detach(), x.grad, gradients


def replay(module: nn.Module) -> Values:
    """The same, on aliases of the parameters, which is what SCOUT's replay does."""
    aliases = {n: p.detach().requires_grad_() for n, p in module.named_parameters()}
    x = X.clone().requires_grad_()
    out = torch.func.functional_call(module, aliases, (x,))
    out.sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad, {n: p.grad for n, p in aliases.items() if p.grad is not None}


def differing(one: Values, other: Values) -> dict[str, int]:
    """How many elements of each surface differ."""
    pairs = {"output": (one[0], other[0]), "input_gradient": (one[1], other[1])}
    pairs |= {name: (one[2][name], other[2][name]) for name in one[2]}
    counts = {name: int((a != b).sum()) for name, (a, b) in pairs.items()}
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize("way", [live, replay])
def test_an_output_bit_flips(layer: Layer, way: Callable[[nn.Module], Values]) -> None:
    clean = way(layer)
    with faults.corrupt_output(layer, element=5, bit=31) as fault:
        wrong = way(layer)
        assert differing(clean, wrong) == {"output": 1}
        assert wrong[0].flatten()[5] == -clean[0].flatten()[5]
        assert fault.fired == 1
    assert differing(clean, way(layer)) == {}


@pytest.mark.parametrize("way", [live, replay])
def test_an_input_gradient_bit_flips(layer: Layer, way: Callable[[nn.Module], Values]) -> None:
    clean = way(layer)
    with faults.corrupt_input_gradient(layer, element=7, bit=31):
        assert differing(clean, way(layer)) == {"input_gradient": 1}
    assert differing(clean, way(layer)) == {}


@pytest.mark.parametrize("way", [live, replay])
def test_a_parameter_gradient_bit_flips(layer: Layer, way: Callable[[nn.Module], Values]) -> None:
    clean = way(layer)
    with faults.corrupt_parameter_gradient(layer, "first.weight", element=2, bit=31):
        assert differing(clean, way(layer)) == {"first.weight": 1}
        assert isinstance(layer.first.weight, nn.Parameter)
    assert differing(clean, way(layer)) == {}


def test_a_parameter_gradient_flips_under_checkpointing(layer: Layer) -> None:
    clean = live(layer)
    x = X.clone().requires_grad_()
    layer.zero_grad()
    with faults.corrupt_parameter_gradient(layer, "first.weight", element=2, bit=31):
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert layer.first.weight.grad is not None
    assert int((layer.first.weight.grad != clean[2]["first.weight"]).sum()) == 1


def test_a_parameter_that_is_not_there_is_refused(layer: Layer) -> None:
    with pytest.raises(AttributeError):
        faults.corrupt_parameter_gradient(layer, "third.weight", element=0, bit=0)


@pytest.mark.parametrize("way", [live, replay])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_nondeterministic_kernel_never_repeats_and_advances_no_generator(
    layer: Layer, dtype: torch.dtype, way: Callable[[nn.Module], Values]
) -> None:
    layer = layer.to(dtype)
    wide = nn.Sequential(layer, nn.Upsample(scale_factor=200)) if dtype is torch.float32 else layer
    state = torch.get_rng_state()
    with faults.nondeterministic_kernel(wide):
        outputs = [wide(X.to(dtype).unsqueeze(0)) for _ in range(20)]
    assert len({tuple(out.flatten().tolist()) for out in outputs}) > 10
    clean = wide(X.to(dtype).unsqueeze(0))
    eps = torch.finfo(dtype).eps
    assert all(bool(((out - clean).abs() <= 2 * eps * clean.abs()).all()) for out in outputs)
    assert torch.equal(state, torch.get_rng_state())


def test_a_slow_module_uses_that_much_cpu_time_of_its_own(layer: Layer) -> None:
    with faults.slow_module(layer, seconds=0.05):
        start = time.thread_time()
        layer(X)
        assert time.thread_time() - start >= 0.05
    start = time.thread_time()
    layer(X)
    assert time.thread_time() - start < 0.05


def test_every_nth_call_and_a_limited_number_of_times(layer: Layer) -> None:
    clean = layer(X)
    fault = faults.corrupt_output(layer, element=0, bit=31, every=3, times=2)
    wrong = [not torch.equal(layer(X), clean) for _ in range(12)]
    assert [i for i, bad in enumerate(wrong) if bad] == [2, 5]
    assert fault.fired == 2


def test_faults_stack_and_are_removed_in_any_order(layer: Layer) -> None:
    clean = layer(X)
    lower = faults.corrupt_output(layer, element=0, bit=31)
    upper = faults.corrupt_output(layer, element=1, bit=31)
    assert (layer(X) != clean).flatten().nonzero().flatten().tolist() == [0, 1]
    lower.remove()
    assert (layer(X) != clean).flatten().nonzero().flatten().tolist() == [1]
    upper.remove()
    assert "forward" not in vars(layer)
    upper.remove()
    assert torch.equal(layer(X), clean)


def test_a_forward_that_the_user_replaced_comes_back(layer: Layer) -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    vars(layer)["forward"] = doubled
    with faults.corrupt_output(layer, element=0, bit=31):
        assert not torch.equal(layer(X), 2 * X)
    assert vars(layer)["forward"] is doubled


def test_only_the_one_instance_is_faulty(layer: Layer) -> None:
    twin = Layer()
    twin.load_state_dict(layer.state_dict())
    with faults.corrupt_output(layer, element=0, bit=31):
        assert not torch.equal(layer(X), twin(X))
    assert torch.equal(layer(X), twin(X))


def test_outputs_in_containers(layer: Layer) -> None:
    class Nested(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"ids": torch.arange(3), "hidden": (x * 1, x * 2)}

    module = Nested()
    with faults.corrupt_output(module, element=0, bit=31):
        out = module(X)
    assert out["ids"].tolist() == [0, 1, 2]
    assert int((out["hidden"][0] != X).sum()) == 1
    assert torch.equal(out["hidden"][1], 2 * X)


def test_a_module_without_a_floating_output_says_so() -> None:
    class Ids(nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.arange(3)

    module = Ids()
    with faults.corrupt_output(module, element=0, bit=0), pytest.raises(TypeError, match="no floating-point tensor"):
        module()


@pytest.mark.parametrize("wrong", [{"every": 0}, {"times": 0}])
def test_schedules_out_of_range_are_refused(layer: Layer, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        faults.corrupt_output(layer, 0, 0, **wrong)


@pytest.mark.gpu
def test_a_slow_module_on_a_gpu(layer: Layer) -> None:
    layer, x = layer.cuda(), X.cuda()
    layer(x)
    with faults.slow_module(layer, seconds=0.05):
        layer(x)  # measures the clock
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        layer(x)
        events[1].record()
        events[1].synchronize()
    assert 40 < events[0].elapsed_time(events[1]) < 100
