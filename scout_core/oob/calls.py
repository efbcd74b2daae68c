"""What of a collective must be alike on all ranks of its group: operation, fixed sizes and types, reduction, root."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from scout_core.oob.fingerprints import Described, describe, tensor_text
from scout_core.oob.point_to_point import argument, rank_given

Metadata = Callable[[Sequence[Any], dict[str, Any]], tuple[object, ...]]


def _tensor(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return tensor_text(value.dtype, value.shape)
    if isinstance(value, (list, tuple)):
        return "[" + " ".join(_tensor(item) for item in value[:64]) + f"]x{len(value)}"
    return "-"


def _op(value: Any) -> str:
    return str(value).rpartition(".")[2] if value is not None else "SUM"


def _reduced(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[object, ...]:
    return _tensor(argument(args, kwargs, 0, "tensor")), _op(argument(args, kwargs, 1, "op"))


def _root(index: int, name: str, place: int) -> Metadata:
    """The root by its global rank: ranks may give it in either way, or leave it to torch, which takes 0."""
    return lambda args, kwargs: (f"{name}={rank_given(args, kwargs, index, name, place) or 0}",)


def _rooted(index: int, name: str, place: int) -> Metadata:
    root = _root(index, name, place)
    return lambda args, kwargs: (_tensor(argument(args, kwargs, 0, "tensor")), *root(args, kwargs))


def _reduce(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[object, ...]:
    return *_rooted(1, "dst", 3)(args, kwargs), _op(argument(args, kwargs, 2, "op"))


def _first(name: str) -> Metadata:
    return lambda args, kwargs: (_tensor(argument(args, kwargs, 0, name)),)


def _scattered(name: str) -> Metadata:
    def metadata(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[object, ...]:
        return _tensor(argument(args, kwargs, 1, name)), _op(argument(args, kwargs, 2, "op"))

    return metadata


def _exchanged(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[object, ...]:
    """AllToAll: the type and the trailing sizes; what each rank sends to whom may lawfully differ."""
    value = args[0] if args else next(iter(kwargs.values()), None)
    if isinstance(value, (list, tuple)):
        return (str(value[0].dtype) if value else "-", len(value))
    return (str(value.dtype), tuple(value.shape[1:])) if isinstance(value, torch.Tensor) else ("-",)


def _nothing(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[object, ...]:
    return ()


FUNCTIONS: dict[str, tuple[Metadata, int | None]] = {
    # name: what must be equal on all ranks, place of `group` among the positional arguments
    "all_reduce": (_reduced, 2),
    "all_reduce_coalesced": (_reduced, 2),
    "broadcast": (_rooted(1, "src", 2), 2),
    "reduce": (_reduce, 3),
    "all_gather": (_first("tensor_list"), 2),
    "all_gather_into_tensor": (_first("output_tensor"), 2),
    "all_gather_coalesced": (_first("output_tensor_lists"), 2),
    "reduce_scatter": (_scattered("input_list"), 3),
    "reduce_scatter_tensor": (_scattered("input"), 3),
    "scatter": (_rooted(2, "src", 3), 3),
    "gather": (_rooted(2, "dst", 3), 3),
    "all_to_all": (_exchanged, 2),
    "all_to_all_single": (_exchanged, 4),
    "barrier": (_nothing, 0),
    "monitored_barrier": (_nothing, 0),
    "all_gather_object": (_nothing, 2),
    "gather_object": (_root(2, "dst", 3), 3),
    "broadcast_object_list": (_root(1, "src", 2), 2),
    "scatter_object_list": (_root(2, "src", 3), 3),
}


def _functional_reduced(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[object, ...]:
    return _tensor(args[0]), str(argument(args, kwargs, 1, "reduceOp", "sum")).upper()


def _functional_gathered(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[object, ...]:
    return _tensor(args[0]), f"dim={argument(args, kwargs, 1, 'gather_dim', 0)}"


def _functional_broadcast(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[object, ...]:
    return _tensor(args[0]), f"src={argument(args, kwargs, 1, 'src')}"


def _functional_tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[object, ...]:
    return (_tensor(args[0]),)


FUNCTIONAL: dict[str, tuple[Metadata, int]] = {
    # as above; the `*_single` names came with torch 2.13, which keeps the older ones as aliases that call them
    "all_reduce": (_functional_reduced, 2),
    "all_gather_tensor": (_functional_gathered, 2),
    "all_gather_tensor_autograd": (_functional_gathered, 2),
    "all_gather_single": (_functional_gathered, 2),
    "all_gather_single_autograd": (_functional_gathered, 2),
    "reduce_scatter_tensor": (_functional_reduced, 3),
    "reduce_scatter_tensor_autograd": (_functional_reduced, 3),
    "reduce_scatter_single": (_functional_reduced, 3),
    "reduce_scatter_single_autograd": (_functional_reduced, 3),
    "broadcast": (_functional_broadcast, 2),
    "all_to_all_single": (_exchanged, 3),
    "all_to_all_single_autograd": (_exchanged, 3),
    "all_reduce_coalesced": (_functional_reduced, 2),
    "all_gather_into_tensor_coalesced": (_functional_tensors, 1),
    "all_gather_single_coalesced": (_functional_tensors, 1),
    "reduce_scatter_tensor_coalesced": (_functional_reduced, 3),
    "reduce_scatter_single_coalesced": (_functional_reduced, 3),
}


def described(name: str, metadata: Metadata, site: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Described:
    """The description of one call of `name` at `site`, from what `metadata` finds in its arguments."""
    try:
        found = metadata(args, kwargs)
    except (IndexError, AttributeError, TypeError, ValueError):  # a call that torch itself is going to refuse
        found = ("?",)
    return describe(name, found, site)
