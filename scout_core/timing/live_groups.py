"""Slow collectives of live steps: each group's largest one, timed on all its members, and whose fault slowness is.

A check hears, in the gathers that it makes anyway, how long each rank was in the largest collective of each of its
groups. What even the member that came last spent in it is the group's time; the more of the others is waiting. Where
ranks work in lockstep, no rank hears of all members of a group among its peers alone: they tell one another what their
peers said, in one more gather, while usual times are being learned and when something looks slow.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from scout_core.config import ReplayHarnessConfig
from scout_core.consensus.structure import structure_signature
from scout_core.peers import PeerGroup
from scout_core.timing.localization import GroupTiming, localize
from scout_core.timing.step_clock import GroupCall, code_of, value_of
from scout_core.timing.stragglers import StragglerThresholds

SLOTS = 8
"""Groups of which a rank tells in one check."""
WORDS = 2 * SLOTS
_CHECKS = 3
"""Checks in a row in which a group must be slow, and in which a rank must be named before it is to be excluded."""
_LEARNED = 8
"""Times that make a group's usual one."""
_LESSONS = 64
"""Extra gathers made only to learn usual times: a job whose collectives never repeat has none to learn."""
_KEPT = 64
_FORGOTTEN = 16
"""Times that a collective could have been heard of and was not, after which it is forgotten."""

Heard = dict[int, dict[int, int]]
"""By key of a collective and its group: what each member said."""


@dataclass(kw_only=True)
class _Group:
    """One collective of one group. `recent` are pairs of check and ms; `usual` the ms while it was not slow.

    `hearing` is the number of the newest exchange among partners when it was heard of.
    """

    kind: int
    size: int
    overlapped: bool
    ranks: tuple[int, ...] = ()
    hearing: int = 0
    recent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_CHECKS))
    usual: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    @property
    def usual_ms(self) -> float | None:
        return statistics.median(self.usual) if len(self.usual) >= _LEARNED else None


class LiveGroups:
    """The groups of this rank, its peers and its lockstep partners, over the checks. All of them hold it alike.

    `table[i]` are the peers of the i-th partner. Every peer calls `words`, `hear`, `exchange` where any of the partners
    `wants` it, and `judge`, in this order, once at each check. `own` are this rank's timings, as a result holds them,
    and `found` what the slow groups have in common, as `CrossGroupResult` tells it; None while no group is slow.
    """

    def __init__(
        self,
        peers: PeerGroup,
        partners: PeerGroup,
        table: Sequence[Sequence[int]],
        config: ReplayHarnessConfig,
        hosts: Sequence[str] = (),
    ) -> None:
        self._peers = peers
        self._partners = partners
        self._near = frozenset(peers.ranks).union(*table)
        self._thresholds = StragglerThresholds.of(config)
        self._hosts = dict(zip(peers.ranks, hosts, strict=False))
        self._resources = config.resources
        self._check = self._exchanges = 0
        self._heard: Heard = {}
        self._groups: dict[int, _Group] = {}
        self._operators: dict[int, str] = {}
        self._named: tuple[object, int] = (None, 0)
        self.own: list[dict[str, Any]] = []
        self.found: dict[str, Any] | None = None
        self.wants = partners.size > 1

    def words(self, calls: Sequence[tuple[GroupCall, float]]) -> list[int]:
        """What this rank tells of its collectives, largest first: `WORDS` words."""
        self._check += 1
        self.own = [
            {"recipe": "live_step", "operator": c.operator, "ranks": list(c.ranks), "bytes": c.size, "elapsed_ms": ms}
            for c, ms in calls
        ]
        told = [(call, ms) for call, ms in calls if len(call.ranks) > 1 and self._near.issuperset(call.ranks)]
        words: list[int] = []
        for call, ms in sorted(told, key=lambda pair: -pair[0].size)[:SLOTS]:
            kind = call.fingerprint & 0x7FFFFF
            self._operators[kind] = call.operator
            key = structure_signature((call.ranks, call.fingerprint)) >> 1  # fits a signed word
            words += [key, kind << 40 | len(call.ranks) << 17 | call.overlapped << 16 | code_of(ms * 1e3)]
        return words + [0] * (WORDS - len(words))

    def hear(self, rows: Sequence[Sequence[int]]) -> None:
        """Take in the words of all peers, or of none."""
        self._heard = {}
        for rank, row in zip(self._peers.ranks, rows, strict=False):
            for key, said in zip(row[::2], row[1::2], strict=True):
                if said:
                    self._heard.setdefault(key, {})[rank] = said

    def exchange(self) -> None:
        """Hear what the partners' peers said, and where they run. Every partner calls; one object gather."""
        self._exchanges += 1
        gathered: list[Any] = [None] * self._partners.size
        dist.all_gather_object(gathered, (self._heard, self._hosts), group=self._partners.control)
        self._heard = {}
        for heard, hosts in gathered:
            self._hosts |= hosts
            for key, said in heard.items():
                self._heard.setdefault(key, {}).update(said)

    def judge(self) -> None:
        """Settle what the slow groups have in common, and whether partners tell one another at the next check."""
        for key, said in self._heard.items():
            self._learn(key, said)
        for key in [key for key, group in self._groups.items() if self._unheard(group) >= _FORGOTTEN]:
            del self._groups[key]
        found = localize(
            [timing for key in self._groups for timing in self._timings(key)],
            hosts=self._hosts,
            resources=self._resources,
            thresholds=self._thresholds,
        )
        name = found.rank if found.rank is not None else found.resource or found.host
        self._named = (name, self._named[1] + 1 if name == self._named[0] else 1)
        lasting = name is not None and self._named[1] >= _CHECKS
        self.found = None
        if found.supporting:
            self.found = {**found.to_json(), "decision": "exclude_at_next_restart" if lasting else "observe"}
        self.wants = self._partners.size > 1 and any(self._needs_partners(*pair) for pair in self._heard.items())

    def _unheard(self, group: _Group) -> int:
        """How often it could have been heard of since it was: at checks if all its members are peers, else only when
        partners told one another."""
        if set(self._peers.ranks).issuperset(group.ranks):
            return self._check - group.recent[-1][0]
        return self._exchanges - group.hearing

    def _needs_partners(self, key: int, said: Mapping[int, int]) -> bool:
        usual = self._groups[key].usual_ms if key in self._groups else None
        if usual is None:
            return self._exchanges < _LESSONS
        return self._thresholds.exceeded(_least_ms(said), usual)

    def _learn(self, key: int, said: Mapping[int, int]) -> None:
        kind, size, overlapped, _ = _fields(next(iter(said.values())))
        if len(said) != size:
            return
        group = self._groups.setdefault(key, _Group(kind=kind, size=size, overlapped=overlapped))
        group.ranks, group.hearing = tuple(sorted(said)), self._exchanges
        elapsed, usual = _least_ms(said), group.usual_ms
        group.recent.append((self._check, elapsed))
        if usual is None or not self._thresholds.exceeded(elapsed, usual):
            group.usual.append(elapsed)

    def _timings(self, key: int) -> list[GroupTiming]:
        """The last three checks of a group, of which all must have it; none of one that cannot be compared."""
        group = self._groups[key]
        recent = [ms for check, ms in group.recent if check > self._check - _CHECKS]
        times: list[float | None] = [*recent] or [None]
        usual = group.usual_ms
        others = () if usual is not None else self._alike(key)
        compared = usual if usual is not None else statistics.median(others) if others else None
        slow = compared is not None and all(self._thresholds.exceeded(ms, compared) for ms in recent)
        if group.overlapped and not (slow and len(recent) == _CHECKS):
            return []  # little is left to wait for when the rest went on beside other work: that clears nobody
        kind = f"{self._operators.get(group.kind, 'collective')} {group.kind:06x}"
        return [
            GroupTiming(
                kind=kind,
                ranks=group.ranks,
                elapsed_ms=ms,
                baseline_ms=usual,
                peers_ms=others,
                complete=len(recent) == _CHECKS,
            )
            for ms in times
        ]

    def _alike(self, key: int) -> tuple[float, ...]:
        """Newest times of the same collective in other groups that span as many hosts."""
        own = self._groups[key]
        return tuple(
            group.recent[-1][1]
            for other, group in self._groups.items()
            if other != key
            and (group.kind, group.size) == (own.kind, own.size)
            and group.recent[-1][0] == self._check
            and self._spread(group.ranks) == self._spread(own.ranks)
        )

    def _spread(self, ranks: Sequence[int]) -> int:
        return len({self._hosts.get(rank, "") for rank in ranks})


def _fields(said: int) -> tuple[int, int, bool, int]:
    """Kind of collective, size of its group, whether it ran beside other work, and the code of its time."""
    return said >> 40, said >> 17 & 0x7FFFFF, bool(said >> 16 & 1), said & 0xFFFF


def _least_ms(said: Mapping[int, int]) -> float:
    return min(value_of(_fields(word)[3]) for word in said.values()) / 1e3
