"""Timings of the process groups near a communication fault, and what localization makes of them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from scout_core.peers import Grid
from scout_core.peers.grid import DIMENSIONS
from scout_core.simulate.faults import SimFault
from scout_core.timing.localization import CrossGroupResult, GroupTiming, localize

COMMUNICATION = ("slow_endpoint", "slow_link", "slow_job")
BASE_MS, NOISE = 20.0, 0.02


def groups_near(grid: Grid, ranks: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
    """Every group of the given ranks and of all ranks in those, each once. O(their members)."""
    near = {member for rank in ranks for _, group in _groups_of(grid, rank) for member in group}
    return sorted({found for member in near for found in _groups_of(grid, member)})


def locate(grid: Grid, faults: Sequence[SimFault], *, seed: int = 0) -> CrossGroupResult:
    """The result for all communication faults of one step together, from the groups near them."""
    rng = random.Random(f"{seed}/slow groups")
    ends = [end for fault in faults for end in (fault.rank, fault.other_rank) if end is not None]
    timings = []
    for kind, ranks in groups_near(grid, ends):
        factor = max((fault.factor for fault in faults if slows(fault, ranks)), default=1.0)
        elapsed_ms = BASE_MS * factor * rng.lognormvariate(0, NOISE)
        timings.append(GroupTiming(kind=kind, ranks=ranks, elapsed_ms=elapsed_ms, baseline_ms=BASE_MS))
    return localize(timings)


def slows(fault: SimFault, ranks: Sequence[int]) -> bool:
    """Whether a fault slows a group of these ranks."""
    if fault.kind == "slow_endpoint":
        return fault.rank in ranks
    return fault.kind == "slow_job" or (fault.rank in ranks and fault.other_rank in ranks)


def _groups_of(grid: Grid, rank: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    return ((name, grid.along(rank, name)) for name in DIMENSIONS if grid.size(name) > 1)
