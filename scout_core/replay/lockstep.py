"""Replaying modules that communicate: together with the ranks they communicate with, and never waiting for one in vain.

Partners are the ranks whose own collectives a replay runs (tensor, context, expert and sequence parallel groups). When
a replay has not run in this shape before, partners meet before every one of its collectives, so that one that broke
off keeps the others out. Once it has, the sequence is known, and one that breaks off issues what is left of it. Where
sizes hang on the data, as with tokens sent to experts, nobody can issue them for another: such partners always meet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

import torch

from scout_core.consensus.structure import structure_signature
from scout_core.peers import PeerGroup
from scout_core.replay.collective_tap import CollectiveTap, TappedCall
from scout_core.replay.guard import logger

T = TypeVar("T")
Key = tuple[str, int]

_REMEMBERED = 256
_DONE, _FAILED = -1, -2


class PartnerFailed(RuntimeError):
    """A rank that works in lockstep with this one broke off, so the collective that comes next would never end."""


class Lockstep:
    """The partners of this rank, and the sequences of collectives that replays are known to run.

    `shard_peers`: gathering parameters is a collective among the peers themselves.
    """

    def __init__(self, partners: PeerGroup, peers: PeerGroup, *, shard_peers: bool) -> None:
        self.partners = partners
        self.alone = partners.size < 2 and not shard_peers
        self._peers = peers if shard_peers else None
        self._known: OrderedDict[Key, list[TappedCall]] = OrderedDict()

    def all_can(self, can: bool) -> bool:
        """Whether this rank and everyone it communicates with can. All of them call."""
        return can if self.alone else self._say(_DONE if can else _FAILED)

    def run(
        self,
        key: Key,
        device: torch.device,
        sign: Callable[[list[torch.Tensor]], torch.Tensor],
        work: Callable[[CollectiveTap], T],
    ) -> tuple[T, CollectiveTap]:
        """Run `work` with its collectives watched. Every partner calls with the same `key`, of what all are to run.

        Collectives: those of `work`; on a first run one all-gather more before each of them and one at the end. Raises
        what `work` raises, and `PartnerFailed` when a partner's raised instead.
        """
        known = self._known.get(key)
        tap = CollectiveTap(device, sign, self._meet if known is None else _no_meeting)
        try:
            with tap:
                result = work(tap)
        except PartnerFailed:
            raise
        except Exception:  # partners wait: they must hear of it whatever it is, and the caller reports it
            if known is None:
                self._say(_FAILED)
            else:
                _finish(known[len(tap.calls) :])
            raise
        if known is None:
            steady = not any(call.free for call in tap.replayed)
            if self._say(_DONE if steady else _FAILED):
                self._remember(key, tap)
        return result, tap

    def _remember(self, key: Key, tap: CollectiveTap) -> None:
        self._known[key] = tap.calls
        if len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)

    def _meet(self, index: int, operator: str) -> None:
        if not self._say(structure_signature((index, operator)) >> 2):
            raise PartnerFailed(f"not every partner comes to collective {index} ({operator}) of the replay")

    def _say(self, word: int) -> bool:
        """Whether everybody says the same, and nobody that it failed. Through the peers to all partners of theirs."""
        for group in (self._peers, self.partners):
            said = {word} if group is None else set(group.gather(torch.tensor([word])).flatten().tolist())
            if len(said) > 1:
                word = _FAILED
        return word != _FAILED


def _no_meeting(index: int, operator: str) -> None:
    return None


def _finish(calls: list[TappedCall]) -> None:
    """Issue the collectives that partners still wait in; what they get is not used, since the replay failed here."""
    if calls:
        logger.warning("SCOUT completes %d collectives of a replay that broke off, for its partners", len(calls))
    for call in calls:
        call.repeat()
