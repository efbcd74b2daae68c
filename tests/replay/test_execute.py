"""Capture and replay of one module in one process: the replay gives what the live step gave and touches nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from scout_core.peers import PeerGroup
from scout_core.replay.capture import Invocation, ModuleCapture, RootInput, recompute
from scout_core.replay.execute import Execution, Received, execute
from scout_core.replay.isolation import preserved_state
from scout_core.replay.transport import Parcel, carry

WIDTH = 4
ALONE = PeerGroup(ranks=(0,), rank=0, control=None, data=None)


@contextmanager
def captured(module: nn.Module, **options: Any) -> Iterator[ModuleCapture]:
    capture = ModuleCapture(module, **{"step": 1, "keep": True, "running": {}, **options})
    try:
        yield capture
    finally:
        capture.remove()


def receive(module: nn.Module, invocation: Invocation) -> Received:
    return carry([Parcel(recipe_id="r", module=module, invocation=invocation)], ALONE, 0)["r"]


def replay(module: nn.Module, invocation: Invocation, seed: int = 0) -> Execution:
    with preserved_state():
        return execute(module, invocation, receive(module, invocation), seed=seed)


def bits(tensors: Any) -> list[bytes | None]:
    return [
        None if t is None else t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors
    ]


class Keyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, stream: dict[str, Any], *, gain: float) -> dict[str, Any]:
        x, bias = stream["x"]
        return {"x": (self.inner(x) * gain + bias,), "note": "kept"}


class InPlace(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.mul_(2)).add_(1)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("level", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.level = 0.9 * self.level + x.detach().mean()
        return self.norm(x) * self.level


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Frozen(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self[0].requires_grad_(False)


@dataclass(frozen=True, kw_only=True)
class Kind:
    make: Callable[[], nn.Module]
    call: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda module, x: module(x)
    autocast: bool = False


KINDS = {
    "linear": Kind(make=lambda: nn.Linear(WIDTH, WIDTH)),
    "keyword": Kind(make=Keyword, call=lambda m, x: m({"x": (x, torch.ones(WIDTH))}, gain=0.5)["x"][0]),
    "in place": Kind(make=lambda: InPlace(WIDTH, WIDTH), call=lambda m, x: m(x * 1)),
    "normed": Kind(make=Normed),
    "reentrant": Kind(make=lambda: Checkpointed(True)),
    "non-reentrant": Kind(make=lambda: Checkpointed(False)),
    "frozen": Kind(make=Frozen),
    "autocast": Kind(make=lambda: nn.Linear(WIDTH, WIDTH), autocast=True),
    "lstm": Kind(make=lambda: nn.LSTM(WIDTH, WIDTH), call=lambda m, x: m(x)[0] + m.hidden_size),
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_a_replay_gives_the_live_bits_and_leaves_live_state_alone(kind: Kind) -> None:
    torch.manual_seed(0)
    module = kind.make()
    x = torch.randn(3, WIDTH, requires_grad=True)
    entered: list[torch.Tensor] = []
    with captured(module) as capture, torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind.autocast):
        out = kind.call(module, x)
        weight = torch.randn(out.shape)
        entered.append(out.detach().clone())
        (out.float() * weight).sum().backward()
    invocation = capture.invocation
    assert invocation is not None and invocation.complete and not capture.failed and invocation.problem is None
    gradients = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
    buffers = [b.clone() for b in module.buffers()]
    identities = [id(t) for t in (*module.parameters(), *module.buffers())]

    received = receive(module, invocation)
    before = bits(received.tensors())
    first = execute(module, invocation, received, seed=0)
    again = execute(module, invocation, received, seed=0)

    live = [g for p, g in zip(module.parameters(), gradients, strict=True) if p.requires_grad]
    if kind is not KINDS["normed"]:  # it starts from the statistics that the live call left behind
        assert bits(first.parameter_gradients) == bits(live)
        assert (entered[0] == first.outputs[0] + (module.hidden_size if isinstance(module, nn.LSTM) else 0)).all()
    for field in ("outputs", "input_gradients", "parameter_gradients"):
        assert bits(getattr(first, field)) == bits(getattr(again, field))
    assert bits(received.tensors()) == before
    assert bits(p.grad for p in module.parameters()) == bits(gradients)
    assert bits(module.buffers()) == bits(buffers)
    assert [id(t) for t in (*module.parameters(), *module.buffers())] == identities


def step(module: nn.Module, x: torch.Tensor) -> None:
    module(x).square().sum().backward()


def test_the_input_is_copied_before_a_later_operation_overwrites_it() -> None:
    class Shift(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.bias

    module, x = Shift(WIDTH, WIDTH), torch.ones(2, WIDTH)
    with captured(module) as capture:
        out = module(x)
        x.zero_()
        out.sum().backward()
    assert capture.invocation.inputs[0].tolist() == [[1.0] * WIDTH] * 2


def test_peers_that_are_not_the_source_keep_sizes_only() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    with captured(module) as source:
        step(module, torch.ones(2, WIDTH))
    with captured(module, keep=False) as peer:
        step(module, torch.ones(5, WIDTH))
    assert peer.invocation.inputs is None and peer.invocation.gradients == {}
    assert [meta.shape for meta in peer.invocation.metas()] == [(5, WIDTH), (5, WIDTH)]
    assert peer.invocation.structure() == source.invocation.structure()
    assert peer.invocation.shape() != source.invocation.shape()


@pytest.mark.parametrize("what", ["dtype", "argument", "mode", "autocast"])
def test_structure_tells_calls_apart_that_cannot_be_replayed_on_each_other(what: str) -> None:
    module = Keyword()
    seen = []
    for other in (False, True):
        with captured(module) as capture:
            module.train(not (other and what == "mode"))
            dtype = torch.float64 if other and what == "dtype" else torch.float32
            stream = {"x": (torch.ones(2, WIDTH), torch.ones(WIDTH, dtype=dtype))}
            on = other and what == "autocast"
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
                out = module(stream, gain=0.25 if other and what == "argument" else 0.5)
            out["x"][0].sum().backward()
        seen.append(capture.invocation.structure())
    assert seen[0] != seen[1]


def test_a_call_without_gradients_is_not_taken_and_one_without_backward_is_incomplete() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    with captured(module) as capture:
        with torch.no_grad():
            module(torch.ones(1, WIDTH))
        assert capture.invocation is None
        module(torch.ones(2, WIDTH))
    assert capture.invocation is not None and not capture.invocation.complete


def test_the_newest_pass_that_got_its_gradients_is_the_one() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    with captured(module) as capture:
        for rows in (1, 2):
            capture.next_pass()
            step(module, torch.ones(rows, WIDTH))
        capture.next_pass()
        module(torch.ones(3, WIDTH))
    assert capture.invocation.input_metas[0].shape == (2, WIDTH)


def test_removed_hooks_record_nothing_and_leave_the_module_bare() -> None:
    module = nn.Linear(WIDTH, WIDTH)
    with captured(module) as capture:
        pass
    step(module, torch.ones(1, WIDTH))
    assert capture.invocation is None
    assert not module._forward_hooks and not module._forward_pre_hooks


def test_an_argument_that_cannot_be_carried_is_named() -> None:
    class Cache:
        """Of the user's own."""

    class Taking(nn.Linear):
        def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
            return super().forward(x)

    module = Taking(WIDTH, WIDTH)
    with captured(module) as capture:
        module(torch.ones(1, WIDTH), cache=Cache()).sum().backward()
    assert "Cache cannot be carried to another rank" in str(capture.invocation.problem)


def test_buffers_that_a_call_changes_are_named_even_if_their_version_does_not_say_so() -> None:
    module = Normed()
    running: dict[bool, frozenset[str]] = {}
    for _ in range(2):
        with captured(module, running=running) as capture:
            step(module, torch.randn(3, WIDTH))
        changed = {"level", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
        assert set(capture.invocation.changed_buffers) == changed
    module.norm.eval()


def finite(invocation: Invocation) -> bool:
    return all(bool(flag) for flag in invocation.finite)


@pytest.mark.parametrize("where", ["input", "gradient"])
def test_numbers_that_are_none_are_seen_before_any_reduction(where: str) -> None:
    module, x = nn.Linear(WIDTH, WIDTH), torch.ones(2, WIDTH, requires_grad=True)
    with captured(module, keep=False) as capture:
        (module(x) * 1.0).sum().backward()
    assert finite(capture.invocation)
    bad = torch.ones(2, WIDTH)
    bad[1, 1] = float("nan")
    with captured(module, keep=False) as capture:
        out = module(bad.requires_grad_() if where == "input" else x)
        (out.nan_to_num() * (bad if where == "gradient" else 1.0)).sum().backward()
    assert not finite(capture.invocation)


def test_a_very_large_output_gradient_is_drawn_alike_everywhere_and_not_carried() -> None:
    head = nn.Linear(WIDTH, 64 * WIDTH)
    with captured(head) as capture:
        step(head, torch.ones(2, WIDTH))
    assert capture.invocation.drawn == [0] and capture.invocation.gradients == {} and capture.invocation.complete
    runs = [replay(head, capture.invocation, seed=seed).parameter_gradients for seed in (1, 1, 2)]
    assert bits(runs[0]) == bits(runs[1]) != bits(runs[2])


def test_dropout_follows_the_seed_that_peers_share() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    with captured(module) as capture:
        step(module, torch.ones(8, WIDTH))
    received = receive(module, capture.invocation)
    outputs = []
    for seed in (1, 1, 2):
        with preserved_state():
            torch.manual_seed(seed)
            outputs.append(bits(execute(module, capture.invocation, received, seed=0).outputs))
    assert outputs[0] == outputs[1] != outputs[2]


def test_a_hook_that_fails_is_told_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(nn.Linear):
        def buffers(self, recurse: bool = True) -> Any:
            raise RuntimeError("no buffers today")

    module = Odd(WIDTH, WIDTH)
    with captured(module) as capture:
        step(module, torch.ones(1, WIDTH))
    assert capture.failed and module.weight.grad is not None and "training goes on" in caplog.text


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)
        self.unused = nn.Linear(1, 1)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.last(F.relu(self.norm(self.first(x))))


def test_invocations_can_be_had_from_the_last_training_input_alone() -> None:
    model, passes = Model(), []
    root = RootInput(model, lambda: passes.append(1))
    step(model, torch.randn(5, WIDTH))
    with torch.no_grad():
        model.eval()(torch.ones(9, WIDTH))
    model.train()
    assert len(passes) == model.calls == 2
    before = [b.clone() for b in model.buffers()]
    with captured(model.last) as live:
        pass
    found = recompute(
        model, root, [model.last, model.unused], [{}, {}], step=1, keep=True, forward_only=torch.enable_grad()
    )
    assert found[0].input_metas[0].shape == (5, WIDTH) and found[0].recomputed and found[0].complete
    assert found[1] is None and live.invocation is None
    assert bits(model.buffers()) == bits(before) and model.calls == 2
    assert bits(replay(model.last, found[0]).outputs) == bits(replay(model.last, found[0]).outputs)
    root.remove()
    assert root.call is None and not model._forward_pre_hooks
    assert recompute(model, root, [model.last], [{}], step=1, keep=True, forward_only=torch.enable_grad()) == [None]
