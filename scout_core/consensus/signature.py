"""64-bit signatures of tensors: equal bytes, dtype and shape give equal signatures, and nothing else should.

Two algorithms, one interface. On CPU the bytes go through XXH3-64 (the `xxhash` library) at memory speed: any
difference is missed with probability about 2^-64. On every other device the signature is the *word sum*:

    signature = metadata_code(dtype, shape) + sum over i of mix(word_i + i * POSITION_STEP)      (mod 2^64)

where `word_i` is the i-th little-endian 64-bit word of the row-major bytes, zero-padded at the end, and `mix` is a
bijection. A change confined to one word therefore always changes the signature, whatever the word, its position and
the changed bits; other changes are missed with probability about 2^-64. Addition commutes, so any order of execution
gives the same bits. CUDA runs it as one fused Triton kernel (`signature_cuda`) where triton is installed and as the
integer tensor operations of this file elsewhere; both give the same bits.

Signatures of a CPU tensor and of its copy on a GPU differ: compare signatures of like devices only.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import math
import sys
from collections.abc import Sequence

import torch
import xxhash

MASK_64 = (1 << 64) - 1
_MASK_32 = (1 << 32) - 1

_BLOCK_WORDS = 1 << 20  # words that the tensor-operation path widens at a time: 8 MiB a temporary

# The C API's own way to see memory as a buffer: a ctypes array would need a new type for every length, at 10 us each.
_memory_view = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_PYBUF_READ = 0x100  # PyBUF_READ of CPython's object.h


def _fraction_bits(prime: int) -> int:
    """First 64 bits of the fractional part of sqrt(prime): constants with nothing hidden in them (as in FIPS 180-4)."""
    return math.isqrt(prime << 128) & MASK_64


# The mixer is a Feistel network on the two 32-bit halves of a word. A Feistel round is a bijection whatever its round
# function is, so the round function may be the strongest cheap one: a 32x32->64 bit multiply-add whose halves are
# xored, one instruction and one logic operation on a GPU. Six rounds leave at least four active in any differential.
POSITION_STEP = _fraction_bits(2) | 1
ROUND_MULTIPLIERS = tuple((_fraction_bits(prime) >> 32) | 1 for prime in (3, 5, 7, 11, 13, 17))
ROUND_ADDENDS = tuple(_fraction_bits(prime) for prime in (19, 23, 29, 31, 37, 41))

ABSENT_CODE = _fraction_bits(43)  # stands for an entry that is None; an absent gradient is not a gradient of zeros


def tensor_signature(tensor: torch.Tensor) -> int:
    """Signature of one tensor's values, dtype and shape.

    Takes any strided tensor: 0-d, empty, non-contiguous, conjugate and negative views, every dtype. Of a DTensor it
    signs the local shard. Local to this rank: no collective, except that a DTensor whose shard is still in flight is
    waited for. On an accelerator this waits for the device; use `signatures` where that matters.

    Returns: an int in [0, 2^64).
    Raises: TypeError for a tensor without strided storage of its own (sparse, meta, quantized, fake).
    """
    local = _strided_local(tensor)
    if local.device.type == "cpu":
        return _cpu_signature(local)
    return int(signatures([local]).item()) & MASK_64


def signatures(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Signatures of many tensors at once, without a host synchronization.

    Local to this rank, on the current stream of the tensors' device. On CUDA with triton: one small copy to the device
    and one kernel launch for the whole list.

    Returns: int64 [len(tensors)] on the tensors' device (CPU if there are none); as unsigned 64-bit values these are
        what `tensor_signature` returns.
    Raises: ValueError if the tensors are on more than one device; TypeError as `tensor_signature`.
    """
    return _signatures_with_absent(tensors)


def combined_signature(tensors: Sequence[torch.Tensor | None], extra: int = 0) -> torch.Tensor:
    """One signature of an ordered list of tensors, without a host synchronization.

    The list's signatures are folded by the word sum, so a change of exactly one entry's signature always changes the
    result, as does a change of `extra` alone; the order, the length and which entries are None count too.

    Args:
        tensors: on one device; None marks an entry that is absent.
        extra: any integer to bind to the list (taken mod 2^64), such as a step or a structure signature.

    Returns: int64 [] on the tensors' device, CPU if there is no tensor.
    Raises: as `signatures`.
    """
    codes = _signatures_with_absent(tensors)
    # The length goes in through the metadata of `codes`; `extra` is mixed so that its low bits reach all of the sum.
    bound = mix_word(extra) - mix_word(0)
    return _word_sums([codes])[0] + _signed(bound)


def metadata_code(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """64-bit code of dtype, shape and byte count; an int in [0, 2^64)."""
    return _metadata_code(dtype, tuple(shape))


def mix_word(word: int) -> int:
    """The mixer on one word: a bijection of [0, 2^64). Reference for the tensor and the Triton forms."""
    left, right = (word >> 32) & _MASK_32, word & _MASK_32
    for multiplier, addend in zip(ROUND_MULTIPLIERS, ROUND_ADDENDS, strict=True):
        product = (left * multiplier + addend) & MASK_64
        left, right = right ^ (product >> 32) ^ (product & _MASK_32), left
    return (left << 32) | right


@functools.lru_cache(maxsize=65536)
def _metadata_code(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    byte_count = math.prod(shape) * dtype.itemsize
    return xxhash.xxh3_64_intdigest(f"{dtype}|{','.join(map(str, shape))}|{byte_count}".encode())


def _signed(value: int) -> int:
    """The int64 with the same bits as `value` mod 2^64."""
    value &= MASK_64
    return value - (1 << 64) if value >> 63 else value


def _strided_local(tensor: torch.Tensor) -> torch.Tensor:
    """The plain, contiguous, materialized tensor whose bytes are signed; copies only if it must."""
    distributed = sys.modules.get("torch.distributed.tensor")  # a DTensor cannot exist before this was imported
    if distributed is not None and isinstance(tensor, distributed.DTensor):
        tensor = _waited(tensor.to_local())
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise TypeError(f"cannot sign a {kind} tensor: pass its strided component tensors (indices, values) instead")
    local = tensor.detach()
    if local.dtype is torch.bool:  # copying a strided bool tensor repairs a byte that is neither 0 nor 1; keep it
        local = local.view(torch.uint8).contiguous().view(torch.bool)
    local = local.resolve_conj().resolve_neg().contiguous()
    # A fake tensor says it is on a device while its storage is on meta; other wrappers have storage at address 0.
    on_device = local.untyped_storage().device == local.device
    has_bytes = on_device and (local.data_ptr() != 0 or not local.numel())
    if not has_bytes:
        raise TypeError(f"cannot sign a {type(tensor).__name__}: it has no storage; pass the tensors that it wraps")
    return local


def _waited(local: torch.Tensor) -> torch.Tensor:
    """`to_local()` may hand out a functional collective's pending result; its bytes exist only once waited for."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _cpu_signature(local: torch.Tensor) -> int:
    """XXH3-64 of the bytes in place. xor with the metadata code keeps it a bijection of the digest."""
    if not local.numel():
        return metadata_code(local.dtype, local.shape)
    view = _memory_view(local.data_ptr(), local.nbytes, _PYBUF_READ)  # `local` outlives it, so no copy is needed
    return xxhash.xxh3_64_intdigest(view) ^ metadata_code(local.dtype, local.shape)


def _signatures_with_absent(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """int64 [n]: signatures, with ABSENT_CODE for None, on the one device that the tensors share."""
    locals_ = [None if tensor is None else _strided_local(tensor) for tensor in tensors]
    devices = {local.device for local in locals_ if local is not None}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"tensors of one call must share a device, got {names}; make one call per device")
    if not devices or devices == {torch.device("cpu")}:
        codes = [ABSENT_CODE if local is None else _cpu_signature(local) for local in locals_]
        return torch.tensor([_signed(code) for code in codes], dtype=torch.int64)
    return _word_sums(locals_)


def _word_sums(locals_: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """int64 [n] word-sum signatures of contiguous tensors on one device, by the fastest path there is."""
    device = next(local.device for local in locals_ if local is not None)
    if device.type == "cuda" and _triton_available():
        from scout_core.consensus.signature_cuda import signatures_triton

        return signatures_triton(locals_)
    return _signatures_torch(locals_)


@functools.cache
def _triton_available() -> bool:
    return importlib.util.find_spec("triton") is not None


def _signatures_torch(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The word-sum signatures by int64 tensor operations, on any device; bit for bit what the Triton kernel gives."""
    device = next((tensor.device for tensor in tensors if tensor is not None), torch.device("cpu"))
    if not tensors:
        return torch.empty(0, dtype=torch.int64, device=device)
    sums = []
    for tensor in tensors:
        if tensor is None:
            sums.append(torch.full((), _signed(ABSENT_CODE), dtype=torch.int64, device=device))
        else:
            sums.append(_word_sum(_strided_local(tensor)) + _signed(metadata_code(tensor.dtype, tensor.shape)))
    return torch.stack(sums)


def _word_sum(local: torch.Tensor) -> torch.Tensor:
    """int64 []: sum of the mixed words of a contiguous tensor."""
    total = torch.zeros((), dtype=torch.int64, device=local.device)
    if not local.numel():
        return total
    # as_strided, since a contiguous tensor may keep an odd stride in a dimension of size 1, which view() refuses.
    data = local.as_strided((local.numel(),), (1,)).view(torch.uint8)
    for start in range(0, data.numel(), 8 * _BLOCK_WORDS):
        part = data[start : start + 8 * _BLOCK_WORDS]
        # Copied into words of its own, since a view as int64 needs 8-byte alignment and a whole number of words.
        words = torch.zeros(-(-part.numel() // 8), dtype=torch.int64, device=local.device)
        words.view(torch.uint8)[: part.numel()].copy_(part)
        total += _mix_words(words, start // 8).sum()
    return total


def _mix_words(words: torch.Tensor, first_position: int) -> torch.Tensor:
    """int64 [n] words at consecutive positions -> int64 [n] mixed words; int64 arithmetic wraps mod 2^64."""
    positions = torch.arange(first_position, first_position + words.numel(), dtype=torch.int64, device=words.device)
    keyed = words + positions * _signed(POSITION_STEP)
    left, right = (keyed >> 32) & _MASK_32, keyed & _MASK_32
    for multiplier, addend in zip(ROUND_MULTIPLIERS, ROUND_ADDENDS, strict=True):
        product = left * multiplier + _signed(addend)
        left, right = (right ^ (product >> 32) ^ product) & _MASK_32, left
    return (left << 32) | right
