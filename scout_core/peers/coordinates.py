"""A rank's place in the parallel layout, and the peers that follow from all ranks' places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class Coordinates:
    """Where one rank stands. Every dimension a job does not use stays 0.

    Ranks with equal coordinates except along `dp_replicate` own corresponding state: they are peers.
    """

    tp: int = 0
    pp: int = 0
    cp: int = 0
    ep: int = 0
    expert_tp: int = 0
    dp_shard: int = 0
    dp_replicate: int = 0

    def cohort_key(self) -> tuple[int, ...]:
        """The place without the replicated dimension: equal keys mean peers."""
        return tuple(getattr(self, f.name) for f in fields(self) if f.name != "dp_replicate")


def peer_ranks(places: Sequence[Coordinates], rank: int) -> tuple[int, ...]:
    """Global ranks of `rank`'s peers, itself included, ascending.

    `places[r]` is the place of global rank r. Pure; O(world size). Raises `ValueError` when two peers claim the
    same `dp_replicate` index, since then the layout is not what it says.
    """
    key = places[rank].cohort_key()
    peers = tuple(r for r, place in enumerate(places) if place.cohort_key() == key)
    if len({places[r].dp_replicate for r in peers}) != len(peers):
        raise ValueError(f"ranks {list(peers)} share all coordinates: two replicas claim one dp_replicate index")
    return peers
