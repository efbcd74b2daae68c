"""Carrying the source's invocations to its peers: one flat buffer, one broadcast per kind of device.

Peers know every size beforehand, from their own invocation of the same structure, so nothing but tensor bytes
travels and nothing is pickled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from scout_core.adapter import OptimizerSlice, SlicePart
from scout_core.peers import PeerGroup
from scout_core.replay.capture import Invocation, TensorMeta
from scout_core.replay.execute import Received

_ALIGNMENT = 256  # bytes; what CUDA allocations have, so kernels choose the same path as for the live tensor


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """One recipe's share of the transport: whose invocation, of which module."""

    recipe_id: str
    module: nn.Module
    invocation: Invocation


def agree_on_shapes(parcels: Sequence[Parcel], peers: PeerGroup, source: int) -> None:
    """Take over the source's tensor sizes. Every peer calls, when readiness found that sizes differ; one broadcast.

    Readiness has shown that structure is equal, so the number of tensors and their dimensions are.
    """
    sizes = [size for parcel in parcels for meta in parcel.invocation.metas() for size in meta.sizes()]
    table = torch.tensor(sizes, dtype=torch.int64)
    peers.broadcast(table, source)
    remaining = iter(table.tolist())

    def resize(meta: TensorMeta) -> TensorMeta:
        return meta.resized([next(remaining) for _ in meta.sizes()])

    for parcel in parcels:
        invocation = parcel.invocation
        invocation.input_metas = [resize(meta) for meta in invocation.input_metas]
        invocation.gradient_metas = {i: resize(invocation.gradient_metas[i]) for i in sorted(invocation.gradient_metas)}


def carry(parcels: Sequence[Parcel], peers: PeerGroup, source: int) -> dict[str, Received]:
    """Broadcast all parcels from the peer at position `source`.

    Every peer calls; at most one broadcast per kind of device. Returns, by recipe id, tensors that share no memory with
    live ones.
    """
    metas = {parcel.recipe_id: _all_metas(parcel) for parcel in parcels}
    listed = [meta for part in metas.values() for meta in part]
    sent = [t for parcel in parcels for t in _all_tensors(parcel)] if peers.position == source else None
    views = _exchange(listed, sent, peers, source)
    return {
        parcel.recipe_id: _received(parcel, [next(views[m.device.type]) for m in metas[parcel.recipe_id]])
        for parcel in parcels
    }


def carry_slice(own: OptimizerSlice, peers: PeerGroup, source: int) -> OptimizerSlice:
    """The source's optimizer slice on every peer, for state that peers hold no copies of; this rank's hyperparameters.

    Every peer calls; one broadcast of sizes, one of the listing as JSON, at most one per kind of device.
    """
    leads = peers.position == source
    listing = json.dumps([_listed(part) for part in own.parts]).encode() if leads else b""
    length = torch.tensor([len(listing)], dtype=torch.int64)
    peers.broadcast(length, source)
    text = torch.empty(int(length), dtype=torch.uint8)
    if leads:
        text.copy_(torch.frombuffer(bytearray(listing), dtype=torch.uint8))
    peers.broadcast(text, source)
    listed: list[dict[str, Any]] = json.loads(bytes(text.tolist()))
    device = own.parts[0].parameter.device
    metas = [
        TensorMeta(
            shape=tuple(shape),
            dtype=getattr(torch, dtype),
            device=torch.device("cpu") if kind == "cpu" else device,
            requires_grad=False,
        )
        for part in listed
        for _, dtype, shape, kind in part["tensors"]
    ]
    sent = [tensor for part in own.parts for tensor in _slice_tensors(part).values()] if leads else None
    views = _exchange(metas, sent, peers, source)
    arrived = iter([next(views[meta.device.type]) for meta in metas])
    return replace(own, parts=tuple(_slice_part(part, arrived) for part in listed))


def _slice_tensors(part: SlicePart) -> dict[str, torch.Tensor]:
    state = {f"state.{key}": value for key, value in part.state.items() if isinstance(value, torch.Tensor)}
    return {"parameter": part.parameter, "gradient": part.gradient, **state}


def _listed(part: SlicePart) -> dict[str, Any]:
    """A part without its tensors' values. State that JSON does not hold is left to each peer's own optimizer."""
    plain = {k: v for k, v in part.state.items() if isinstance(v, (bool, int, float, str)) or v is None}
    tensors = [
        (name, str(t.dtype).removeprefix("torch."), list(t.shape), t.device.type)
        for name, t in _slice_tensors(part).items()
    ]
    place = {"name": part.name, "start": part.start, "stop": part.stop, "group": part.group, "index": part.index}
    return {**place, "plain": plain, "tensors": tensors}


def _slice_part(listed: dict[str, Any], arrived: Iterator[torch.Tensor]) -> SlicePart:
    tensors = {name: next(arrived) for name, _, _, _ in listed["tensors"]}
    state = {name.removeprefix("state."): t for name, t in tensors.items() if name.startswith("state.")}
    return SlicePart(
        name=listed["name"],
        start=listed["start"],
        stop=listed["stop"],
        parameter=tensors["parameter"],
        gradient=tensors["gradient"],
        state={**listed["plain"], **state},
        group=listed["group"],
        index=listed["index"],
    )


def _changed_buffers(parcel: Parcel) -> dict[str, torch.Tensor]:
    names = set(parcel.invocation.changed_buffers)
    return {name: buffer.detach() for name, buffer in parcel.module.named_buffers() if name in names}


def _exchange(
    metas: Sequence[TensorMeta], sent: Sequence[torch.Tensor] | None, peers: PeerGroup, source: int
) -> dict[str, Iterator[torch.Tensor]]:
    """Broadcast tensors of these sizes, `sent` on the source; by kind of device, in their order."""
    views = {}
    for kind in sorted({meta.device.type for meta in metas}):
        of_kind = [meta for meta in metas if meta.device.type == kind]
        buffer = _flat_buffer(of_kind)
        if sent is not None:
            _pack(buffer, [tensor for tensor in sent if tensor.device.type == kind])
        peers.broadcast(buffer, source)
        # the source unpacks too: equal strides and alignment everywhere, so that every peer picks the same kernels
        views[kind] = iter(_unpack(buffer, of_kind))
    return views


def _all_metas(parcel: Parcel) -> list[TensorMeta]:
    return [*parcel.invocation.metas(), *(TensorMeta.of(buffer) for buffer in _changed_buffers(parcel).values())]


def _all_tensors(parcel: Parcel) -> list[torch.Tensor]:
    invocation = parcel.invocation
    if invocation.inputs is None:
        raise RuntimeError(f"{parcel.recipe_id}: the source kept no tensors to send")
    gradients = [invocation.gradients[i] for i in sorted(invocation.gradient_metas)]
    return [*invocation.inputs, *gradients, *(b for b in _changed_buffers(parcel).values())]


def _received(parcel: Parcel, tensors: list[torch.Tensor]) -> Received:
    invocation = parcel.invocation
    inputs, order = len(invocation.input_metas), sorted(invocation.gradient_metas)
    gradients = dict(zip(order, tensors[inputs:], strict=False))
    buffers = dict(zip(_changed_buffers(parcel), tensors[inputs + len(order) :], strict=True))
    return Received(inputs=tensors[:inputs], gradients=gradients, buffers=buffers)


def _span(meta: TensorMeta) -> tuple[int, int]:
    """Bytes of a tensor, and the bytes it takes in the buffer."""
    size = math.prod(meta.shape) * meta.dtype.itemsize
    return size, -(-size // _ALIGNMENT) * _ALIGNMENT


def _flat_buffer(metas: Sequence[TensorMeta]) -> torch.Tensor:
    length = sum(_span(meta)[1] for meta in metas)
    return torch.empty(max(length, 1), dtype=torch.uint8, device=metas[0].device)


def _pack(buffer: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    offset = 0
    for tensor in tensors:
        size, padded = _span(TensorMeta.of(tensor))
        if size:
            buffer[offset : offset + size].copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
        offset += padded


def _unpack(buffer: torch.Tensor, metas: Sequence[TensorMeta]) -> list[torch.Tensor]:
    views, offset = [], 0
    for meta in metas:
        size, padded = _span(meta)
        views.append(buffer[offset : offset + size].view(meta.dtype).view(meta.shape))
        offset += padded
    return views
