"""What a mesh lets SCOUT compare, recipe by recipe, before any process runs. Pure."""

from __future__ import annotations

import math

from scout_core.doctor.findings import Finding, count
from scout_core.peers.grid import DIMENSIONS, Grid

_RECIPES = ("embedding", "hidden", "output", "optimizer", "state")


def parse_mesh(text: str) -> Grid:
    """The grid that `pp=2,dp_shard=4,tp=2` describes, outermost dimension first.

    Raises `ValueError`, which says the fix, for what is no list of sizes, and for unknown or repeated names.
    """
    dims = []
    for part in text.split(","):
        name, _, size = part.strip().partition("=")
        if not (name and size.isdecimal()):
            names = ", ".join(DIMENSIONS)
            raise ValueError(f"{part.strip()!r} is no dimension; write name=size, with names from {names}")
        dims.append((name, int(size)))
    return Grid(dims=tuple(dims))


def mesh_findings(grid: Grid) -> tuple[Finding, ...]:
    """One finding per recipe class: by how many peers it is compared, what majority that gives, what to do if none."""
    return tuple(_finding(grid, recipe) for recipe in _RECIPES)


def _finding(grid: Grid, recipe: str) -> Finding:
    where = grid.peer_dim
    if where is None:
        message = f"{recipe}: no rank has a peer, so it is not compared"
        fix = "add replicas (dp_replicate=3 or more): dimensions other than dp_replicate and dp_shard give no peers"
        return Finding(id=f"mesh-{recipe}", severity="warning", message=message, fix=fix)
    peers = grid.size(where)
    if where == "dp_shard" and recipe in ("optimizer", "state"):
        message = f"{recipe}: each shard has one owner and no copy; " + (
            f"an owner's update is recomputed by its {count(peers - 1, 'peer')} (owner_update)"
            if recipe == "optimizer"
            else "it is watched between steps only (at_rest)"
        )
        fix = "use HSDP (dp_replicate=3 or more) to have owned state compared"
        return Finding(id=f"mesh-{recipe}", severity="warning", message=message, fix=fix)
    places = f"{recipe}: compared by {peers} peers along {where}"
    if recipe in ("embedding", "output") and grid.size("pp") > 1:
        places += f", on the {'first' if recipe == 'embedding' else 'last'} stage only"
    partners = math.prod(grid.size(name) for name in grid.lockstep_dims)
    if recipe in ("embedding", "hidden", "output") and partners > 1:
        places += f", in lockstep with {count(partners - 1, 'partner')} ({', '.join(grid.lockstep_dims)})"
    if peers == 2:
        settled = partners == 1 and where == "dp_replicate" and recipe != "state"
        fix = "use 3 or more replicas to have the rank named by majority"
        fix += ', or set tie_break="reference"' if settled else ""
        message = f"{places}: two show THAT they differ, not which is wrong"
        return Finding(id=f"mesh-{recipe}", severity="warning", message=message, fix=fix)
    message = f"{places}: a majority names up to {count((peers - 1) // 2, 'rank')} at fault"
    return Finding(id=f"mesh-{recipe}", severity="info", message=message)
