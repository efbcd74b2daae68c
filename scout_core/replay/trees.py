"""Nested arguments and results: walking them, rebuilding them, and knowing what cannot be carried to a peer."""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

_PLAIN = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum, type, slice)


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """`value` rebuilt with every tensor in nested containers, named tuples and dataclasses replaced.

    Tensors are visited in a fixed order. Leaves that are not tensors are passed on as they are.
    """
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(function, item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in dataclasses.fields(value) if item.init]
        return dataclasses.replace(value, **{name: map_tensors(function, getattr(value, name)) for name in names})
    if isinstance(value, MutableMapping):
        rebuilt = copy.copy(value)
        for key, item in value.items():
            rebuilt[key] = map_tensors(function, item)
        return rebuilt
    return value


def tensor_leaves(value: Any) -> list[torch.Tensor]:
    """Every tensor in `value`, in the order `map_tensors` visits them."""
    leaves: list[torch.Tensor] = []
    _visit(value, leaves.append, lambda leaf: None)
    return leaves


def opaque_type(value: Any) -> str | None:
    """The name of the first type in `value` that may hide tensors or rank-dependent state, or None if there is none."""
    found: list[str] = []

    def check(leaf: Any) -> None:
        if isinstance(leaf, (*_PLAIN, nn.Module, types.BuiltinFunctionType)):
            return
        if isinstance(leaf, types.FunctionType) and leaf.__closure__ is None:
            return
        found.append(f"{type(leaf).__module__}.{type(leaf).__qualname__}")

    _visit(value, lambda tensor: None, check)
    return found[0] if found else None


def hollow(value: Any) -> Any:
    """`value` with every tensor replaced by an empty one on the `meta` device: sizes and dtypes without bytes."""
    return map_tensors(_hollow_tensor, value)


def refill(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The inverse of `hollow`: `value` with its tensors replaced by `tensors`, in visiting order."""
    remaining = iter(tensors)
    return map_tensors(lambda _: next(remaining), value)


def skeleton(value: Any) -> Any:
    """`value` with every tensor replaced by its dtype, number of dimensions and `requires_grad`."""
    return map_tensors(lambda t: ("tensor", str(t.dtype), t.dim(), t.requires_grad), value)


def _hollow_tensor(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return empty.requires_grad_(tensor.requires_grad)


def _visit(value: Any, on_tensor: Callable[[torch.Tensor], None], on_leaf: Callable[[Any], None]) -> None:
    if isinstance(value, torch.Tensor):
        on_tensor(value)
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for item in value:
            _visit(item, on_tensor, on_leaf)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            if item.init:
                _visit(getattr(value, item.name), on_tensor, on_leaf)
    elif isinstance(value, MutableMapping):
        for item in value.values():
            _visit(item, on_tensor, on_leaf)
    else:
        on_leaf(value)
