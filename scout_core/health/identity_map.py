"""Rank, CUDA ordinal, UUID, PCI address and host in one table, so that a manager can act on any of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from scout_core.health.types import DeviceIdentity


@dataclass(frozen=True, kw_only=True)
class IdentityMap:
    """The devices of a job, one entry a rank. Build it from what every rank gathered with `from_json`."""

    devices: tuple[DeviceIdentity, ...] = ()

    @classmethod
    def from_json(cls, records: Iterable[Mapping[str, Any]]) -> IdentityMap:
        """`records` are `DeviceIdentity.to_json()` of each rank. Unknown keys are an error (`TypeError`)."""
        return cls(devices=tuple(DeviceIdentity(**record) for record in records))

    def for_rank(self, rank: int) -> DeviceIdentity | None:
        return next((device for device in self.devices if device.rank == rank), None)

    def ranks_of(self, device: str, host: str | None = None) -> tuple[int, ...]:
        """Ranks on the device with this UUID or MIG id; several when MIG or tests share one GPU."""
        return tuple(
            sorted(
                known.rank
                for known in self.devices
                if known.rank is not None
                and device in (known.uuid, known.mig_uuid)
                and (host is None or known.host == host)
            )
        )

    def ranks_on(self, host: str) -> tuple[int, ...]:
        return tuple(sorted(known.rank for known in self.devices if known.rank is not None and known.host == host))

    def completed(self, identity: DeviceIdentity) -> DeviceIdentity:
        """`identity` with what this map knows about the same device filled in."""
        match = next((known for known in self.devices if _same(known, identity)), None)
        if match is None:
            return identity
        blanks = {f.name: getattr(match, f.name) for f in fields(identity) if getattr(identity, f.name) is None}
        return replace(identity, **blanks)

    def lines(self) -> list[str]:
        """The table `scout doctor` prints: one header, one line a device, in rank order."""
        header = ("rank", "host", "cuda", "nvml", "pci", "uuid", "mig", "name")
        rows = [
            tuple("-" if value is None else str(value) for value in _columns(device))
            for device in sorted(self.devices, key=lambda d: (d.rank is None, d.rank or 0, d.host, d.nvml_index or 0))
        ]
        widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
        return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in (header, *rows)]


def _columns(device: DeviceIdentity) -> tuple[object, ...]:
    return (
        device.rank,
        device.host,
        device.cuda_ordinal,
        device.nvml_index,
        device.pci_bus_id,
        device.uuid,
        device.mig_uuid,
        device.name,
    )


def _same(known: DeviceIdentity, asked: DeviceIdentity) -> bool:
    if known.host != asked.host:
        return False
    for name in ("mig_uuid", "uuid", "pci_bus_id", "nvml_index"):
        mine, theirs = getattr(known, name), getattr(asked, name)
        if mine is not None and theirs is not None:
            return bool(mine == theirs)
    return False
