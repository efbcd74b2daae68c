"""One sample of one device beside its past: what the rules look at, and where they leave their streaks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scout_core.health.config import HealthConfig
from scout_core.health.history import CounterTrack, DeviceHistory, advance, counter_parts
from scout_core.health.types import (
    DeviceSample,
    HealthAction,
    HealthReading,
    HealthSeverity,
    Metric,
    ReadingStatus,
)

COUNTERS = (
    Metric.ECC_UNCORRECTABLE,
    Metric.ECC_CORRECTABLE,
    Metric.ECC_UNCORRECTABLE_LIFETIME,
    Metric.SRAM_UNCORRECTABLE,
    Metric.SRAM_CORRECTABLE,
    Metric.REMAP_CORRECTABLE,
    Metric.REMAP_UNCORRECTABLE,
    Metric.NVLINK_RECOVERY,
    Metric.NVLINK_CRC,
    Metric.NVLINK_REPLAY,
    Metric.NVLINK_RECOVERY_FAILED,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What a rule says of one metric.

    `memory`: memory contents may be wrong since the first such finding. `told_once`: an occurrence, not a state,
    so it is not in force afterwards.
    """

    metric: str
    severity: HealthSeverity
    message: str
    action: HealthAction = HealthAction.OBSERVE
    value: float | int | str | None = None
    threshold: float | None = None
    cause: str = ""
    memory: bool = False
    told_once: bool = False
    evidence: Mapping[str, Any] = field(default_factory=dict)


class View:
    """Readings of one sample by metric, with counters advanced. Only `ok` readings can be seen through it."""

    def __init__(self, sample: DeviceSample, past: DeviceHistory, config: HealthConfig) -> None:
        self.sample = sample
        self.past = past
        self.config = config
        self.counters = dict(past.counters)
        self.streaks = dict(past.streaks)
        self._readings: dict[str, HealthReading] = {}
        for reading in sample.readings:
            if reading.status is ReadingStatus.OK and reading.metric != Metric.XID:
                self._readings.setdefault(reading.metric, reading)
        for metric in COUNTERS:
            self._advance(metric)

    def _advance(self, metric: str) -> None:
        reading = self.ok(metric)
        if reading is None:
            return
        key = (self.sample.source, metric)
        old = self.counters.get(key, {})
        time_s, window_s = self.sample.time_s, self.config.window_s
        new = {part: advance(old.get(part), v, time_s, window_s) for part, v in counter_parts(reading).items()}
        self.counters[key] = {**old, **new}

    def ok(self, metric: str) -> HealthReading | None:
        return self._readings.get(metric)

    def readings(self) -> dict[str, HealthReading]:
        return self._readings

    def offers(self, metric: str) -> bool:
        """Whether the metric has a value here, or was merely missed: False only for 'unsupported' or not read."""
        return any(r.metric == metric and r.status is not ReadingStatus.UNSUPPORTED for r in self.sample.readings)

    def number(self, metric: str, low: float, high: float) -> float | None:
        """The metric's value if it is a finite number within [low, high]; nonsense is as good as absent."""
        reading = self.ok(metric)
        if reading is None or isinstance(reading.value, bool) or not isinstance(reading.value, int | float):
            return None
        return float(reading.value) if math.isfinite(reading.value) and low <= reading.value <= high else None

    def flag(self, metric: str) -> bool | None:
        """A yes/no reading; None when absent or neither 0 nor 1."""
        reading = self.ok(metric)
        return bool(reading.value) if reading is not None and reading.value in (0, 1) else None

    def _tracks(self, metric: str) -> Mapping[str, CounterTrack]:
        return self.counters.get((self.sample.source, metric), {})

    def growth(self, metric: str) -> int:
        """Growth since the first poll; 0 when the counter does not answer now."""
        return sum(t.total for t in self._tracks(metric).values()) if self.ok(metric) is not None else 0

    def recent(self, metric: str) -> dict[str, int]:
        """Growth within the window by part, without the parts that did not grow."""
        if self.ok(metric) is None:
            return {}
        return {part: n for part, t in self._tracks(metric).items() if (n := t.within_window())}

    def streak(self, name: str, holds: bool | None) -> int:
        """Consecutive polls in which `holds` was true, this one included. None (cannot be told) changes nothing."""
        key = f"{self.sample.source}|{name}"
        if holds is not None:
            self.streaks[key] = self.streaks.get(key, 0) + 1 if holds else 0
        return min(self.streaks.get(key, 0), 1 << 30) if holds is not False else 0

    def confirmed(self, name: str, holds: bool | None) -> bool:
        """Whether `holds` is true now and has been for the configured number of polls."""
        return self.streak(name, holds) >= self.config.confirmations and holds is True
