"""A module may change whatever it keeps in attributes; afterwards all of it is as it was, object for object."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from scout_core.replay.private_state import preserved_attributes


def snapshot(value: Any) -> Any:
    """Identity and content of a value, nested containers included."""
    if isinstance(value, torch.Tensor):
        return id(value), value.detach().clone().tolist()
    if isinstance(value, dict):
        return id(value), [(key, snapshot(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return id(value), [snapshot(item) for item in value]
    return (id(value), set(value)) if isinstance(value, set) else value


def spoil(value: Any) -> None:
    """Change a value in place, as deep as there is anything to change."""
    if isinstance(value, torch.Tensor) and value.numel() and value.is_floating_point():
        value.detach().add_(1)
    elif isinstance(value, dict):
        for item in list(value.values()):
            spoil(item)
        value["new"] = 1
        value.pop(next(iter(value)))
    elif isinstance(value, (list, deque)):
        for item in value:
            spoil(item)
        value.reverse()
        value.append("new")
    elif isinstance(value, set):
        value.add("new")


plain = st.integers(-3, 3) | st.text(max_size=2) | st.just(torch.zeros(2)).map(torch.clone)
values = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(deque),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(lambda d: defaultdict(int, d)),
        st.sets(st.integers(0, 3)),
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), values), values)
def test_attributes_are_restored_exactly(attributes: dict[str, Any], other: Any) -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    part = module[0]
    for name, value in attributes.items():
        setattr(part, name, value)
    before = {name: snapshot(value) for name, value in vars(part).items()}
    with preserved_attributes(module):
        for name in attributes:
            spoil(getattr(part, name))
        part.added, part.b = 1, other
        vars(part).pop("c", None)
    assert {name: snapshot(value) for name, value in vars(part).items()} == before


def test_tensors_within_are_copies_of_equal_value_but_parameters_stay() -> None:
    module = nn.Linear(2, 2)
    module.average = torch.ones(2)
    module.cache = {"deep": [torch.full((1,), 5.0)]}
    live = module.average, module.cache["deep"][0], module.weight
    with preserved_attributes(module):
        assert module.average is not live[0] and module.average.tolist() == [1, 1]
        assert module.cache["deep"][0] is not live[1] and module.cache["deep"][0].item() == 5
        assert module.weight is live[2]
    assert (module.average, module.cache["deep"][0], module.weight) == live


def test_registries_may_grow_shrink_and_be_rebound() -> None:
    module = nn.BatchNorm1d(2)
    before = {kind: dict(getattr(module, kind)) for kind in ("_parameters", "_buffers", "_modules")}
    with preserved_attributes(module):
        module.running_mean = torch.ones(2)
        module.register_buffer("extra", torch.ones(1))
        del module.bias
        module.child = nn.ReLU()
        module.eval()
    assert module.training
    for kind, entries in before.items():
        assert list(getattr(module, kind)) == list(entries)
        assert all(getattr(module, kind)[key] is value for key, value in entries.items())


@pytest.mark.parametrize("seed", [None, 5])
def test_generators_go_on_where_they_were_and_draw_alike_from_a_seed(seed: int | None) -> None:
    drawn = []
    for start in (1, 2):
        module = nn.Identity()
        module.torch, module.python = torch.Generator().manual_seed(start), random.Random(start)
        module.numpy, module.legacy = np.random.default_rng(start), np.random.RandomState(start)

        def draw(m: Any = module) -> list[float]:
            values = [m.python.random(), float(m.numpy.random()), float(m.legacy.rand())]
            return [*values, float(torch.rand((), generator=m.torch))]

        with preserved_attributes(module, seed=seed):
            drawn.append(draw())
        fresh = [random.Random(start).random(), float(np.random.default_rng(start).random())]
        fresh += [float(np.random.RandomState(start).rand())]
        fresh += [float(torch.rand((), generator=torch.Generator().manual_seed(start)))]
        assert draw() == fresh
    assert (drawn[0] == drawn[1]) == (seed is not None)


def test_state_is_put_back_when_the_block_raises() -> None:
    module = nn.Identity()
    module.calls = [1]
    with suppress(KeyError), preserved_attributes(module):
        module.calls.append(2)
        raise KeyError
    assert module.calls == [1]


def test_a_container_that_holds_itself_is_no_endless_walk() -> None:
    module = nn.Identity()
    module.loop = []
    module.loop.append(module.loop)
    with preserved_attributes(module):
        module.loop.append(1)
    assert len(module.loop) == 1 and module.loop[0] is module.loop
