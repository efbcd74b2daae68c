"""Whose fault slow collectives are: the one rank that all slow process groups have in common, or nobody's.

A collective is as slow as the slowest of its members, so one slow group accuses all of them alike. A rank stands in
several groups of different members. When every slow group holds it and no healthy one does, it is the endpoint they
share. Everything else (a slow pair, half of a switch, a job that is slow as a whole, one slow group, a group nobody
timed) fits more than one culprit and names no rank.

Pure: no process group, clock, file or tensor.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scout_core.timing.stragglers import StragglerThresholds

Finding = Literal[
    "rank",
    "shared_resource",
    "none_slow",
    "one_slow_group",
    "no_healthy_group",
    "no_common_rank",
    "several_common_ranks",
    "contradicted",
    "missing",
]
Resources = Mapping[int, Mapping[str, str]]
HOST = "host"
"""The kind under which hosts are looked at as shared resources."""


@dataclass(frozen=True, kw_only=True)
class GroupTiming:
    """How long one process group took for a collective.

    `kind` says along what it was built (tp, dp, a pair test, ...); kind and ranks together identify it, and several
    timings of one group are repetitions. `elapsed_ms` is the time that even the member who came last spent in it, so
    that waiting for somebody is not counted; None if unknown. The time is compared with `baseline_ms`, this group's own
    while healthy, or else with the median of `peers_ms`, the same collective in groups of the same kind and size.
    `complete` is False when some member's time is missing.

    Raises ValueError unless there are two ranks or more, each given once.
    """

    kind: str
    ranks: tuple[int, ...]
    elapsed_ms: float | None
    baseline_ms: float | None = None
    peers_ms: tuple[float, ...] = ()
    complete: bool = True

    def __post_init__(self) -> None:
        if len(self.ranks) < 2 or len(set(self.ranks)) < len(self.ranks):
            raise ValueError(f"a {self.kind} group needs two ranks or more, each once, not {self.ranks}")

    @property
    def usual_ms(self) -> float | None:
        """What the time is compared with; None if nothing usable is known."""
        if self.baseline_ms is not None:
            return self.baseline_ms if _is_time(self.baseline_ms) else None
        usable = [time for time in self.peers_ms if _is_time(time)]
        return statistics.median(usable) if usable else None


@dataclass(frozen=True, kw_only=True)
class CrossGroupResult:
    """What the slow groups have in common.

    rank: the one rank at fault, or None. host: its host, or the host that all slow groups share, or None.
    resource: `kind name` of the shared thing that explains all slow groups where no single rank does, or None.
    finding: `rank` and `shared_resource` name something; the others are why nothing is named (see `localize`).
    supporting: the slow groups. contradicting: healthy groups that hold a rank which all slow ones have in common.
    confidence: 0 when nothing is named. Otherwise 0.5, and up to 1 with the share of the slow groups' other members
        whom a healthy group clears; halved when a group that was looked at is neither slow nor healthy, or not known.
    """

    rank: int | None = None
    host: str | None = None
    resource: str | None = None
    finding: Finding
    supporting: tuple[Mapping[str, Any], ...] = ()
    contradicting: tuple[Mapping[str, Any], ...] = ()
    confidence: float = 0.0
    reason: str

    def to_json(self) -> dict[str, Any]:
        """A plain dict for strict JSON; `ReplayResult.cross_pg_result` holds it."""
        return {
            "rank": self.rank,
            "host": self.host,
            "resource": self.resource,
            "finding": self.finding,
            "supporting": [dict(group) for group in self.supporting],
            "contradicting": [dict(group) for group in self.contradicting],
            "confidence": self.confidence,
            "reason": self.reason,
        }


@dataclass(frozen=True, kw_only=True)
class _Group:
    """All timings of one group. `ratio` is the time over the usual one, of the fastest repetition."""

    kind: str
    ranks: frozenset[int]
    state: Literal["slow", "healthy", "unclear", "missing"]
    ratio: float | None

    def to_json(self) -> dict[str, Any]:
        ratio = None if self.ratio is None else round(self.ratio, 3)
        return {"kind": self.kind, "ranks": sorted(self.ranks), "ratio": ratio}


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """All groups, by state."""

    slow: tuple[_Group, ...]
    healthy: tuple[_Group, ...]
    unclear: tuple[_Group, ...]
    missing: tuple[_Group, ...]


def localize(
    timings: Iterable[GroupTiming],
    *,
    hosts: Mapping[int, str] | None = None,
    resources: Resources | None = None,
    thresholds: StragglerThresholds | None = None,
) -> CrossGroupResult:
    """Find what all slow groups have in common.

    `hosts[rank]` is a rank's host; `resources[rank]` the things it hangs on, by kind, for instance
    `{"nic": "node4/mlx5_1", "switch": "leaf7"}`, with names that are unique in the job. Of `thresholds`, `relative` and
    `absolute_ms` count. A group is slow when each of its timings exceeds both against its usual time; healthy when none
    exceeds half of both; between them it is unclear and says nothing. A group without a complete and comparable timing
    is missing.

    A rank is named (`rank`) when at least two groups are slow, of different kind or membership; it is the only rank
    that is in all of them; no healthy group holds it (else `contradicted`), and no missing one, which might be healthy
    (else `missing`); and some other group is healthy (else `no_healthy_group`: the job is slow, or only its slow part
    was looked at).

    Where no single rank is common (`no_common_rank`, `several_common_ranks`), a thing that several ranks share may be:
    a host, or anything in `resources`. A group runs through it when some members hang on it and others do not, or when
    all do and they stand on more than one host; members on one host may have another way to each other, so a group
    within a host neither accuses nor clears what it hangs on. The thing is named (`shared_resource`) when two slow
    groups or more run through it and no slow group has no member on it; every rank on it is in a slow group that runs
    through it; no healthy or missing group runs through it; some group without a member on it is healthy; and it is the
    only one for which all this holds. Things on which the same ranks hang cannot be told apart and are named together,
    and so is a host beside what is on it.

    Pure and independent of the order of anything given.
    """
    seen = _sort(timings, thresholds or StragglerThresholds())
    if len(seen.slow) < 2:
        return _too_few(seen)
    if not seen.healthy:
        what = "all groups are slow" if not (seen.unclear or seen.missing) else "groups are slow and none is healthy"
        return _nobody(seen, "no_healthy_group", f"{what}: the job as a whole, or what it shares")
    common = sorted(frozenset.intersection(*(group.ranks for group in seen.slow)))
    if len(common) == 1:
        return _one_rank(seen, common[0], hosts or {})
    shared = _shared(seen, hosts or {}, resources or {})
    if shared is not None:
        return shared
    if common:
        text = f"the slow groups share ranks {', '.join(map(str, common))}, and nothing tells these apart"
        return _nobody(seen, "several_common_ranks", text, suspects=frozenset(common))
    return _nobody(seen, "no_common_rank", "no rank is in all slow groups")


def _too_few(seen: _Seen) -> CrossGroupResult:
    if seen.slow:
        ranks = ", ".join(map(str, sorted(seen.slow[0].ranks)))
        text = f"only one group is slow, {seen.slow[0].kind} of ranks {ranks}: any of them may be the cause"
        return _nobody(seen, "one_slow_group", text)
    if seen.healthy or seen.unclear:
        return _nobody(seen, "none_slow", "no group is slow")
    return _nobody(seen, "missing", "no group has a complete time and one to compare it with")


def _one_rank(seen: _Seen, rank: int, hosts: Mapping[int, str]) -> CrossGroupResult:
    suspects = frozenset([rank])
    held_by = _holding(seen.healthy, suspects)
    if held_by:
        text = f"rank {rank} is in all slow groups, and in {len(held_by)} healthy one(s) too"
        return _nobody(seen, "contradicted", text, suspects=suspects)
    unknown = _holding(seen.missing, suspects)
    if unknown:
        text = f"rank {rank} is in all slow groups, but {len(unknown)} of its groups have no complete time"
        return _nobody(seen, "missing", text, suspects=suspects)
    return CrossGroupResult(
        rank=rank,
        host=hosts.get(rank),
        finding="rank",
        supporting=_told(seen.slow),
        confidence=_confidence(seen, suspects),
        reason=f"rank {rank} is the only rank in all {len(seen.slow)} slow groups, and in no healthy one",
    )


def _shared(seen: _Seen, hosts: Mapping[int, str], resources: Resources) -> CrossGroupResult | None:
    """The host and the resource that explain all slow groups, if they do and no other does."""
    attached: dict[tuple[str, str], set[int]] = {}
    for rank, hangs_on in resources.items():
        for kind, name in hangs_on.items():
            attached.setdefault((kind, name), set()).add(rank)
    for rank, machine in hosts.items():
        attached.setdefault((HOST, machine), set()).add(rank)
    # Whatever explains all slow groups has a member in the first.
    near = [key for key, ranks in attached.items() if not ranks.isdisjoint(seen.slow[0].ranks)]
    fitting: dict[frozenset[int], list[tuple[str, str]]] = {}
    for key in sorted(near):
        ranks = frozenset(attached[key])
        if _explains(seen, ranks, hosts):
            fitting.setdefault(ranks, []).append(key)
    machines = [name for keys in fitting.values() for kind, name in keys if kind == HOST]
    things = [(ranks, keys) for ranks, keys in fitting.items() if any(kind != HOST for kind, _ in keys)]
    inside = all(ranks <= attached[HOST, machines[0]] for ranks, _ in things) if machines else True
    if not fitting or len(machines) > 1 or len(things) > 1 or not inside:
        return None
    host = machines[0] if machines else None
    thing = ", ".join(" ".join(key) for key in things[0][1] if key[0] != HOST) if things else None
    named = " and ".join(name for name in (f"host {host}" if host else None, thing) if name)
    return CrossGroupResult(
        host=host,
        resource=thing,
        finding="shared_resource",
        supporting=_told(seen.slow),
        confidence=_confidence(seen, min(fitting, key=len)),
        reason=f"all {len(seen.slow)} slow groups hang on {named}, and no healthy one runs through it",
    )


def _explains(seen: _Seen, attached: frozenset[int], hosts: Mapping[int, str]) -> bool:
    if len(attached) < 2 or any(attached.isdisjoint(group.ranks) for group in seen.slow):
        return False
    through = [group for group in seen.slow if _runs_through(group, attached, hosts)]
    if len(through) < 2 or not attached <= frozenset().union(*(group.ranks for group in through)):
        return False
    if any(_runs_through(group, attached, hosts) for group in (*seen.healthy, *seen.missing)):
        return False
    return any(attached.isdisjoint(group.ranks) for group in seen.healthy)


def _runs_through(group: _Group, attached: frozenset[int], hosts: Mapping[int, str]) -> bool:
    if attached.isdisjoint(group.ranks):
        return False
    if not group.ranks <= attached:
        return True
    return len({hosts[rank] for rank in group.ranks if rank in hosts}) > 1


def _sort(timings: Iterable[GroupTiming], thresholds: StragglerThresholds) -> _Seen:
    """All timings of a group made one, and the groups in an order of their own."""
    repeated: dict[tuple[str, frozenset[int]], list[GroupTiming]] = {}
    for timing in timings:
        repeated.setdefault((timing.kind, frozenset(timing.ranks)), []).append(timing)
    groups = [_join(kind, ranks, same, thresholds) for (kind, ranks), same in repeated.items()]
    groups.sort(key=lambda group: (group.kind, sorted(group.ranks)))

    def of_state(state: str) -> tuple[_Group, ...]:
        return tuple(group for group in groups if group.state == state)

    return _Seen(
        slow=of_state("slow"), healthy=of_state("healthy"), unclear=of_state("unclear"), missing=of_state("missing")
    )


def _join(kind: str, ranks: frozenset[int], same: Sequence[GroupTiming], thresholds: StragglerThresholds) -> _Group:
    usable = [
        (timing.elapsed_ms, usual)
        for timing in same
        if timing.complete and _is_time(timing.elapsed_ms) and (usual := timing.usual_ms) is not None
    ]
    pairs = [(elapsed, usual) for elapsed, usual in usable if elapsed is not None]
    if not pairs:
        return _Group(kind=kind, ranks=ranks, state="missing", ratio=None)
    ratios = [elapsed / usual for elapsed, usual in pairs if usual > 0]
    state: Literal["slow", "healthy", "unclear"] = "unclear"
    if all(thresholds.exceeded(*pair) for pair in pairs):
        state = "slow"
    elif not any(thresholds.half_exceeded(*pair) for pair in pairs):
        state = "healthy"
    return _Group(kind=kind, ranks=ranks, state=state, ratio=min(ratios, default=None))


def _confidence(seen: _Seen, named: frozenset[int]) -> float:
    others = frozenset().union(*(group.ranks for group in seen.slow)) - named
    cleared = others & frozenset().union(*(group.ranks for group in seen.healthy))
    certainty = 0.5 + 0.5 * (len(cleared) / len(others) if others else 0.0)
    return round(certainty / (2 if seen.missing or seen.unclear else 1), 3)


def _holding(groups: Sequence[_Group], ranks: frozenset[int]) -> list[_Group]:
    return [group for group in groups if not ranks.isdisjoint(group.ranks)]


def _told(groups: Sequence[_Group]) -> tuple[Mapping[str, Any], ...]:
    return tuple(group.to_json() for group in groups)


def _nobody(seen: _Seen, finding: Finding, text: str, *, suspects: frozenset[int] = frozenset()) -> CrossGroupResult:
    return CrossGroupResult(
        finding=finding,
        supporting=_told(seen.slow),
        contradicting=_told(_holding(seen.healthy, suspects)),
        reason=text,
    )


def _is_time(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value >= 0
