"""Slow collectives of many groups, and whom they name."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.peers import Grid
from scout_core.timing.localization import CrossGroupResult, GroupTiming, localize

PAIRS = list(combinations(range(6), 2))
HOSTS = {rank: f"node{rank // 2}" for rank in range(6)}
LEAVES = {rank: {"switch": "left" if rank < 3 else "right"} for rank in range(6)}


def timed(kind: str, ranks: Sequence[int], slow: bool, *, factor: float = 1.8, complete: bool = True) -> GroupTiming:
    elapsed_ms = 20.0 * (factor if slow else 1.0)
    return GroupTiming(kind=kind, ranks=tuple(ranks), elapsed_ms=elapsed_ms, baseline_ms=20.0, complete=complete)


def matrix(is_slow: Callable[[int, int], bool], pairs: Iterable[tuple[int, int]] = PAIRS) -> list[GroupTiming]:
    """A test of all pairs of six ranks."""
    return [timed("pair", pair, is_slow(*pair)) for pair in pairs]


def layout(grid: Grid, slow_ranks: set[int]) -> list[GroupTiming]:
    """One timing of every group of a layout; those that hold a slow rank are slow."""
    kinds = ("tp", "cp", "pp", "dp_replicate")
    groups = {(kind, grid.along(rank, kind)) for kind in kinds if grid.size(kind) > 1 for rank in grid.members}
    return [timed(kind, ranks, not slow_ranks.isdisjoint(ranks)) for kind, ranks in sorted(groups)]


def nobody(result: CrossGroupResult) -> bool:
    return (result.rank, result.host, result.resource, result.confidence) == (None, None, None, 0.0)


def test_b03_all_pairs_that_hold_one_node_are_slow() -> None:
    rates = {pair: 0.55 if 2 in pair else 1.0 for pair in PAIRS}  # share of the usual bandwidth
    timings = [
        GroupTiming(kind="pair", ranks=pair, elapsed_ms=20.0 / rate, peers_ms=tuple(20.0 / r for r in rates.values()))
        for pair, rate in rates.items()
    ]
    result = localize(timings, hosts={rank: f"node{rank}" for rank in range(6)})
    assert (result.rank, result.host, result.resource, result.finding) == (2, "node2", None, "rank")
    assert result.confidence == 1.0
    assert [group["ranks"] for group in result.supporting] == [[0, 2], [1, 2], [2, 3], [2, 4], [2, 5]]
    assert {group["ratio"] for group in result.supporting} == {1.818}
    assert result.contradicting == ()


def test_b03_a_node_of_two_ranks_is_named_though_neither_rank_is() -> None:
    crossing = [pair for pair in PAIRS if HOSTS[pair[0]] != HOSTS[pair[1]]]
    within = [timed("pair", (2, 3), False)]  # they reach each other without the network
    timings = matrix(lambda a, b: "node1" in (HOSTS[a], HOSTS[b]), crossing) + within
    assert nobody(localize(timings))
    result = localize(timings, hosts=HOSTS)
    assert (result.rank, result.host, result.finding) == (None, "node1", "shared_resource")
    cards = {rank: {"nic": f"{HOSTS[rank]}/nic0", "hca": f"{HOSTS[rank]}/hca0", "switch": "leaf"} for rank in range(6)}
    result = localize(timings, hosts=HOSTS, resources=cards)
    assert (result.rank, result.host, result.resource) == (None, "node1", "hca node1/hca0, nic node1/nic0")
    assert result.confidence == 1.0


@pytest.mark.parametrize("factor", [1.35, 1.8, 40.0])
@pytest.mark.parametrize("victim", range(16))
def test_a_slow_endpoint_of_a_layout_is_found_from_each_place(victim: int, factor: float) -> None:
    grid = Grid.of_sizes(world=16, tp=2, pp=2, cp=2)
    timings = [timed(t.kind, t.ranks, victim in t.ranks, factor=factor) for t in layout(grid, set())]
    assert localize(timings).rank == victim


def test_a_slow_pair_names_neither() -> None:
    result = localize(matrix(lambda a, b: (a, b) == (2, 3)), hosts=HOSTS, resources=LEAVES)
    assert nobody(result)
    assert result.finding == "one_slow_group"
    both_kinds = [timed(kind, pair, pair == (2, 3)) for kind in ("all_reduce", "all_gather") for pair in PAIRS]
    result = localize(both_kinds, hosts=HOSTS, resources=LEAVES)
    assert nobody(result)
    assert (result.finding, len(result.supporting)) == ("several_common_ranks", 2)
    assert result.contradicting, "healthy groups of either are told"


def test_two_slow_endpoints_name_neither() -> None:
    result = localize(layout(Grid.of_sizes(world=16, tp=2, pp=2, cp=2), {3, 12}))
    assert nobody(result)
    assert result.finding == "no_common_rank"


def test_half_of_a_switch_names_no_rank_and_the_switch_only_from_a_map() -> None:
    timings = matrix(lambda a, b: a < 3 or b < 3)
    assert nobody(localize(timings))
    assert localize(timings).finding == "no_common_rank"
    assert nobody(localize(timings, hosts=HOSTS)), "no host holds just these"
    result = localize(timings, resources=LEAVES)
    assert (result.rank, result.host, result.resource) == (None, None, "switch left")
    assert localize(timings, hosts=HOSTS, resources=LEAVES) == result


def test_a_link_between_switches_is_neither_switch() -> None:
    result = localize(matrix(lambda a, b: a < 3 <= b), resources=LEAVES, hosts={r: f"node{r}" for r in range(6)})
    assert nobody(result)


def test_a_switch_is_not_named_for_ranks_nobody_timed_or_that_are_well() -> None:
    timings = matrix(lambda a, b: a < 2 or b < 2)  # rank 2 hangs on the left one and is well
    assert nobody(localize(timings, resources=LEAVES))
    unseen = [timing for timing in timings if 2 not in timing.ranks]
    assert nobody(localize(unseen, resources=LEAVES))


def test_two_resources_of_different_extent_cannot_be_told_apart() -> None:
    nested = {rank: {"switch": LEAVES[rank]["switch"]} for rank in range(6)}
    for rank in (0, 1):
        nested[rank]["nic"] = "shared"
    slow_nic = matrix(lambda a, b: a < 2 or b < 2, [pair for pair in PAIRS if 2 not in pair])
    assert localize(slow_nic, resources=nested).resource == "nic shared", "nobody timed rank 2 on that switch"
    two = {
        rank: {"nic": "n" if rank in (0, 1) else f"n{rank}", "pdu": "p" if rank in (2, 3) else "q"} for rank in range(6)
    }
    between = matrix(lambda a, b: a < 2 <= b < 4)
    between = [timing for timing in between if timing.elapsed_ms == 36.0 or set(timing.ranks) == {4, 5}]
    assert nobody(localize(between, resources=two)), "all slow groups run from one to the other"


def test_a_job_that_is_slow_as_a_whole_names_nobody() -> None:
    result = localize(matrix(lambda a, b: True), hosts=HOSTS, resources=LEAVES)
    assert nobody(result)
    assert (result.finding, len(result.supporting)) == ("no_healthy_group", len(PAIRS))
    only_its_own = [timed("tp", (2, 3), True), timed("dp", (0, 2), True)]
    assert localize(only_its_own).finding == "no_healthy_group", "nothing shows that the rest of the job is any faster"
    assert localize([*only_its_own, timed("tp", (0, 1), False)]).rank == 2


def test_one_slow_group_and_none() -> None:
    assert localize([timed("tp", (0, 1), True), timed("tp", (2, 3), False)]).finding == "one_slow_group"
    twice = [timed("tp", (0, 1), True)] * 2
    assert localize([*twice, timed("tp", (2, 3), False)]).finding == "one_slow_group", "a repetition is no second group"
    assert localize([timed("tp", (0, 1), False)]).finding == "none_slow"
    assert localize([]).finding == "missing"


def test_a_healthy_group_of_the_rank_contradicts() -> None:
    timings = matrix(lambda a, b: 2 in (a, b) and (a, b) != (2, 5))
    result = localize(timings, hosts=HOSTS)
    assert nobody(result)
    assert result.finding == "contradicted"
    assert [group["ranks"] for group in result.contradicting] == [[2, 5]]


def test_missing_observations_withhold_blame_where_they_could_contradict_it() -> None:
    def seen(incomplete: Callable[[tuple[int, int]], bool]) -> list[GroupTiming]:
        return [timed("pair", pair, 2 in pair, complete=not incomplete(pair)) for pair in PAIRS]

    result = localize(seen(lambda pair: pair == (2, 5)))
    assert nobody(result)
    assert result.finding == "missing"
    assert localize(seen(lambda pair: 2 in pair)).finding == "none_slow"
    assert localize(seen(lambda pair: True)).finding == "missing"
    elsewhere = localize(seen(lambda pair: pair == (0, 1)))
    assert (elsewhere.rank, elsewhere.confidence) == (2, 0.5)


@pytest.mark.parametrize(
    "useless",
    [
        {"elapsed_ms": None, "baseline_ms": 20.0},
        {"elapsed_ms": math.nan, "baseline_ms": 20.0},
        {"elapsed_ms": math.inf, "baseline_ms": 20.0},
        {"elapsed_ms": -1.0, "baseline_ms": 20.0},
        {"elapsed_ms": 40.0},
        {"elapsed_ms": 40.0, "baseline_ms": math.nan},
        {"elapsed_ms": 40.0, "peers_ms": (math.nan, -1.0)},
    ],
)
def test_a_time_without_a_value_or_a_comparison_is_no_observation(useless: dict[str, float]) -> None:
    timing = GroupTiming(kind="tp", ranks=(0, 1), **useless)  # type: ignore[arg-type]
    assert localize([timing]).finding == "missing"


def test_repetitions_of_a_group_must_agree() -> None:
    base = matrix(lambda a, b: 2 in (a, b))
    assert localize([*base, timed("pair", (5, 2), True)]).rank == 2
    hiccup = localize([*base, timed("pair", (2, 5), False)])
    assert (hiccup.rank, hiccup.confidence) == (2, 0.5), "a group that is slow now and then says nothing"
    lost = localize([*base, timed("pair", (2, 5), True, complete=False)])
    assert (lost.rank, lost.confidence) == (2, 1.0), "another timing of it is complete"


def test_confidence_says_how_many_others_are_cleared() -> None:
    slow = [timed("tp", (2, 3), True), timed("dp", (0, 2), True)]
    assert localize([*slow, timed("tp", (8, 9), False)]).confidence == 0.5
    assert localize([*slow, timed("tp", (0, 1), False)]).confidence == 0.75
    assert localize([*slow, timed("tp", (0, 1), False), timed("dp", (1, 3), False)]).confidence == 1.0


@pytest.mark.parametrize("ranks", [(), (1,), (1, 1)])
def test_a_group_has_two_ranks(ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="two ranks"):
        GroupTiming(kind="tp", ranks=ranks, elapsed_ms=1.0)


observations = st.lists(
    st.builds(
        GroupTiming,
        kind=st.sampled_from(["tp", "dp"]),
        ranks=st.lists(st.integers(0, 5), min_size=2, max_size=4, unique=True).map(tuple),
        elapsed_ms=st.sampled_from([None, 20.0, 24.0, 36.0]),
        baseline_ms=st.just(20.0),
        complete=st.sampled_from([True, True, True, False]),
    ),
    max_size=12,
)
maps = st.fixed_dictionaries(
    {rank: st.fixed_dictionaries({"nic": st.sampled_from("ab"), "switch": st.sampled_from("xy")}) for rank in range(6)}
)


@given(observations, maps)
def test_a_rank_with_a_healthy_or_unknown_group_is_never_blamed(timings: list[GroupTiming], things: dict) -> None:
    result = localize(timings, hosts=HOSTS, resources=things)
    json.dumps(result.to_json(), allow_nan=False)
    by_group: dict[tuple[str, frozenset[int]], list[float]] = {}
    for timing in timings:
        times = by_group.setdefault((timing.kind, frozenset(timing.ranks)), [])
        times += [timing.elapsed_ms] if timing.complete and timing.elapsed_ms is not None else []
    slow = [ranks for (_, ranks), times in by_group.items() if times and min(times) == 36.0]
    healthy = [ranks for (_, ranks), times in by_group.items() if times and max(times) <= 20.0]
    unknown = [ranks for (_, ranks), times in by_group.items() if not times]
    if result.rank is not None:
        assert frozenset.intersection(*slow) == {result.rank}
        assert len(slow) >= 2
        assert healthy
        assert not any(result.rank in ranks for ranks in healthy + unknown)
        assert result.resource is None
    if result.resource is not None:
        names = result.resource.split(", ")
        assert all(any(f"{kind} {name}" in names for r in ranks for kind, name in things[r].items()) for ranks in slow)
    named = (result.rank, result.host, result.resource) != (None, None, None)
    assert named == (result.finding in ("rank", "shared_resource")) == (result.confidence > 0)


@given(observations, maps, st.randoms(use_true_random=False))
def test_the_order_of_observations_and_ranks_does_not_matter(
    timings: list[GroupTiming], things: dict, rng: random.Random
) -> None:
    shuffled = [
        GroupTiming(
            kind=t.kind,
            ranks=tuple(rng.sample(t.ranks, len(t.ranks))),
            elapsed_ms=t.elapsed_ms,
            baseline_ms=t.baseline_ms,
            complete=t.complete,
        )
        for t in rng.sample(timings, len(timings))
    ]
    turned = dict(sorted(things.items(), reverse=True))
    assert localize(shuffled, hosts=HOSTS, resources=turned) == localize(timings, hosts=HOSTS, resources=things)


@given(st.integers(0, 63), st.randoms(use_true_random=False))
def test_one_slow_rank_of_any_layout_is_the_only_one_named(victim: int, rng: random.Random) -> None:
    sizes = rng.choice([{"tp": 4}, {"tp": 2, "cp": 4}, {"pp": 4, "tp": 4}, {"pp": 2}, {"tp": 8, "pp": 8}])
    result = localize(layout(Grid.of_sizes(world=64, **sizes), {victim}))
    assert result.rank in (victim, None)
    groups = 1 + len(sizes) if 64 // math.prod(sizes.values()) > 1 else len(sizes)
    assert (result.rank == victim) == (groups >= 2)
