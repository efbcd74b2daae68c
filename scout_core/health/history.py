"""What the classifier remembers between polls: baselines, recent growth, warnings in force. Immutable and bounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from scout_core.health.types import HealthEvent, HealthReading, ReadingStatus
from scout_core.health.xid import XidMeaning

_BUCKETS = 32
"""The window is remembered in this many pieces, so that its cost does not depend on the polling rate."""
_SENTINELS = frozenset({2**32 - 1, 2**64 - 1})
"""All-ones is how drivers say 'no value' in an unsigned field."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CounterTrack:
    """One counter. `total` is its growth since the first poll, `recent` (bucket, growth) pairs within the window.

    `low` is a value below `last`, seen once: a counter that fell is believed (driver reload, reset) only when the
    next value is lower too, so that one bad read cannot make old errors look new.
    """

    last: int
    total: int = 0
    low: int | None = None
    recent: tuple[tuple[int, int], ...] = ()

    def within_window(self) -> int:
        return sum(growth for _, growth in self.recent)


def advance(track: CounterTrack | None, value: int, time_s: float, window_s: float) -> CounterTrack:
    """The track after one more value. The first value is the baseline and counts as no growth. Pure."""
    bucket = int(time_s / window_s * _BUCKETS)
    if track is None:
        return CounterTrack(last=value)
    if value == track.last and track.low is None and (not track.recent or bucket - track.recent[0][0] < _BUCKETS):
        return track
    recent = tuple(item for item in track.recent if bucket - item[0] < _BUCKETS)
    if value < track.last and track.low is None:
        return CounterTrack(last=track.last, total=track.total, low=value, recent=recent)
    growth = value - track.last if value >= track.last else max(0, value - (track.low or 0))
    if growth and recent and recent[-1][0] == bucket:
        recent = (*recent[:-1], (bucket, recent[-1][1] + growth))
    elif growth:
        recent = (*recent, (bucket, growth))
    return CounterTrack(last=value, total=track.total + growth, recent=recent)


def counter_value(value: object) -> int | None:
    """`value` if it can be a counter's, else None: not a number, negative, a driver's 'no value', absurdly large."""
    if isinstance(value, bool) or not isinstance(value, int) or value in _SENTINELS or not 0 <= value < 2**62:
        return None
    return value


def counter_parts(reading: HealthReading) -> dict[str, int]:
    """The counters of a reading: its parts where it has any, else its value under the empty name."""
    if reading.status is not ReadingStatus.OK:
        return {}
    raw: Mapping[str, object] = reading.parts or {"": reading.value}
    return {name: value for name, item in raw.items() if (value := counter_value(item)) is not None}


CounterTracks = Mapping[tuple[str, str], Mapping[str, CounterTrack]]
"""By (source, metric), and then by part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class XidBurst:
    """XIDs close together on one device: the fatal one that explains the rest, if any, and when it last went on."""

    cause: XidMeaning | None
    last_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceHistory:
    """One device's past. `active`: warnings in force by metric; `latched`: fatal metrics already told.

    `answered`: the newest sample held at least one value. `xid_seen`: per source, the (time, sequence) of the
    newest XID taken. `xid_told`: per code, when it was last seen, so that a storm is told once.
    """

    counters: CounterTracks = field(default_factory=dict)
    streaks: Mapping[str, int] = field(default_factory=dict)
    active: Mapping[str, HealthEvent] = field(default_factory=dict)
    latched: frozenset[str] = frozenset()
    memory_sign_s: float | None = None
    xid_seen: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    xid_told: Mapping[int, float] = field(default_factory=dict)
    burst: XidBurst | None = None
    answered: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthHistory:
    """All devices' pasts. `started_s`: events that happened before it are not this job's (monotonic clock)."""

    started_s: float
    devices: Mapping[str, DeviceHistory] = field(default_factory=dict)

    def of(self, device: str) -> DeviceHistory:
        return self.devices.get(device) or DeviceHistory()


def device_state(past: DeviceHistory) -> str:
    """One word for people: fatal, stale, warning, unknown or healthy. Healthy needs an answer and no complaint."""
    if past.latched:
        return "fatal"
    if any(event.metric == "telemetry_stale" for event in past.active.values()):
        return "stale"
    if any(event.severity.value == "warning" for event in past.active.values()):
        return "warning"
    return "healthy" if past.answered else "unknown"
