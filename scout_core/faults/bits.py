"""Flipping single bits in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a DTensor, sharing its memory; any other tensor as it is. Local, no collectives."""
    return tensor.to_local().detach() if _is_dtensor(tensor) else tensor


def own_copy(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A detached copy, and what this rank holds of it. Local, unlike `clone` of a DTensor that is yet to be summed."""
    if not _is_dtensor(tensor):
        copy = tensor.detach().clone()
        return copy, copy
    own = own_part(tensor).clone()
    whole = type(tensor).from_local(
        own, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return whole, own


def flip_bit(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Flip one bit of one element in place, as a faulty memory cell would: autograd does not notice.

    Works for every dtype and for tensors that are not contiguous. `element` counts in row-major order, `bit` from the
    least significant one (31 is the sign of a float32). Of a DTensor the part on this rank is meant. Raises
    `IndexError` when either is outside the tensor.
    """
    tensor = own_part(tensor)
    width = bit_width(tensor)
    if not 0 <= element < tensor.numel():
        raise IndexError(f"element {element} is outside a tensor of {tensor.numel()} elements")
    if not 0 <= bit < width:
        raise IndexError(f"bit {bit} is outside 0..{width - 1} of {tensor.dtype}")
    place: list[int] = []
    for size in reversed(tensor.shape):
        element, index = divmod(element, size)
        place.append(index)
    # .data leaves the version counter alone, so that a flip between forward and backward raises nothing
    flip_column(tensor.data[tuple(reversed(place))].reshape(1), bit)


def flip_column(row: torch.Tensor, bit: int) -> None:
    """Flip the same bit of every element of a contiguous `[n]` tensor in place."""
    octets = row.view(torch.uint8).reshape(row.numel(), row.element_size())
    octets[:, bit // 8] ^= 1 << bit % 8


def bit_width(tensor: torch.Tensor) -> int:
    """Bits of one element."""
    return 8 * tensor.element_size()


def _is_dtensor(tensor: torch.Tensor) -> TypeGuard[DTensor]:
    if not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor  # heavy; whoever has such a tensor has imported it already

    return isinstance(tensor, DTensor)
