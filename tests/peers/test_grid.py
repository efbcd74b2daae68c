"""Peers and lockstep partners of a rank, derived from the sizes of the dimensions."""

from __future__ import annotations

import random
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.peers import Coordinates, Grid, peer_ranks

NAMES = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "expert_tp")


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Grids of up to 192 ranks in any order of dimensions, with ranks counted from 0, from elsewhere, or shuffled."""
    names = draw(st.permutations(NAMES))[: draw(st.integers(1, 5))]
    dims, world = [], 1
    for name in names:
        size = draw(st.integers(1, max(1, min(4, 192 // world))))
        dims.append((name, size))
        world *= size
    start, step = draw(st.integers(0, 9)), draw(st.integers(1, 3))
    spread = range(start, start + world * step, step)
    shuffled = tuple(random.Random(draw(st.integers())).sample(spread, world))
    return Grid(dims=tuple(dims), ranks=draw(st.sampled_from([None, spread, shuffled])))


def test_two_stages_of_two_replicas_of_two_tensor_partners() -> None:
    grid = Grid.of_sizes(world=8, tp=2, pp=2)
    assert [grid.peers(rank) for rank in range(8)] == [
        (0, 2),
        (1, 3),
        (0, 2),
        (1, 3),
        (4, 6),
        (5, 7),
        (4, 6),
        (5, 7),
    ]
    assert [grid.lockstep(rank) for rank in (0, 1, 6)] == [(0, 1), (0, 1), (6, 7)]
    assert grid.coordinates(6) == Coordinates(pp=1, dp_replicate=1, tp=0)
    assert grid.along(0, "pp", "tp") == grid.along(0, "tp", "pp") == (0, 1, 4, 5)


def test_hybrid_shards_are_peers_of_the_same_shard_and_step_with_the_others() -> None:
    grid = Grid(dims=(("dp_replicate", 3), ("dp_shard", 2)))
    assert grid.peer_dim == "dp_replicate"
    assert grid.peers(3) == (1, 3, 5)
    assert grid.lockstep(3) == (2, 3)


@pytest.mark.parametrize("dims", [(("dp_shard", 4),), (("dp_replicate", 1), ("dp_shard", 4))])
def test_without_replicas_shards_are_the_peers(dims: tuple[tuple[str, int], ...]) -> None:
    grid = Grid(dims=dims)
    assert grid.peer_dim == "dp_shard"
    assert grid.peers(2) == (0, 1, 2, 3)
    assert grid.lockstep(2) == (2,)


def test_a_pipeline_alone_has_no_peers_and_no_partners() -> None:
    grid = Grid.of_sizes(world=4, pp=4)
    assert (grid.peer_dim, grid.peers(3), grid.lockstep(3)) == (None, (3,), (3,))


def test_experts_step_together_and_are_compared_with_their_own_replicas() -> None:
    grid = Grid.of_sizes(world=16, ep=4, tp=2)
    assert grid.size("dp_replicate") == 2
    assert grid.lockstep(0) == tuple(range(8))
    assert grid.peers(3) == (3, 11)


def test_the_largest_job_needs_no_table() -> None:
    grid = Grid.of_sizes(world=131_072, tp=8, pp=16, cp=2, ep=8)
    last = 131_071
    assert len(grid.peers(last)) == 64
    assert grid.lockstep(last) == tuple(range(last - 127, last + 1))
    assert grid.coordinates(last) == Coordinates(pp=15, dp_replicate=63, ep=7, cp=1, tp=7)


def test_ranks_of_a_part_of_the_job_keep_their_global_numbers() -> None:
    assert Grid(dims=(("dp_replicate", 2), ("tp", 2)), ranks=range(8, 16, 2)).peers(10) == (10, 14)
    assert Grid(dims=(("dp_replicate", 2), ("tp", 2)), ranks=(7, 1, 5, 3)).peers(3) == (1, 3)


@given(grids())
def test_every_kind_of_group_parts_the_world(grid: Grid) -> None:
    names = [name for name, _ in grid.dims]
    for kind in (grid.peers, grid.lockstep, lambda rank: grid.along(rank, names[0]), lambda r: grid.along(r, *names)):
        groups = {kind(rank) for rank in grid.members}
        assert sorted(rank for group in groups for rank in group) == sorted(grid.members)
        assert all(rank in kind(rank) for rank in grid.members)


@given(grids())
def test_peers_are_those_that_the_table_of_all_places_gives(grid: Grid) -> None:
    if grid.peer_dim == "dp_shard":
        return  # the table knows no fallback
    at = {rank: place for place, rank in enumerate(grid.members)}
    table = [grid.coordinates(rank) for rank in grid.members]
    for rank in list(grid.members)[:20]:
        assert sorted(at[peer] for peer in grid.peers(rank)) == list(peer_ranks(table, at[rank]))


@given(grids())
def test_peers_of_partners_are_partners_of_peers(grid: Grid) -> None:
    for rank in list(grid.members)[::7]:
        by_partners = {frozenset(grid.peers(partner)) for partner in grid.lockstep(rank)}
        by_peers = {frozenset(grid.lockstep(peer)) for peer in grid.peers(rank)}
        assert frozenset().union(*by_partners) == frozenset().union(*by_peers)
        assert len(by_partners) == len(grid.lockstep(rank))
        assert len(by_peers) == len(grid.peers(rank))
        for peers, partners in product(by_partners, by_peers):
            assert len(peers & partners) == 1
        order = [grid.coordinates(peer) for peer in grid.peers(rank)]
        for partner in grid.lockstep(rank):  # position k among the peers is the same replica for every partner
            place = grid.peer_dim or "dp_replicate"
            assert [getattr(grid.coordinates(p), place) for p in grid.peers(partner)] == [
                getattr(c, place) for c in order
            ]


@given(grids())
def test_members_of_a_group_ascend_and_differ_along_its_dimensions_only(grid: Grid) -> None:
    names = tuple(name for name, _ in grid.dims)
    for rank in list(grid.members)[::11]:
        group = [grid.coordinates(member) for member in grid.along(rank, *names[1:])]
        keys = [tuple(getattr(place, name) for name in names) for place in group]
        assert keys == sorted(set(keys))
        assert len({key[0] for key in keys}) == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dims": (("dp", 2),)}, "'dp'; use pp, dp_replicate"),
        ({"dims": (("tp", 0),)}, "tp must be at least 1"),
        ({"dims": (("tp", 2), ("tp", 2))}, "named twice"),
        ({"dims": (("tp", 2), ("pp", 2)), "ranks": range(5)}, r"tp 2 x pp 2 = 4 places but 5 ranks"),
        ({"dims": (("tp", 2),), "ranks": (3, 3)}, "two places"),
    ],
)
def test_what_makes_no_grid_is_refused_in_words(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grid(**wrong)  # type: ignore[arg-type]


def test_sizes_that_do_not_divide_say_what_would() -> None:
    with pytest.raises(ValueError, match=r"pp 2 x tp 3 = 6 does not divide 16 ranks; use 12 or 18 ranks"):
        Grid.of_sizes(world=16, tp=3, pp=2)
    with pytest.raises(ValueError, match=r"does not divide 4 ranks; use 8 ranks"):
        Grid.of_sizes(world=4, tp=8)
    with pytest.raises(ValueError, match="cp must be at least 1"):
        Grid.of_sizes(world=4, cp=0)


@pytest.mark.parametrize("ranks", [None, range(4, 8), (4, 5, 6, 9)])
def test_ranks_and_names_outside_the_grid_are_refused(ranks: range | tuple[int, ...] | None) -> None:
    grid = Grid(dims=(("dp_replicate", 2), ("tp", 2)), ranks=ranks)
    for ask in (grid.peers, grid.lockstep, grid.coordinates, lambda rank: grid.along(rank, "tp")):
        with pytest.raises(ValueError, match="rank 11 is none of the 4 ranks"):
            ask(11)
    inside = next(iter(grid.members))
    assert grid.along(inside, "cp") == (inside,)
    with pytest.raises(ValueError, match="'dp'"):
        grid.along(inside, "dp")
    with pytest.raises(ValueError, match="'dp'"):
        grid.along(inside, "tp", "dp")
