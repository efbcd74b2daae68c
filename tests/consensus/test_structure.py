"""Structure signatures tell apart what peers must have in common, and agree between processes."""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
import types
import uuid
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scout_core.consensus.structure import structure_signature


class Point(NamedTuple):
    x: int
    y: int


class Other(NamedTuple):
    x: int
    y: int


class Color(enum.Enum):
    RED = 1
    GREEN = 2


class Level(enum.IntEnum):
    LOW = 1


class Name(str):
    pass


class Opaque:
    def __init__(self, content: int) -> None:
        self.content = content


class Opaque2(Opaque):
    pass


@dataclasses.dataclass
class Record:
    x: object
    y: object = None


@dataclasses.dataclass
class Record2:
    x: object
    y: object = None


@dataclasses.dataclass
class Late:
    x: int = dataclasses.field(init=False)


DISTINCT: list[Any] = [
    *(None, True, False, 0, 1, -1, 255, 256, -256, 1 << 80, -(1 << 80)),
    *(0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan"), 1 + 0j, 0j, complex(0.0, -0.0)),
    *("", "1", "True", "None", "a", "\ud800", b"", b"1", b"a", bytearray(b"a"), Name("a")),
    *((), [], {}, set(), frozenset(), (1,), [1], {1}, frozenset({1}), {1: 1}, {1: None}),
    *([1, 2], [2, 1], [[1], 2], [1, [2]], [[1, 2]], [[]], [[], []], ["ab", "c"], ["a", "bc"], ["abc"], [True], [1.0]),
    *({"a": 1, "b": 2}, {"a": 2, "b": 1}, {"ab": 1}, {"a": {"b": 1}}, collections.OrderedDict(a=1, b=2)),
    types.MappingProxyType({"a": 1, "b": 2}),
    *(Point(1, 2), Other(1, 2), (1, 2), Point(2, 1), Record(1), Record2(1), Record(None, 1), Record(1, 1), Late()),
    *(Color.RED, Color.GREEN, Level.LOW, Opaque(1), Opaque2(1), Opaque, print, ..., range(3), range(0, 6, 2), slice(3)),
    *(slice(0, 3), torch.float32, torch.float16, "torch.float32", torch.device("cpu"), torch.device("cuda")),
    *(torch.device("cuda", 1), "cpu", torch.strided, torch.contiguous_format, torch.Size([1, 2]), torch.Size([1])),
    *(torch.ones(2), torch.ones(2, dtype=torch.float64), torch.ones(1, 2), torch.ones(()), torch.ones(0)),
]


def test_no_two_different_structures_agree() -> None:
    codes = [structure_signature(value) for value in DISTINCT]
    same = [
        (left, right)
        for (left, a), (right, b) in itertools.combinations(zip(DISTINCT, codes, strict=True), 2)
        if a == b
    ]
    assert same == []
    assert all(0 <= code < 1 << 64 for code in codes)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"a": 1, 2: "b", None: 3}, {None: 3, 2: "b", "a": 1}),
        ({"x", "y", "z", 1}, {1, "z", "y", "x"}),
        (float("nan"), -float("nan")),
        (torch.zeros(3, 2), torch.nn.Parameter(torch.ones(2, 3)).t()),
        (torch.zeros(3), torch.zeros(3, device="meta")),
        (Opaque(1), Opaque(2)),
        ([[1], [1]], [[1]] * 2),
    ],
)
def test_what_does_not_count(left: object, right: object) -> None:
    assert structure_signature(left) == structure_signature(right)


def test_every_process_agrees() -> None:
    """A fixed value: string hashes differ from process to process, so an order taken from them would break this."""
    value = (
        {"mask": torch.ones(2, 3), "flags": {"a", "b", "c", "d"}, "n": 7},
        [uuid.SafeUUID.safe, None, -0.0],
        Fraction(3),
    )
    assert structure_signature(value) == 0x68CF42983D36F1E3


def test_containers_that_hold_themselves_end() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    wider: list[Any] = [1, [1]]
    wider[1].append(wider)
    again: list[Any] = [1]
    again.append(again)
    assert structure_signature(loop) == structure_signature(again)
    assert structure_signature(loop) != structure_signature(wider)


_LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@given(_VALUES, _VALUES)
def test_signatures_agree_exactly_when_the_written_values_do(left: object, right: object) -> None:
    """repr tells 1, 1.0, True, -0.0, tuples and lists apart; keys are written in one order."""
    assert (structure_signature(left) == structure_signature(right)) == (_written(left) == _written(right))


def _written(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{_written(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({','.join(map(_written, value))})"
    return repr(value)
