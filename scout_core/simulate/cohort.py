"""A cohort: ranks that work in lockstep, and all their peers, as a table of columns and rows."""

from __future__ import annotations

from dataclasses import dataclass

from scout_core.peers import Grid


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """`table[c][p]` is the global rank in column c, whose members are peers, and row p, whose members work in lockstep.

    `along[name][c]` are the columns that share a group with column c along a lockstep dimension.
    """

    stage: int
    table: tuple[tuple[int, ...], ...]
    along: dict[str, tuple[tuple[int, ...], ...]]

    @property
    def columns(self) -> int:
        return len(self.table)

    @property
    def peers(self) -> int:
        return len(self.table[0])

    @property
    def key(self) -> int:
        """The cohort's first rank, which no other has."""
        return self.table[0][0]

    def place(self, rank: int) -> tuple[int, int]:
        """Column and row of a rank of this cohort."""
        return next((c, column.index(rank)) for c, column in enumerate(self.table) if rank in column)


def cohort_of(grid: Grid, rank: int) -> Cohort:
    """The cohort that holds `rank`. O(its ranks)."""
    row = grid.lockstep(grid.peers(rank)[0])
    at = {member: column for column, member in enumerate(row)}
    return Cohort(
        stage=grid.coordinates(rank).pp,
        table=tuple(grid.peers(member) for member in row),
        along={name: tuple(tuple(at[r] for r in grid.along(m, name)) for m in row) for name in grid.lockstep_dims},
    )
