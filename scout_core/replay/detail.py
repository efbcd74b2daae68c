"""A closer look at a dispute: which tensors differ, and in how many elements by how much."""

from __future__ import annotations

import torch

from scout_core.consensus.c3 import C3Status, classify_exact
from scout_core.peers import PeerGroup
from scout_core.replay.evidence import EvidenceBatch
from scout_core.replay.result import Detail
from scout_core.replay.workbench import Material

_MAX_ELEMENTS = 1 << 24  # a dispute may cost one broadcast of 64 MiB of float32, not of a whole embedding table
_MAX_NAMES = 8


def look_closer(
    peers: PeerGroup, batch: EvidenceBatch, material: Material | None, surface: str, bitmap: tuple[bool, ...]
) -> Detail | None:
    """Compare a disputed surface tensor by tensor.

    Every peer calls after one more execution. One all-gather of per-tensor signatures; if they differ, one broadcast of
    the first differing tensor from the first unblamed peer, and one all-gather of the counts. A rank whose execution
    raised takes part with zeros and measures nothing. None if the difference has vanished.
    """
    own = batch.signatures_of(material.signed[surface]) if material and surface in material.signed else []
    length = peers.gather(torch.tensor([len(own)], dtype=torch.int64)).flatten().tolist()
    if material is None or len(set(length)) > 1 or not own:
        return None
    rows = peers.gather(torch.tensor([word or 0 for word in own], dtype=torch.int64)).tolist()
    columns = list(zip(*rows, strict=True))
    differing = [i for i, column in enumerate(columns) if classify_exact(column).status is not C3Status.AGREE]
    if not differing:
        return None
    names = tuple(material.names[surface][i] for i in differing[:_MAX_NAMES])
    tensor = material.tensors[surface][differing[0]]
    measured = tensor is not None and tensor.numel() <= _MAX_ELEMENTS
    agreed = peers.gather(torch.tensor([int(measured)], dtype=torch.int64)).flatten().tolist()
    if tensor is None or not all(agreed):
        return Detail(surface=surface, tensors=names)
    counts, largest = _measure(peers, tensor, bitmap.index(False) if False in bitmap else 0)
    return Detail(surface=surface, tensors=names, elements=tensor.numel(), differing=counts, largest_difference=largest)


def _measure(peers: PeerGroup, tensor: torch.Tensor, reference: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Per peer: elements whose bytes differ from the reference peer's tensor, and the largest absolute difference."""
    mine = tensor.detach().contiguous().reshape(-1)
    theirs = mine.clone()
    peers.broadcast(theirs.view(torch.uint8), reference)
    width = mine.element_size()
    unequal = (mine.view(torch.uint8) != theirs.view(torch.uint8)).reshape(-1, width).any(dim=1)
    difference = (mine.to(torch.float64) - theirs.to(torch.float64)).abs().nan_to_num(nan=float("inf"))
    largest = difference[unequal].max() if bool(unequal.any()) else torch.zeros((), dtype=torch.float64)
    row = torch.tensor([int(unequal.sum()), 0], dtype=torch.int64)
    row[1:] = largest.cpu().to(torch.float64).reshape(1).view(torch.int64)
    gathered = peers.gather(row)
    return tuple(gathered[:, 0].tolist()), tuple(gathered[:, 1].contiguous().view(torch.float64).tolist())
