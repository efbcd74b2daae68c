"""What each rank can load of GEMINI state, and how a complete step is put together from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from scout_core.trust.channel import JobChannel
from scout_core.trust.files import UntrustedFile
from scout_core.trust.gemini import pack_meta, unpack_meta
from scout_core.trust.memory import Copy
from scout_core.trust.shard import ShardRecord, Shards
from scout_core.trust.states import TrustState

_TRUST_ORDER = (TrustState.LATEST_GEMINI, TrustState.CANDIDATE, TrustState.RECOVERY_VERIFIED)


@dataclass(frozen=True, kw_only=True)
class Holding:
    """One rank's part of one step, in reach of `holder`: in its memory or on its disk. `nearness` prefers memory."""

    holder: int
    owner: int
    step: int
    state: TrustState
    attempt: int
    digest: str
    nearness: int


@dataclass(frozen=True, kw_only=True)
class Complete:
    """A step of which every rank's part is in reach; who holds which, how near. `state`: the least trusted part's."""

    step: int
    attempt: int
    state: TrustState
    holders: tuple[int, ...]
    nearness: tuple[int, ...] = ()


def complete_steps(holdings: Sequence[Holding], world_size: int) -> list[Complete]:
    """Every step that every rank can load, newest first. Pure.

    Parts of different attempts are never mixed: a replayed step need not have the bits of the first. Each rank takes
    its part from itself where it can, else from the lowest rank that holds it.
    """
    found: dict[tuple[int, int], dict[int, Holding]] = {}
    for holding in sorted(holdings, key=lambda h: (h.holder != h.owner, h.nearness, h.holder)):
        found.setdefault((holding.step, holding.attempt), {}).setdefault(holding.owner, holding)
    complete = []
    for (step, attempt), parts in found.items():
        if set(parts) != set(range(world_size)):
            continue
        state = min((part.state for part in parts.values()), key=_TRUST_ORDER.index)
        holders = tuple(parts[owner].holder for owner in range(world_size))
        nearness = tuple(parts[owner].nearness for owner in range(world_size))
        complete.append(Complete(step=step, attempt=attempt, state=state, holders=holders, nearness=nearness))
    return sorted(complete, key=lambda c: (c.step, c.attempt), reverse=True)


class LocalHoldings:
    """What this rank holds: copies in memory and shards on its node's disk."""

    def __init__(self, rank: int, world_size: int, shards: Shards | None, memory: Sequence[tuple[int, Copy]]) -> None:
        """`memory`: `(attempt, copy)` pairs that survived in this process."""
        self.refused: list[str] = []
        self._rank = rank
        self._shards = shards
        self._memory = {(copy.owner, copy.step, attempt): copy for attempt, copy in memory if copy.digest is not None}
        self._disk: dict[tuple[int, int, int], tuple[Path, ShardRecord]] = {}
        for owner in range(world_size) if shards is not None else ():
            assert shards is not None
            good, bad = shards.find(owner)
            self.refused += [str(error) for error in bad]
            for place, record in good.items():
                self._disk.setdefault((owner, record.step, record.attempt), (place, record))

    def list(self) -> list[Holding]:
        """Everything held, as told to the other ranks. Content is verified when it is read."""
        memory = [self._holding(key, copy.state, copy.digest or "", nearness=0) for key, copy in self._memory.items()]
        disk = [
            self._holding(key, TrustState(record.state), record.digest, nearness=1)
            for key, (_, record) in self._disk.items()
        ]
        return memory + disk

    def take(self, owner: int, step: int, attempt: int) -> Copy | str:
        """A verified copy, or why there is none. What is refused is not offered again."""
        key = (owner, step, attempt)
        copy = self._memory.get(key)
        if copy is not None:
            if copy.intact():
                return copy
            del self._memory[key]
        entry = self._disk.get(key)
        if entry is None or self._shards is None:
            return f"rank {self._rank} holds no intact copy of rank {owner} at step {step}"
        try:
            return self._shards.read(entry[0], owner)
        except UntrustedFile as error:
            del self._disk[key]
            self.refused.append(str(error))
            return str(error)

    def _holding(self, key: tuple[int, int, int], state: TrustState, digest: str, nearness: int) -> Holding:
        owner, step, attempt = key
        return Holding(
            holder=self._rank, owner=owner, step=step, state=state, attempt=attempt, digest=digest, nearness=nearness
        )


def fetch(local: LocalHoldings, wanted: Complete, channel: JobChannel) -> tuple[Copy | None, list[str]]:
    """This rank's verified part of a complete step, moved from its holder if need be, and why any rank has none.

    Every rank calls. Collectives: gathers of small JSON, and point-to-point transfers in bounded chunks.
    """
    rank = channel.rank
    taken = {
        owner: local.take(owner, wanted.step, wanted.attempt)
        for owner, holder in enumerate(wanted.holders)
        if holder == rank
    }
    notes = [copy for copy in taken.values() if isinstance(copy, str)]
    metas = {
        str(owner): {"meta": pack_meta(copy).decode(), "bytes": copy.data.numel()}
        for owner, copy in taken.items()
        if isinstance(copy, Copy) and owner != rank
    }
    told = channel.gather_json({"notes": notes, "metas": metas})
    problems = [note for one in told for note in one["notes"]]
    if problems:
        return None, problems
    own = taken.get(rank)
    for owner, holder in enumerate(wanted.holders):
        if owner == holder:
            continue
        if holder == rank:
            copy = taken[owner]
            assert isinstance(copy, Copy)
            channel.send(copy.data, owner)
        elif owner == rank:
            entry = told[holder]["metas"][str(owner)]
            data = torch.empty(entry["bytes"], dtype=torch.uint8)
            channel.receive(data, holder)
            own = unpack_meta(entry["meta"].encode(), data)
    assert isinstance(own, Copy)
    damaged = [] if own.intact() else [f"rank {rank}'s part was damaged on its way"]
    problems = [text for one in channel.gather_json(damaged) for text in one]
    return (None if problems else own), problems
