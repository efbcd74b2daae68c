"""Distributed tensors as what they are on one rank: a local tensor and a description of how it is laid out.

A replay compares, carries and copies local parts alone, so nothing here communicates.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """How a DTensor is laid out; with it a local part of the same shape becomes a DTensor again.

    The mesh is this rank's own: corresponding ranks of other replicas have other meshes of the same sizes.
    """

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def describe(self) -> str:
        """What peers must have alike."""
        return f"{self.placements} of {tuple(self.mesh.shape)}"

    def wrap(self, part: torch.Tensor) -> torch.Tensor:
        """The DTensor whose local part is `part`, differentiable with respect to it."""
        return _dtensor_type().from_local(  # type: ignore[no-any-return]
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )


def distribution(tensor: torch.Tensor) -> Distribution | None:
    """The layout of a DTensor; None for any other tensor."""
    if not is_distributed(tensor):
        return None
    dtensor: Any = tensor
    return Distribution(
        mesh=dtensor.device_mesh,
        placements=tuple(dtensor.placements),
        shape=dtensor.shape,
        stride=tuple(dtensor.stride()),
    )


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What of `tensor` lies on this rank: itself, a DTensor's local part, an asynchronous result once it has come.

    Shares memory with `tensor` and carries no autograd history.
    """
    if is_distributed(tensor):
        tensor = tensor._local_tensor  # type: ignore[attr-defined]
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        tensor = tensor.trigger_wait()  # type: ignore[attr-defined]
    return tensor.detach()


def part_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
    """The part of `tensor` that belongs to the part of `like` on this rank, as a gradient belongs to its parameter.

    None when it cannot be had without communication: when ranks hold summands of it.
    """
    if not is_distributed(tensor) or not is_distributed(like):
        return local_part(tensor)
    given: Any = tensor
    wanted: Any = like
    if given.placements == wanted.placements:
        return local_part(tensor)
    if any(a != b and not a.is_replicate() for a, b in zip(given.placements, wanted.placements, strict=True)):
        return None
    with torch.no_grad():
        return local_part(given.redistribute(wanted.device_mesh, wanted.placements))


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor. Loads nothing: without the module there is none."""
    kind = _dtensor_type()
    return kind is not None and isinstance(tensor, kind)


def _dtensor_type() -> Any:
    module = sys.modules.get("torch.distributed.tensor")
    return getattr(module, "DTensor", None)
