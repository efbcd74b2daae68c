"""The collectives one rank issued since the last check: what the readiness contract compares, and what explains it.

A desync need not stop anything: calls of equal shape that pair up wrongly go on. So the ranks that meet in a check
compare a rolling word per process group, and exchange the calls themselves only once two words differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from scout_core.consensus.readiness import COMPARED_GROUPS
from scout_core.oob.fingerprints import Described, digest_of, group_key

KEPT_CALLS = 2048
"""Newest calls that are kept to find the first that differs; the words are over all of them."""
KEPT_GROUPS = 64

Members = tuple[int, ...]


@dataclass(slots=True)
class Tallied:
    """One process group: calls issued since the last check, a rolling word over them, whether it holds all peers."""

    spans: bool
    issued: int = 0
    digest: int = 0


@dataclass(frozen=True)
class TalliedCalls:
    """What a rank hands over when words differ: per group its calls and word, and the newest calls, oldest first.

    A call is `(members, its number in the group, fingerprint, text, optimizer step)`.
    """

    groups: dict[Members, tuple[int, int]]
    calls: list[tuple[Members, int, int, str, int]]


class Tally:
    """Counts the calls that training issues.

    `digest` is one word over the calls on all groups that hold every peer, their order among each other included.
    """

    def __init__(self, peers: Sequence[int]) -> None:
        self.digest = 0
        self._peers = frozenset(peers)
        self._groups: dict[Members, Tallied] = {}
        self._recent: deque[tuple[Members, int, Described, int]] = deque(maxlen=KEPT_CALLS)

    def add(self, members: Members, what: Described, step: int) -> None:
        """A call was issued on the group with these global ranks."""
        group = self._groups.get(members) or self._take(members)
        group.issued += 1
        group.digest = digest_of(group.digest, members, what.fingerprint + step)
        if group.spans:
            self.digest = digest_of(self.digest, members, what.fingerprint + step)
        self._recent.append((members, group.issued, what, step))

    def words(self, ranks: Sequence[int]) -> list[int]:
        """`(key, digest)` of groups in which two or more of these ranks meet, for `judge_groups`; zeros at the end.

        Groups that hold all peers are left out among the peers, who compare `digest`. A group of which nothing was
        heard since the last check is there with digest 0, so that the one member that went on shows.
        """
        met = frozenset(ranks)
        known = [
            (group_key(members), group.digest)
            for members, group in self._groups.items()
            if len(met.intersection(members)) > 1 and not (group.spans and met == self._peers)
        ]
        chosen = sorted(known)[:COMPARED_GROUPS]
        return [word for pair in chosen for word in pair] + [0, 0] * (COMPARED_GROUPS - len(chosen))

    def calls(self) -> TalliedCalls:
        """Everything that is kept of the calls since the last check."""
        return TalliedCalls(
            groups={members: (group.issued, group.digest) for members, group in self._groups.items()},
            calls=[
                (members, number, what.fingerprint, what.text, step) for members, number, what, step in self._recent
            ],
        )

    def reset(self) -> None:
        """The calls so far have been compared. Groups stay known."""
        self.digest = 0
        self._recent.clear()
        for group in self._groups.values():
            group.issued = group.digest = 0

    def _take(self, members: Members) -> Tallied:
        """A group met for the first time. Among too many, those that rest make room; else it is not compared."""
        group = Tallied(spans=bool(self._peers) and self._peers <= set(members))
        if len(self._groups) >= KEPT_GROUPS:
            for resting in [known for known, found in self._groups.items() if not found.issued]:
                del self._groups[resting]
        if len(self._groups) < KEPT_GROUPS:
            self._groups[members] = group
        return group
