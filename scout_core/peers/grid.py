"""The layout as a grid: peers and lockstep partners of one rank, worked out from the sizes of the dimensions alone.

A job of 131,072 ranks has no table of ranks anywhere. Whoever asks for a rank's groups pays for the members of these
groups and nothing else, since ranks are numbered row-major, as by `torch.distributed.device_mesh.DeviceMesh`: the
members of a group are one base plus offsets that all groups of that kind share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from scout_core.peers.coordinates import Coordinates

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "expert_tp")
"""Names a grid may have; the fields of `Coordinates`."""

_LOCKSTEP = ("tp", "cp", "ep", "expert_tp", "dp_shard")
_PEERS = ("dp_replicate", "dp_shard")


@dataclass(frozen=True, kw_only=True)
class _Group:
    """What the members of all groups along some dimensions have in common: how far they lie behind the first of them.

    `varying` holds the stride and size of each dimension, outermost first. Offsets at even distances are a range.
    """

    varying: tuple[tuple[int, int], ...]
    offsets: tuple[int, ...] | range


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Sizes of the parallel dimensions, outermost first, and the global ranks at the places of the grid.

    `dims` are `(name, size)` pairs with names from `DIMENSIONS`; a missing one has size 1. The last one varies fastest.
    Expert parallelism reuses data-parallel ranks: where it stands as a dimension of its own, the replicas of the dense
    layers are spread over `dp_replicate` x `ep`, and `dp_replicate` alone holds the replicas of experts, so that peers
    along it are peers of every layer.
    `ranks[i]` is the global rank at place i, all ranks from 0 on if None.

    Pure values; no communication. Raises ValueError for names, sizes or ranks that make no grid, and from every method
    that is asked about a rank outside it.
    """

    dims: tuple[tuple[str, int], ...]
    ranks: tuple[int, ...] | range | None = None
    _strides: dict[str, int] = field(init=False, repr=False, compare=False)
    _sizes: dict[str, int] = field(init=False, repr=False, compare=False)
    _places: dict[int, int] | None = field(init=False, repr=False, compare=False)
    _groups: dict[tuple[str, ...], _Group] = field(init=False, repr=False, compare=False)
    _world: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = [name for name, _ in self.dims]
        for name, size in self.dims:
            if name not in DIMENSIONS:
                raise ValueError(f"no dimension is called {name!r}; use {', '.join(DIMENSIONS)}")
            if size < 1:
                raise ValueError(f"{name} must be at least 1, not {size}")
        if len(set(names)) < len(names):
            raise ValueError(f"a dimension is named twice in {', '.join(names)}; give each once, with its whole size")
        world = math.prod(size for _, size in self.dims)
        if self.ranks is not None and len(self.ranks) != world:
            product = " x ".join(f"{name} {size}" for name, size in self.dims)
            raise ValueError(f"{product} = {world} places but {len(self.ranks)} ranks; give one rank for each place")
        # Only ranks that come as a table get an inverse of that table.
        places = {rank: place for place, rank in enumerate(self.ranks)} if isinstance(self.ranks, tuple) else None
        if places is not None and len(places) < world:
            raise ValueError("a rank stands at two places of the grid; give each rank once")
        strides, stride = {}, 1
        for name, size in reversed(self.dims):
            strides[name] = stride
            stride *= size
        object.__setattr__(self, "_strides", strides)
        object.__setattr__(self, "_sizes", dict(self.dims))
        object.__setattr__(self, "_places", places)
        object.__setattr__(self, "_groups", {})
        object.__setattr__(self, "_world", world)

    @classmethod
    def of_sizes(cls, *, world: int, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, dp_shard: int = 1) -> Grid:
        """The grid of `world` ranks in the usual order, all that is left over being replicas.

        From the outside: pp, dp_replicate, dp_shard, ep, cp, tp; so tensor-parallel partners are neighbours. Raises
        ValueError when the sizes do not divide `world`.
        """
        sizes = {"pp": pp, "dp_shard": dp_shard, "ep": ep, "cp": cp, "tp": tp}
        for name, size in {"world": world, **sizes}.items():
            if size < 1:
                raise ValueError(f"{name} must be at least 1, not {size}")
        fixed = math.prod(sizes.values())
        if world % fixed:
            product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
            fitting = " or ".join(str(n) for n in (world - world % fixed, world - world % fixed + fixed) if n)
            raise ValueError(
                f"{product} = {fixed} does not divide {world} ranks; use {fitting} ranks, or sizes whose product does"
            )
        dims = {"pp": pp, "dp_replicate": world // fixed, "dp_shard": dp_shard, "ep": ep, "cp": cp, "tp": tp}
        return cls(dims=tuple(dims.items()))

    @property
    def world(self) -> int:
        """The number of places."""
        return self._world

    @property
    def members(self) -> Sequence[int]:
        """All global ranks, in the order of their places."""
        return range(self._world) if self.ranks is None else self.ranks

    @cached_property
    def peer_dim(self) -> str | None:
        """The dimension along which peers stand: `dp_replicate`; without replicas `dp_shard`, the fallback to shard
        peers; None when neither has two places and nobody has a peer."""
        return next((name for name in _PEERS if self.size(name) > 1), None)

    @cached_property
    def lockstep_dims(self) -> tuple[str, ...]:
        """The dimensions of more than one place whose collectives the replay of a layer runs; never pp."""
        return tuple(name for name in _LOCKSTEP if self.size(name) > 1 and name != self.peer_dim)

    def size(self, name: str) -> int:
        """Places along a dimension, 1 for one that the grid does not have."""
        if name not in DIMENSIONS:
            raise ValueError(f"no dimension is called {name!r}; use {', '.join(DIMENSIONS)}")
        return self._sizes.get(name, 1)

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` stands. O(dimensions)."""
        place = self._place(rank)
        return Coordinates(**{name: place // self._strides[name] % size for name, size in self.dims})

    def along(self, rank: int, *names: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` along the named dimensions only, itself included.

        In row-major order of their coordinates, whatever the order of the names. O(members of the group).
        """
        return self._along(rank, names)

    def peers(self, rank: int) -> tuple[int, ...]:
        """The ranks along `peer_dim`, `(rank,)` if there is none. O(members)."""
        return self._along(rank, () if self.peer_dim is None else (self.peer_dim,))

    def lockstep(self, rank: int) -> tuple[int, ...]:
        """The ranks along `lockstep_dims`: those that `rank`'s replay of a layer communicates with. O(members)."""
        return self._along(rank, self.lockstep_dims)

    def _along(self, rank: int, names: tuple[str, ...]) -> tuple[int, ...]:
        place = self._place(rank)
        group = self._groups.get(names)
        if group is None:
            group = self._groups[names] = self._group(names)
        base = place
        for stride, size in group.varying:
            base -= place // stride % size * stride
        offsets = group.offsets
        if isinstance(offsets, range):
            places: Iterable[int] = range(base, base + offsets.stop, offsets.step)
        else:
            places = map(base.__add__, offsets)
        return tuple(places) if self.ranks is None else tuple(map(self.ranks.__getitem__, places))

    def _group(self, names: tuple[str, ...]) -> _Group:
        varying = [(self._strides[name], size) for name, size in self.dims if self.size(name) > 1 and name in names]
        for name in names:
            self.size(name)
        offsets = [0]
        for stride, size in varying:
            offsets = [before + index * stride for before in offsets for index in range(size)]
        step = varying[-1][0] if varying else 1
        even = range(0, len(offsets) * step, step)
        return _Group(varying=tuple(varying), offsets=even if tuple(even) == tuple(offsets) else tuple(offsets))

    def _place(self, rank: int) -> int:
        if self._places is not None:
            place = self._places.get(rank)
            if place is not None:
                return place
        elif self.ranks is None:
            if 0 <= rank < self._world:
                return rank
        elif rank in self.ranks:
            return self.ranks.index(rank)
        raise ValueError(f"rank {rank} is none of the {self._world} ranks of this grid")
