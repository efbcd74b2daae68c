"""Carrying the source's invocations to its peers: one flat buffer, one broadcast per kind of device.

Peers know every size beforehand, from their own invocation of the same structure, so nothing but tensor bytes
travels and nothing is pickled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

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
    sizes = [size for parcel in parcels for meta in parcel.invocation.metas() for size in meta.shape]
    table = torch.tensor(sizes, dtype=torch.int64)
    peers.broadcast(table, source)
    remaining = iter(table.tolist())

    def resize(meta: TensorMeta) -> TensorMeta:
        return replace(meta, shape=tuple(next(remaining) for _ in meta.shape))

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
    views = {}
    for kind in sorted({meta.device.type for meta in listed}):
        of_kind = [meta for meta in listed if meta.device.type == kind]
        buffer = _flat_buffer(of_kind)
        if sent is not None:
            _pack(buffer, [tensor for tensor in sent if tensor.device.type == kind])
        peers.broadcast(buffer, source)
        # the source unpacks too: equal strides and alignment everywhere, so that every peer picks the same kernels
        views[kind] = iter(_unpack(buffer, of_kind))
    return {
        parcel.recipe_id: _received(parcel, [next(views[m.device.type]) for m in metas[parcel.recipe_id]])
        for parcel in parcels
    }


def _changed_buffers(parcel: Parcel) -> dict[str, torch.Tensor]:
    names = set(parcel.invocation.changed_buffers)
    return {name: buffer.detach() for name, buffer in parcel.module.named_buffers() if name in names}


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
