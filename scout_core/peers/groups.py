"""The process groups that ranks which are checked together talk through."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class PeerGroup:
    """Ranks that are checked together and their two channels. Peers are one such group, lockstep partners another.

    `control` is a Gloo group of SCOUT's own: readiness and evidence travel on it, so that a rank which is out of
    step can never pair its training collectives with a check. `data` carries invocations; it is the job's own
    replicated group and is only entered once readiness has shown that every peer is at the same boundary.
    """

    ranks: tuple[int, ...]
    rank: int
    control: dist.ProcessGroup | None
    data: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def position(self) -> int:
        """This rank's place in every bitmap and evidence row."""
        return self.ranks.index(self.rank)

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """All peers' rows: int64 `[n]` on the CPU in, int64 `[peers, n]` out. Every peer calls; one all-gather."""
        if self.control is None:
            return row.unsqueeze(0)
        out = torch.empty(self.size, row.numel(), dtype=row.dtype)
        dist.all_gather(list(out.unbind(0)), row, group=self.control)
        return out

    def broadcast(self, buffer: torch.Tensor, source: int) -> None:
        """Fill `buffer` on every peer from the peer at position `source`. Every peer calls; one broadcast."""
        group = self.data if buffer.is_cuda else self.control
        if group is not None:
            dist.broadcast(buffer, src=self.ranks[source], group=group)


def build_peer_group(ranks: tuple[int, ...], data: dist.ProcessGroup | None, timeout_s: float) -> PeerGroup:
    """The group of this rank with `ranks`. Called by every rank in `ranks`, and only by those; creates one Gloo group.

    `data` is the job's existing group over the same ranks, or None when there is none.
    """
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if len(ranks) < 2:
        return PeerGroup(ranks=ranks, rank=rank, control=None)
    control = dist.new_group(
        ranks=list(ranks),
        backend="gloo",
        timeout=timedelta(seconds=timeout_s),
        use_local_synchronization=True,
        group_desc="scout_control",
    )
    return PeerGroup(ranks=ranks, rank=rank, control=control, data=data)
