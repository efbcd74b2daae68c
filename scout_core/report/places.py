"""Hosts and devices of the ranks that a report names."""

from __future__ import annotations

from collections.abc import Sequence

from scout_core.replay.result import ReplayResult


class Places:
    """Hosts and devices of ranks, in the order of the ranks named. Given by peer position, as far as known."""

    def __init__(self, result: ReplayResult, hosts: Sequence[str], devices: Sequence[str]) -> None:
        self._hosts = dict(zip(result.peer_ranks, hosts, strict=False))
        self._devices = dict(zip(result.peer_ranks, devices, strict=False))

    def of(self, ranks: Sequence[int]) -> dict[str, tuple[str, ...]]:
        """The report's fields `hosts` and `devices`."""
        return {
            "hosts": tuple(self._hosts[rank] for rank in ranks if rank in self._hosts),
            "devices": tuple(self._devices[rank] for rank in ranks if rank in self._devices),
        }
