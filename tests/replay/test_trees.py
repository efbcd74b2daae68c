"""Walking nested arguments, hollowing them out and filling them again."""

from __future__ import annotations

import types
from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from scout_core.replay.trees import hollow, map_tensors, opaque_type, refill, skeleton, tensor_leaves


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Record:
    x: Any
    label: str = "record"
    width: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.width = len(self.label)


@dataclass(frozen=True)
class FrozenRecord:
    x: Any


def tensors() -> st.SearchStrategy[torch.Tensor]:
    shapes = st.lists(st.integers(0, 3), max_size=3)
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])
    return st.builds(lambda shape, dtype: torch.ones(shape, dtype=dtype), shapes, dtypes)


leaves = tensors() | st.none() | st.integers(-5, 5) | st.text(max_size=3) | st.just(torch.Size([2, 3]))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(OrderedDict),
        st.dictionaries(st.text(max_size=2), inner, max_size=3).map(UserDict),
        st.builds(Pair, inner, inner),
        st.builds(Record, inner),
        st.builds(FrozenRecord, inner),
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(trees)
def test_hollow_and_refill_are_inverse(tree: Any) -> None:
    found = tensor_leaves(tree)
    again = refill(hollow(tree), found)
    assert type(again) is type(tree)
    assert all(a is b for a, b in zip(tensor_leaves(again), found, strict=True))
    assert repr(again) == repr(tree)


@settings(deadline=None)
@given(trees)
def test_a_hollow_tree_keeps_sizes_and_dtypes_and_no_bytes(tree: Any) -> None:
    for full, empty in zip(tensor_leaves(tree), tensor_leaves(hollow(tree)), strict=True):
        assert (empty.shape, empty.dtype, empty.requires_grad) == (full.shape, full.dtype, full.requires_grad)
        assert empty.is_meta


@settings(deadline=None)
@given(trees)
def test_every_tensor_is_replaced_in_the_order_of_the_leaves(tree: Any) -> None:
    seen: list[torch.Tensor] = []
    map_tensors(seen.append, tree)
    assert all(a is b for a, b in zip(seen, tensor_leaves(tree), strict=True))
    assert tensor_leaves(skeleton(tree)) == [] and tensor_leaves(map_tensors(lambda _: 0, tree)) == []


@settings(deadline=None)
@given(trees)
def test_what_is_made_of_plain_values_can_be_carried(tree: Any) -> None:
    assert opaque_type(tree) is None


def test_the_original_is_not_changed() -> None:
    inner = {"a": torch.ones(2)}
    tree = [inner, Record(torch.ones(1))]
    map_tensors(torch.zeros_like, tree)
    assert inner["a"].tolist() == [1, 1] and tree[1].x.tolist() == [1]


def test_kinds_of_dictionaries_stay_what_they_are() -> None:
    made = map_tensors(torch.neg, defaultdict(list, a=torch.ones(1)))
    assert isinstance(made, defaultdict) and made.default_factory is list and made["a"].item() == -1
    wrapped = map_tensors(torch.neg, UserDict(a=torch.ones(1)))
    assert isinstance(wrapped, UserDict) and wrapped["a"].item() == -1


def test_a_skeleton_tells_dtypes_dimensions_and_gradients_apart_but_not_sizes() -> None:
    one = skeleton((torch.ones(2, 3), {"k": 1}))
    assert one == skeleton((torch.ones(5, 7), {"k": 1}))
    others = [torch.ones(2), torch.ones(2, 3, dtype=torch.float64), torch.ones(2, 3, requires_grad=True)]
    assert all(skeleton((other, {"k": 1})) != one for other in others)
    assert skeleton((torch.ones(2, 3), {"k": 2})) != one


class Cache:
    """Keys and values of earlier tokens, as an object of the user's own."""

    def __init__(self) -> None:
        self.keys = torch.ones(2)


def closure() -> Any:
    secret = torch.ones(1)
    return lambda: secret


@pytest.mark.parametrize(
    "value",
    [Cache(), iter([1]), torch.Generator(), types.MappingProxyType({"x": torch.ones(1)}), {1, 2}, closure()],
    ids=["object", "iterator", "generator", "read-only mapping", "set", "closure"],
)
def test_what_may_hide_tensors_is_named(value: Any) -> None:
    kind = type(value)
    assert opaque_type(([1, {"deep": value}],)) == f"{kind.__module__}.{kind.__qualname__}"


@pytest.mark.parametrize("value", [torch.float16, torch.device("cpu"), slice(1), nn.Identity(), len, torch.relu, int])
def test_plain_values_of_torch_and_python_hide_nothing(value: Any) -> None:
    assert opaque_type({"a": value}) is None
