"""How ranks that are checked together find each other at attach: their groups, hosts, devices, equal settings; and what
is said then of what cannot be seen."""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.distributed as dist

from scout_core.adapter import Layout
from scout_core.config import ConfigError, ReplayHarnessConfig
from scout_core.consensus.readiness import name_ranks
from scout_core.health.identity import rank_identity
from scout_core.peers import PeerGroup, build_peer_group
from scout_core.replay.guard import logger


def meet(layout: Layout, timeout_s: float) -> tuple[PeerGroup, PeerGroup, list[list[int]]]:
    """This rank's peers, its lockstep partners, and the peers of each of these. Every rank of the job calls.

    Collectives: creates one Gloo group over the peers and one over the partners where there are any; one gather.
    """
    peers = build_peer_group(layout.peers, layout.data_group, timeout_s)
    partners = build_peer_group(layout.lockstep or (peers.rank,), None, timeout_s)
    return peers, partners, partners.gather(torch.tensor(layout.peers)).tolist()


def places(peers: PeerGroup, config: ReplayHarnessConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Host name and device of every peer, by position. Every peer calls; one object gather, at attach only.

    Raises `ConfigError` on every peer when they were configured differently: their checks would never meet.
    """
    own = (socket.gethostname(), _device_name(peers.rank), config.model_dump())
    if peers.control is None:
        return (own[0],), (own[1],)
    gathered: list[Any] = [None] * peers.size
    dist.all_gather_object(gathered, own, group=peers.control)
    for name in ReplayHarnessConfig.model_fields:
        said: dict[str, list[int]] = {}
        for rank, (_, _, values) in zip(peers.ranks, gathered, strict=True):
            said.setdefault(repr(values[name]), []).append(rank)
        if len(said) > 1:
            groups = "; ".join(f"{value} on {name_ranks(ranks)}" for value, ranks in said.items())
            raise ConfigError(f"{name} must be the same on all ranks, but it is {groups}")
    return tuple(host for host, _, _ in gathered), tuple(device for _, device, _ in gathered)


def own_ordinal() -> int | None:
    """CUDA ordinal of this rank's GPU; None without GPUs."""
    return torch.cuda.current_device() if torch.cuda.is_available() else None


def _device_name(rank: int) -> str:
    """UUID of this rank's GPU where NVML tells it, since a manager can act on that; else its CUDA ordinal, or `cpu`."""
    ordinal = own_ordinal()
    if ordinal is None:
        return "cpu"
    known = rank_identity(rank, ordinal)
    return known.mig_uuid or known.uuid or f"cuda:{ordinal}"


def announce(notes: tuple[str, ...], compiled: bool, peers: PeerGroup) -> None:
    """Say once, at the start, what cannot be seen and what to do about it."""
    for note in notes:
        logger.warning("SCOUT: %s", note)
    if compiled:
        logger.warning(
            "SCOUT: the model is compiled; checks recompute their invocations and replay eagerly, so kernels that the "
            "compiler made are not exercised"
        )
    if peers.size == 1:
        logger.warning(
            "SCOUT: one rank has no peer to be compared with, so nothing is checked; train on 3 or more replicas"
        )
    elif peers.size == 2:
        logger.warning("SCOUT: two peers show that they differ but not who is wrong; 3 or more replicas name the rank")
