"""Which devices and hosts failed before, across restarts, so that a replacement is not the same bad machine."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from scout_core.health.types import DeviceIdentity, HealthAction, HealthEvent, HealthSeverity


class PastFault(BaseModel):
    """One fatal event, kept by who the device is and not by rank: ranks move, hardware does not."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str
    uuid: str | None = None
    pci_bus_id: str | None = None
    metric: str
    action: HealthAction
    message: str


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A rank placed on hardware that failed before."""

    rank: int | None
    host: str
    device: str | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class FaultHistory:
    """Fatal events of earlier attempts. Immutable; `with_event` gives a longer one, `save` and `load` keep it."""

    faults: tuple[PastFault, ...] = ()

    def with_event(self, event: HealthEvent) -> FaultHistory:
        """This history and `event`, if it is fatal, excludes hardware, and says on which host it was."""
        excluding = event.action in (HealthAction.EXCLUDE, HealthAction.EXCLUDE_UNTIL_RESET)
        if event.severity is not HealthSeverity.FATAL or not excluding or event.identity is None:
            return self
        fault = PastFault(
            host=event.identity.host,
            uuid=event.identity.uuid,
            pci_bus_id=event.identity.pci_bus_id,
            metric=event.metric,
            action=event.action,
            message=event.message,
        )
        return self if fault in self.faults else FaultHistory(faults=(*self.faults, fault))

    def refusals(self, placement: Iterable[DeviceIdentity]) -> tuple[Refusal, ...]:
        """Ranks of a new placement that sit on hardware with a fault. Pure.

        A GPU is known by its UUID wherever it turns up. A host is refused as a whole only for faults of its own
        (no UUID was known, or the fabric). Another GPU of a host with one bad GPU is not accused.
        """
        found = []
        for device in placement:
            fault = next((fault for fault in self.faults if _matches(fault, device)), None)
            if fault is not None:
                name = device.uuid or device.pci_bus_id
                found.append(Refusal(rank=device.rank, host=device.host, device=name, reason=fault.message))
        return tuple(found)

    def without(self, uuid: str) -> FaultHistory:
        """This history after the GPU was reset or replaced and tested."""
        return FaultHistory(faults=tuple(fault for fault in self.faults if fault.uuid != uuid))

    def save(self, path: Path) -> None:
        """Write as JSON lines: temporary file, fsync, rename."""
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(fault.model_dump_json() + "\n" for fault in self.faults)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> FaultHistory:
        """Read what `save` wrote; an absent file is an empty history. Raises `ValueError` on any other content."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return cls()
        return cls(faults=tuple(PastFault.model_validate(json.loads(line)) for line in lines if line.strip()))


def _matches(fault: PastFault, device: DeviceIdentity) -> bool:
    if fault.uuid is not None:
        return fault.uuid == device.uuid
    if fault.pci_bus_id is not None:
        return (fault.host, fault.pci_bus_id) == (device.host, device.pci_bus_id)
    return fault.host == device.host
