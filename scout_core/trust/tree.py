"""Nested training state as tensors and a JSON structure, without pickle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_PLAIN = (bool, int, str, type(None))
_MAX_DEPTH = 64


class StateError(TypeError):
    """A value that cannot be kept; the message says where it stands and what to do."""


@dataclass(frozen=True, kw_only=True)
class Flat:
    """`tensors` in the order of their numbers in `structure`; nothing is copied."""

    structure: Any
    tensors: list[torch.Tensor]


def flatten(state: Any) -> Flat:
    """Take training state apart: dicts, lists, tuples, tensors, arrays, scalars. Raises `StateError` for others."""
    tensors: list[torch.Tensor] = []
    return Flat(structure=_flatten(state, tensors, "state", 0), tensors=tensors)


def _flatten(value: Any, tensors: list[torch.Tensor], where: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise StateError(f"{where} is nested deeper than {_MAX_DEPTH}")
    if type(value) in _PLAIN:
        return value
    if isinstance(value, float):
        return ["f", value.hex() if math.isfinite(value) else str(value)]
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
            raise StateError(f"{where} is a {value.layout} tensor on {value.device}; keep it as dense tensors")
        local = value.to_local() if hasattr(value, "to_local") else value  # DTensor: this rank's part
        tensors.append(local.detach())
        return ["t", len(tensors) - 1]
    if isinstance(value, np.ndarray):
        tensors.append(torch.from_numpy(np.ascontiguousarray(value)).clone())
        return ["n", len(tensors) - 1]
    if isinstance(value, np.generic):
        return _flatten(value.item(), tensors, where, depth)
    if isinstance(value, Mapping):
        items = [
            [_key(key, where), _flatten(item, tensors, f"{where}[{key!r}]", depth + 1)] for key, item in value.items()
        ]
        return ["d", items]
    if isinstance(value, (list, tuple)):
        kind = "l" if isinstance(value, list) else "u"
        return [kind, [_flatten(item, tensors, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]]
    raise StateError(
        f"{where} is a {type(value).__name__}, which cannot be kept without pickle; "
        "give it as dicts, lists, tuples, tensors, numbers and strings"
    )


def _key(key: Any, where: str) -> Any:
    if type(key) in (str, int, bool):
        return key
    raise StateError(f"{where} has a key of type {type(key).__name__}; use strings or integers")


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
