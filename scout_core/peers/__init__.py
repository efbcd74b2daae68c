"""Coordinates of ranks and the peer groups derived from them."""

from scout_core.peers.coordinates import Coordinates, peer_ranks
from scout_core.peers.grid import Grid
from scout_core.peers.groups import PeerGroup, build_peer_group

__all__ = ["Coordinates", "Grid", "PeerGroup", "build_peer_group", "peer_ranks"]
