"""Where a rank stands in a plain PyTorch job, from its DeviceMesh and the placements of its parameters."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from scout_core.adapter import Layout
from scout_core.config import ConfigError
from scout_core.peers import Coordinates, Grid
from scout_core.replay.local_tensors import is_distributed

_NAMES = {
    "pp": "pp",
    "pipe": "pp",
    "pipeline": "pp",
    "pipeline_parallel": "pp",
    "dp_replicate": "dp_replicate",
    "replicate": "dp_replicate",
    "ddp": "dp_replicate",
    "edp": "dp_replicate",
    "dp_shard": "dp_shard",
    "shard": "dp_shard",
    "fsdp": "dp_shard",
    "cp": "cp",
    "context": "cp",
    "context_parallel": "cp",
    "tp": "tp",
    "sp": "tp",
    "mp": "tp",
    "tensor": "tp",
    "tensor_parallel": "tp",
    "model_parallel": "tp",
    "ep": "ep",
    "expert": "ep",
    "expert_parallel": "ep",
    "etp": "expert_tp",
    "expert_tp": "expert_tp",
}
"""Names of mesh dimensions in use (torchtitan, Lightning, tutorials) and what SCOUT calls them."""
_DATA = ("dp", "data", "data_parallel")
"""Names that say data parallel but not whether parameters are sharded along it; their placements do."""


@dataclass(frozen=True, kw_only=True)
class Topology:
    """A job's mesh in SCOUT's terms. `names` maps SCOUT's dimensions to the mesh's own."""

    grid: Grid
    mesh: Any
    names: Mapping[str, str | None]

    def group(self, dimension: str) -> dist.ProcessGroup:
        """The job's own process group of this rank along a dimension."""
        own = self.names[dimension]
        found: dist.ProcessGroup = self.mesh.get_group(own) if own is not None else self.mesh.get_group()
        return found


def find_topology(parameters: Iterable[torch.Tensor], mesh: Any, *, sharded: bool) -> Topology | str | None:
    """The topology of `mesh`, or of the mesh that the parameters are distributed over; None when there is neither.

    `sharded` says that FSDP shards the model. A text says why a mesh that was found, not given, cannot be used. Raises
    `ConfigError` for a mesh that was given and cannot. Local.
    """
    distributed: list[Any] = [p for p in parameters if is_distributed(p)]
    found = mesh if mesh is not None else _widest_mesh(distributed)
    if found is None:
        return None
    try:
        names = _dimensions(found, distributed, sharded=sharded)
        ranks = tuple(found.mesh.flatten().tolist())
        grid = Grid(dims=tuple(zip(names, found.mesh.shape, strict=True)), ranks=ranks)
    except ValueError as error:
        if mesh is not None:
            raise ConfigError(f"mesh: {error}") from None
        return f"the mesh of the model's parameters gives no peers: {error}"
    own = found.mesh_dim_names or (None,)
    return Topology(grid=grid, mesh=found, names=dict(zip(names, own, strict=True)))


def layout_on(topology: Topology, ddp: dist.ProcessGroup | None) -> Layout:
    """This rank's layout. `ddp` is the group of a DDP wrapper, which replicates what the mesh does not."""
    grid, rank = topology.grid, dist.get_rank()
    lockstep = grid.lockstep(rank)
    if grid.size("dp_replicate") == 1 and ddp is not None and dist.get_world_size(ddp) > 1:
        peers, shard_peers = tuple(dist.get_process_group_ranks(ddp)), False
        group: dist.ProcessGroup | None = ddp
        lockstep = grid.along(rank, *(name for name, _ in grid.dims if name not in ("pp", "dp_replicate")))
    else:
        peers, shard_peers = grid.peers(rank), grid.peer_dim == "dp_shard"
        group = topology.group(grid.peer_dim) if grid.peer_dim is not None else None
    notes = []
    if len(peers) == 1:
        shape = " x ".join(f"{name} {size}" for name, size in grid.dims)
        notes.append(f"{shape}: nothing is replicated, so no rank has a peer; replicate along a dp_replicate dimension")
    elif shard_peers:
        notes.append(
            "parameters are sharded and held once: replays are compared after gathering, an owner's shard has no copy "
            "to be compared with; use HSDP, a mesh with a dp_replicate dimension, to have owned state compared"
        )
    return Layout(
        coordinates=grid.coordinates(rank) if len(grid.members) > 1 else Coordinates(),
        peers=peers,
        data_group=group,
        lockstep=lockstep,
        shard_peers=shard_peers,
        gathers=grid.size("dp_shard") > 1,
        notes=tuple(notes),
        # replicas that only DDP knows of are beyond the mesh, and their own meshes are not known here
        connected=tuple(sorted(grid.members)) if set(peers) <= set(grid.members) else (),
        stage=tuple(sorted(grid.along(rank, *(name for name, _ in grid.dims if name != "pp")))),
    )


def shared_names(parameters: Mapping[str, torch.Tensor], topology: Topology) -> frozenset[str]:
    """Parameters that all lockstep partners of a rank hold alike, as far as their placements say so.

    A plain tensor is taken for shared only where nothing else holds plain tensors apart: under context parallelism, and
    under tensor parallelism that is made of DTensors. Experts, and tensor parallelism by hand, are never.
    """
    grid = topology.grid
    dims = set(grid.lockstep_dims)
    by_dtensor = any("tp" in _placements(p, topology) for p in parameters.values())
    plain_apart = dims - {"cp"} - ({"tp"} if by_dtensor else set())
    shared = []
    for name, parameter in parameters.items():
        placed = _placements(parameter, topology)
        if is_distributed(parameter):
            alike = all(placed[d].is_replicate() if d in placed else d not in plain_apart for d in dims)
        else:
            alike = not plain_apart
        if alike:
            shared.append(name)
    return frozenset(shared)


def _placements(parameter: Any, topology: Topology) -> dict[str, Any]:
    """Placement by dimension, for the dimensions that a DTensor is distributed over; empty for a plain tensor."""
    if not is_distributed(parameter):
        return {}
    own = {theirs: ours for ours, theirs in topology.names.items()}
    names = parameter.device_mesh.mesh_dim_names or (None,)
    return {own[n]: p for n, p in zip(names, parameter.placements, strict=True) if n in own}


def _widest_mesh(distributed: Iterable[Any]) -> Any:
    """The mesh of most ranks that the parameters' meshes were cut from."""
    meshes = []
    for parameter in distributed:
        mesh = parameter.device_mesh
        root = getattr(mesh, "_get_root_mesh", None)  # what slices of a mesh were cut from; torch 2.10 to 2.13
        meshes.append(root() if root is not None else mesh)
    return max(meshes, key=lambda mesh: mesh.mesh.numel(), default=None)


def _dimensions(mesh: Any, distributed: Iterable[Any], *, sharded: bool) -> list[str]:
    """SCOUT's name of each dimension of `mesh`. Raises ValueError for a dimension whose meaning cannot be told."""
    names = mesh.mesh_dim_names
    if names is None:
        if mesh.mesh.dim() > 1:
            raise ValueError("its dimensions have no names; give mesh_dim_names, as ('dp_replicate', 'tp')")
        return ["dp_shard" if sharded else "tp" if any(True for _ in distributed) else "dp_replicate"]
    known = []
    for name in names:
        if name in _DATA:
            known.append("dp_shard" if sharded and _is_sharded_along(name, distributed) else "dp_replicate")
        elif name in _NAMES:
            known.append(_NAMES[name])
        else:
            raise ValueError(f"no dimension is known by the name {name!r}; use {', '.join(dict.fromkeys(_NAMES))}")
    return known


def _is_sharded_along(name: str, distributed: Iterable[Any]) -> bool:
    return any(
        not placement.is_replicate()
        for p in distributed
        for dim, placement in zip(p.device_mesh.mesh_dim_names or (), p.placements, strict=False)
        if dim == name
    )


def fsdp_modules(root: nn.Module) -> list[nn.Module]:
    """The modules that `fully_shard` was applied to, outermost first. Loads nothing."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [module for module in root.modules() if kind is not None and isinstance(module, kind)]
