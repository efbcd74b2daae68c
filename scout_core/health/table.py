"""The table of `scout health`: readings and states as plain text and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scout_core.health.types import DeviceIdentity, HealthEvent, HealthReading, ReadingStatus


def device_order(readings: Iterable[HealthReading]) -> list[str]:
    """Devices by NVML index where known, else by name."""
    index: dict[str, int] = {}
    for reading in readings:
        known = reading.identity.nvml_index if reading.identity is not None else None
        index[reading.device] = min(index.get(reading.device, 1 << 30), 1 << 30 if known is None else known)
    return sorted(index, key=lambda device: (index[device], device))


def reading_text(reading: HealthReading) -> str:
    """The value, or why there is none: a dash with the reason for 'unsupported', the failure otherwise."""
    if reading.status is ReadingStatus.UNSUPPORTED:
        return "not supported"
    if reading.status is not ReadingStatus.OK:
        return f"{reading.status.value}: {reading.reason}"
    value = f"{reading.value:g}" if isinstance(reading.value, float) else str(reading.value)
    if reading.limit is not None:
        value += f" of {reading.limit:g}"
    nonzero = [f"{part}: {count}" for part, count in reading.parts.items() if count]
    if nonzero and reading.metric != "nvlink.links_active":
        value += f" ({', '.join(nonzero)})"
    return value


def health_lines(
    readings: Sequence[HealthReading], status: Mapping[str, str], events: Sequence[HealthEvent]
) -> list[str]:
    """One block per device: its state and identity, every reading, then what there is to say about it."""
    lines: list[str] = []
    for device in device_order(readings):
        own = [reading for reading in readings if reading.device == device]
        identity = next((reading.identity for reading in own if reading.identity is not None), None)
        lines.append(f"{device}  [{status.get(device, 'unknown')}]  {_identity_text(identity)}".rstrip())
        width = max(len(reading.metric) for reading in own)
        lines += [f"  {reading.metric.ljust(width)}  {reading_text(reading)}" for reading in own]
    lines += [f"{event.severity.value.upper()}  {event.device}  {event.metric}: {event.message}" for event in events]
    return lines


def health_json(
    readings: Sequence[HealthReading], status: Mapping[str, str], events: Sequence[HealthEvent]
) -> dict[str, Any]:
    """The same as one JSON-ready record."""
    return {
        "devices": [
            {
                "device": device,
                "state": status.get(device, "unknown"),
                "readings": [reading.to_json() for reading in readings if reading.device == device],
            }
            for device in device_order(readings)
        ],
        "events": [event.to_json() for event in events],
    }


def _identity_text(identity: DeviceIdentity | None) -> str:
    if identity is None:
        return ""
    place = f"{identity.host} nvml:{identity.nvml_index} pci:{identity.pci_bus_id}"
    return f"{place} {identity.name or ''}"
