"""The word-sum signature (see `signature`) of a list of CUDA tensors as one fused Triton kernel.

The bytes of all tensors are split into chunks; each program sums the mixed words of one chunk and adds the sum to its
tensor's slot, which starts at the tensor's metadata code. Which program does which chunk depends on dtypes and shapes
alone, so that table stays on the device between calls and a call costs one copy (addresses and start values, from
pinned memory) and one launch. Integer addition commutes, so atomics do not make the result depend on their order.

Import only where triton is installed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from scout_core.consensus.signature import (
    ABSENT_CODE,
    POSITION_STEP,
    ROUND_ADDENDS,
    ROUND_MULTIPLIERS,
    metadata_code,
)

# 64 KiB a program: enough programs to fill a GPU from about 20 MB on, and the fixed cost of one stays below 2%.
_CHUNK_WORDS = 8192
_BLOCK_WORDS = 512  # words in flight a program: 4 a thread, two 16-byte loads; on an H200 faster than 1024 or 2048
_WARPS = 4
_PLAN_CACHE_SIZE = 128  # lists of distinct dtypes and shapes; a plan costs 8 bytes for 64 KiB signed

_STEP = tl.constexpr(POSITION_STEP)
_M0, _M1, _M2, _M3, _M4, _M5 = (tl.constexpr(value) for value in ROUND_MULTIPLIERS)
_A0, _A1, _A2, _A3, _A4, _A5 = (tl.constexpr(value) for value in ROUND_ADDENDS)
_CHUNK = tl.constexpr(_CHUNK_WORDS)
_BLOCK = tl.constexpr(_BLOCK_WORDS)


@triton.jit  # type: ignore[untyped-decorator, misc, unused-ignore]
def _round(half, other, multiplier: tl.constexpr, addend: tl.constexpr):  # type: ignore[no-untyped-def]
    """One Feistel round: what `other` becomes. The 32-bit operands make the product one wide multiply-add."""
    product = half.to(tl.uint64) * tl.full((), multiplier, tl.uint64) + tl.full((), addend, tl.uint64)
    return other ^ (product >> 32).to(tl.uint32) ^ product.to(tl.uint32)


@triton.jit  # type: ignore[untyped-decorator, misc, unused-ignore]
def _mixed(words, positions):  # type: ignore[no-untyped-def]
    """uint64 words at uint64 positions -> uint64 mixed words."""
    keyed = words + positions * tl.full((), _STEP, tl.uint64)
    left = (keyed >> 32).to(tl.uint32)
    right = keyed.to(tl.uint32)
    right = _round(left, right, _M0, _A0)
    left = _round(right, left, _M1, _A1)
    right = _round(left, right, _M2, _A2)
    left = _round(right, left, _M3, _A3)
    right = _round(left, right, _M4, _A4)
    left = _round(right, left, _M5, _A5)
    return (left.to(tl.uint64) << 32) | right.to(tl.uint64)


@triton.jit  # type: ignore[untyped-decorator, misc, unused-ignore]
def _sum_aligned(address, first):  # type: ignore[no-untyped-def]
    """Sum of a whole chunk from word `first` of a tensor at a 16-byte aligned address: wide loads, no masks."""
    # The hint goes on the pointer, which exists in this branch only, not on the address that `_sum_any` shares.
    source = tl.multiple_of(address.to(tl.pointer_type(tl.uint64)), 16)
    lanes = tl.arange(0, _BLOCK)
    total = tl.zeros((_BLOCK,), tl.uint64)
    for start in range(0, _CHUNK, _BLOCK):
        offsets = tl.multiple_of(first + start, _BLOCK) + lanes
        total += _mixed(tl.load(source + offsets), offsets.to(tl.uint64))
    return tl.sum(total, 0)


@triton.jit  # type: ignore[untyped-decorator, misc, unused-ignore]
def _sum_any(address, byte_count, first):  # type: ignore[no-untyped-def]
    """Sum of the chunk from word `first` on, at any address and to any last byte.

    Loads only aligned granules of 8 bytes that overlap the tensor, two a word, and shifts the word out of them. The up
    to 7 bytes beside the tensor that this touches lie in a granule with bytes of the tensor, hence in mapped memory;
    they are shifted or masked away, so what another stream writes there does not matter.
    """
    shift = (address & 7) * 8
    source = (address - (address & 7)).to(tl.pointer_type(tl.uint64))
    granules = ((address & 7) + byte_count + 7) // 8
    end = tl.minimum((byte_count + 7) // 8, first + _CHUNK)
    lanes = tl.arange(0, _BLOCK)
    total = tl.zeros((_BLOCK,), tl.uint64)
    for start in range(first, end, _BLOCK):
        offsets = start + lanes
        inside = offsets < end
        low = tl.load(source + offsets, mask=inside, other=0)
        high = tl.load(source + offsets + 1, mask=inside & (offsets + 1 < granules) & (shift != 0), other=0)
        # The left shift is split because shifting 64 bits by 64 is undefined; with shift 0, `high` is 0.
        words = (low >> shift.to(tl.uint64)) | ((high << 1) << (63 - shift).to(tl.uint64))
        spare = tl.minimum(tl.maximum(offsets * 8 + 8 - byte_count, 0), 7) * 8  # bits past the end: last word only
        words = (words << spare.to(tl.uint64)) >> spare.to(tl.uint64)
        total += tl.where(inside, _mixed(words, offsets.to(tl.uint64)), 0)
    return tl.sum(total, 0)


@triton.jit  # type: ignore[untyped-decorator, misc, unused-ignore]
def _signature_kernel(addresses, byte_counts, chunk_tensors, chunk_indices, sums):  # type: ignore[no-untyped-def]
    """Program p: chunk `chunk_indices[p]` of tensor `chunk_tensors[p]`, added to that tensor's slot in `sums`."""
    program = tl.program_id(0)
    tensor = tl.load(chunk_tensors + program)
    first = tl.load(chunk_indices + program).to(tl.int64) * _CHUNK
    address = tl.load(addresses + tensor)
    byte_count = tl.load(byte_counts + tensor)
    if (address & 15) == 0 and (first + _CHUNK) * 8 <= byte_count:
        total = _sum_aligned(address, first)
    else:
        total = _sum_any(address, byte_count, first)
    tl.atomic_add(sums + tensor, total.to(tl.int64, bitcast=True), sem="relaxed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """What a list's dtypes and shapes decide. Tensors lie on the signed tensors' device; programs = their length."""

    start_values: tuple[int, ...]  # int64 a tensor: its metadata code, or ABSENT_CODE
    byte_counts: torch.Tensor  # int64 [tensors]
    chunk_tensors: torch.Tensor  # int32 [programs]
    chunk_indices: torch.Tensor  # int32 [programs]


def signatures_triton(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Word-sum signatures of contiguous tensors of one device; None gives ABSENT_CODE.

    Runs on the current stream of that device and does not synchronize. Takes at least one tensor that is not None.

    Returns: int64 [len(tensors)] on that device.
    """
    device = next(tensor.device for tensor in tensors if tensor is not None)
    plan = _plan(tuple(None if tensor is None else (tensor.dtype, tensor.shape) for tensor in tensors), device)
    # An even row length keeps both rows 16-byte aligned, so Triton compiles one variant of the kernel.
    padding = [0] * (len(tensors) % 2)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    rows = _to_device([[*plan.start_values, *padding], [*addresses, *padding]], torch.int64, device)
    sums = rows[0]
    programs = plan.chunk_tensors.numel()
    if programs:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            _signature_kernel[(programs,)](
                rows[1], plan.byte_counts, plan.chunk_tensors, plan.chunk_indices, sums, num_warps=_WARPS
            )
    return sums[: len(tensors)]


@functools.lru_cache(maxsize=_PLAN_CACHE_SIZE)
def _plan(metadata: tuple[tuple[torch.dtype, torch.Size] | None, ...], device: torch.device) -> _Plan:
    """Split the tensors into chunks, in list order."""
    byte_counts = [0 if entry is None else entry[0].itemsize * entry[1].numel() for entry in metadata]
    codes = [ABSENT_CODE if entry is None else metadata_code(*entry) for entry in metadata]
    chunk_counts = torch.tensor([-(-count // (8 * _CHUNK_WORDS)) for count in byte_counts])
    chunk_tensors = torch.repeat_interleave(chunk_counts)
    first_programs = chunk_counts.cumsum(0) - chunk_counts
    chunk_indices = torch.arange(len(chunk_tensors)) - first_programs[chunk_tensors]
    return _Plan(
        start_values=tuple(code - (1 << 64) if code >> 63 else code for code in codes),
        byte_counts=_to_device(byte_counts, torch.int64, device),
        chunk_tensors=_to_device(chunk_tensors, torch.int32, device),
        chunk_indices=_to_device(chunk_indices, torch.int32, device),
    )


def _to_device(
    values: torch.Tensor | Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Copy through pinned memory, so that the host does not wait; torch keeps the pinned block until it was copied."""
    host = torch.as_tensor(values, dtype=dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
