"""Nested training state as tensors and a JSON structure, without pickle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_PLAIN = frozenset({bool, int, str, type(None)})
_KEYS = frozenset({str, int, bool})
_MAX_DEPTH = 64


class StateError(TypeError):
    """A value that cannot be kept; the message says where it stands and what to do."""

    def __init__(self, what: str, path: str = "") -> None:
        super().__init__(f"state{path} {what}")
        self._what = what
        self._path = path

    def inside(self, key: Any) -> StateError:
        """The same, seen from the collection that holds it under `key`."""
        return StateError(self._what, f"[{key!r}]{self._path}")


@dataclass(frozen=True, kw_only=True)
class Flat:
    """`tensors` in the order of their numbers in `structure`; nothing is copied."""

    structure: Any
    tensors: list[torch.Tensor]


def flatten(state: Any) -> Flat:
    """Take training state apart: dicts, lists, tuples, tensors, arrays, scalars. Raises `StateError` for others.

    It runs on the training thread for every tensor of the state, so it makes no text before it has something to refuse.
    """
    tensors: list[torch.Tensor] = []
    return Flat(structure=_flatten(state, tensors, 0), tensors=tensors)


def _flatten(value: Any, tensors: list[torch.Tensor], depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise StateError(f"is nested deeper than {_MAX_DEPTH}")
    if type(value) in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(_dense(value))
        return ["t", len(tensors) - 1]
    if isinstance(value, (dict, Mapping)):
        return ["d", [[_key(key), _item(key, item, tensors, depth)] for key, item in value.items()]]
    if isinstance(value, (list, tuple)):
        items = [
            item if type(item) in _PLAIN else _item(index, item, tensors, depth) for index, item in enumerate(value)
        ]
        return ["l" if isinstance(value, list) else "u", items]
    if isinstance(value, float):
        return ["f", value.hex() if math.isfinite(value) else str(value)]
    if isinstance(value, np.ndarray):
        tensors.append(torch.from_numpy(np.ascontiguousarray(value)).clone())
        return ["n", len(tensors) - 1]
    if isinstance(value, np.generic):
        return _flatten(value.item(), tensors, depth)
    raise StateError(
        f"is a {type(value).__name__}, which cannot be kept without pickle; "
        "give it as dicts, lists, tuples, tensors, numbers and strings"
    )


def _item(key: Any, value: Any, tensors: list[torch.Tensor], depth: int) -> Any:
    try:
        return _flatten(value, tensors, depth + 1)
    except StateError as error:
        raise error.inside(key) from None


def _dense(value: torch.Tensor) -> torch.Tensor:
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise StateError(f"is a {value.layout} tensor on {value.device}; keep it as dense tensors")
    if type(value) is torch.Tensor:
        return value.detach() if value.requires_grad else value
    local = value.to_local() if hasattr(value, "to_local") else value  # DTensor: this rank's part
    return local.detach()


def _key(key: Any) -> Any:
    if type(key) in _KEYS:
        return key
    raise StateError(f"has a key of type {type(key).__name__}; use strings or integers")


def rebuild(structure: Any, tensors: list[torch.Tensor]) -> Any:
    """What `flatten` took apart, with `tensors` in place. Raises `ValueError` for a structure it did not make."""
    if type(structure) in _PLAIN:
        return structure
    if not isinstance(structure, list) or len(structure) != 2:
        raise ValueError("the structure of the state is malformed")
    kind, body = structure
    if kind == "f" and isinstance(body, str):
        return float(body) if body in ("nan", "inf", "-inf") else float.fromhex(body)
    if kind in ("t", "n") and type(body) is int and 0 <= body < len(tensors):
        return tensors[body] if kind == "t" else tensors[body].cpu().numpy().copy()
    if kind == "d" and isinstance(body, list) and all(isinstance(p, list) and len(p) == 2 for p in body):
        return {key: rebuild(item, tensors) for key, item in body}
    if kind in ("l", "u") and isinstance(body, list):
        items = [rebuild(item, tensors) for item in body]
        return items if kind == "l" else tuple(items)
    raise ValueError("the structure of the state is malformed")
