"""`HardwareHealthMonitor`: polls sources at a low rate on a daemon thread and tells each fatal event once."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from typing_extensions import Self

from scout_core.health.classify import classify
from scout_core.health.config import HealthConfig
from scout_core.health.history import HealthHistory, device_state
from scout_core.health.types import (
    HOST,
    DeviceSample,
    HealthEvent,
    HealthReading,
    HealthSeverity,
    HealthSource,
    Metric,
    ReadingStatus,
)
from scout_core.health.worker import ReadResult, SourceWorker

logger = logging.getLogger(__name__)
EventCallback = Callable[[HealthEvent], None]
_MOST_DEVICES = 1024
"""Devices remembered per source; names beyond that are ignored."""
_JOIN_S = 0.2
"""How long `close()` waits for a thread that is inside a source or a callback; it must end within 1 s."""


class HardwareHealthMonitor:
    """Watches hardware through `sources` beside training. No collectives; any rank, or a manager, may run one.

    `on_event` gets every fatal (device, metric) exactly once, `on_warning` everything else; both run on the
    monitor's thread, and what they raise is logged and counted in `callback_errors`. Sources are read on threads of
    their own: one that raises, blocks or returns nonsense makes its own devices stale, delays the others by at most
    `read_deadline_s` once, and never delays process exit. Whatever a device had counted before the first poll is its
    baseline. A monitor is started once.
    """

    def __init__(
        self,
        config: HealthConfig,
        sources: Sequence[HealthSource],
        on_event: EventCallback | None = None,
        *,
        on_warning: EventCallback | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.callback_errors = 0
        self.polls = 0
        self._on_event = on_event
        self._on_warning = on_warning
        self._clock = clock
        self._lock = threading.Lock()
        self._polling = threading.Lock()
        self._done = threading.Condition()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._sources = tuple(sources)
        self._workers: list[SourceWorker] = []
        self._known: dict[str, frozenset[str]] = {}
        self._retired: set[str] = set()
        self._latest: dict[tuple[str, str], DeviceSample] = {}
        self._fatal: list[HealthEvent] = []
        self._recent: deque[HealthEvent] = deque(maxlen=config.max_events)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._history = HealthHistory(started_s=clock())

    def start(self) -> Self:
        """Begin polling, at once and then every `poll_interval_s`. Raises `RuntimeError` if started or closed."""
        if self._thread is not None or self._stop.is_set():
            raise RuntimeError("this monitor was already started or closed; make a new one")
        self._thread = threading.Thread(target=self._run, name="scout-health", daemon=True)
        self._thread.start()
        return self

    def close(self) -> None:
        """Stop within 1 s. Threads stuck in a source are left behind as daemons, and such a source is not closed."""
        if self._stop.is_set():
            return
        self._stop.set()
        with self._done:
            self._done.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        deadline = time.monotonic() + _JOIN_S
        for worker in self._workers:
            if worker.stop(max(0.0, deadline - time.monotonic())):
                self._close_source(worker.source)

    def __enter__(self) -> Self:
        return self if self._thread is not None else self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def poll_once(self) -> tuple[HealthEvent, ...]:
        """One round now: ask every source, wait at most `read_deadline_s`, judge, tell. Returns the new events."""
        with self._polling:
            samples = self._gather()
            judgement = classify(samples, _without(self._history, self._retired), self.config)
            with self._lock:
                self._history = judgement.history
                for name in self._retired:
                    self._latest = {key: sample for key, sample in self._latest.items() if key[0] != name}
                self._retired.clear()
                self.polls += 1
                self._latest.update({(s.device, s.source): s for s in samples})
                for event in judgement.events:
                    self._counts[event.key] += 1
                    (self._fatal if event.severity is HealthSeverity.FATAL else self._recent).append(event)
        for event in judgement.events:
            self._tell(event)
        return judgement.events

    @property
    def fatal_events(self) -> tuple[HealthEvent, ...]:
        with self._lock:
            return tuple(self._fatal)

    @property
    def warnings(self) -> tuple[HealthEvent, ...]:
        """Warnings and notes since the start, oldest first, at most `max_events` of them."""
        with self._lock:
            return tuple(self._recent)

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """How often each (device, metric) became an event."""
        with self._lock:
            return dict(self._counts)

    def active_warnings(self, device: str | None = None) -> tuple[HealthEvent, ...]:
        """Warnings in force now, of one device or of all."""
        with self._lock:
            history = self._history
        return tuple(
            event
            for name, past in sorted(history.devices.items())
            for event in past.active.values()
            if device is None or name == device
        )

    def status(self) -> dict[str, str]:
        """One word per device: fatal, stale, warning, unknown or healthy."""
        with self._lock:
            history = self._history
        return {name: device_state(past) for name, past in sorted(history.devices.items()) if name != HOST}

    def readings(self) -> tuple[HealthReading, ...]:
        """The newest readings of every device."""
        with self._lock:
            latest = sorted(self._latest.items())
        return tuple(reading for _, sample in latest for reading in sample.readings)

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self.poll_once()
            except Exception:  # the monitor must never take training down; it says so and tries again
                logger.exception("hardware health: one poll failed")
            self._stop.wait(max(0.0, self.config.poll_interval_s - (time.monotonic() - began)))

    def _gather(self) -> list[DeviceSample]:
        if not self._workers:
            self._workers = [SourceWorker(source, self._clock, self._done) for source in self._sources]
        # Only those that were free are waited for: a source known to be stuck costs the others nothing. A result
        # that came after its deadline is taken now.
        asked = [worker for worker in self._workers if not worker.has_result and worker.request()]
        with self._done:
            self._done.wait_for(
                lambda: self._stop.is_set() or all(worker.ready for worker in asked), self.config.read_deadline_s
            )
        samples: list[DeviceSample] = []
        for index, worker in enumerate(self._workers):
            result = worker.take()
            samples += self._stale(worker, index) if result is None else self._samples(worker, index, result)
        return samples

    def _source_key(self, worker: SourceWorker, index: int) -> str:
        return f"{worker.name}#{index}"

    def _samples(self, worker: SourceWorker, index: int, result: ReadResult) -> list[DeviceSample]:
        key = self._source_key(worker, index)
        known = self._known.get(key, frozenset())
        by_device: dict[str, list[HealthReading]] = {}
        for reading in result.readings:
            if reading.device in known or len(known | by_device.keys()) < _MOST_DEVICES:
                by_device.setdefault(reading.device, []).append(reading)
        if by_device:
            placeholders = _placeholders(result.readings, worker.name) - by_device.keys()
            self._known[key] = (known | by_device.keys()) - placeholders
            self._retired |= placeholders
        if result.error:
            logger.warning("hardware health: source %s: %s", worker.name, result.error)
            for device in self._devices_of(worker, key):
                by_device.setdefault(device, []).append(_stale_reading(device, result.error, 0.0))
        return [
            DeviceSample(device=device, time_s=result.finished_s, readings=tuple(readings), source=key)
            for device, readings in by_device.items()
        ]

    def _stale(self, worker: SourceWorker, index: int) -> list[DeviceSample]:
        key = self._source_key(worker, index)
        waited = worker.waiting_s()
        reason = f"source {worker.name} did not answer within {self.config.read_deadline_s:g} s"
        return [
            DeviceSample(
                device=device, time_s=self._clock(), readings=(_stale_reading(device, reason, waited),), source=key
            )
            for device in self._devices_of(worker, key)
        ]

    def _devices_of(self, worker: SourceWorker, key: str) -> Iterable[str]:
        """The devices this source has spoken of; before it has, its own name stands for them."""
        return sorted(self._known.get(key, ())) or [worker.name]

    def _tell(self, event: HealthEvent) -> None:
        callback = self._on_event if event.severity is HealthSeverity.FATAL else self._on_warning
        if callback is None:
            return
        try:
            callback(event)
        # a manager's bug must not stop the monitoring of training; `sys.exit()` would end nothing but this thread
        except (Exception, SystemExit):
            self.callback_errors += 1
            logger.exception("hardware health: the callback failed on %s", event.key)

    def _close_source(self, source: HealthSource) -> None:
        try:
            source.close()
        except Exception:
            logger.exception("hardware health: closing source %s failed", source.name)


def _placeholders(readings: Iterable[HealthReading], source: str) -> set[str]:
    """Names a device went by before it was identified."""
    names = {source}
    for identity in (reading.identity for reading in readings if reading.identity is not None):
        names |= {f"nvml:{identity.nvml_index}", f"cuda:{identity.cuda_ordinal}"}
    return names


def _without(history: HealthHistory, names: Iterable[str]) -> HealthHistory:
    """`history` without placeholders that were never told as fatal."""
    gone = {name for name in names if not history.of(name).latched}
    return replace(history, devices={name: past for name, past in history.devices.items() if name not in gone})


def _stale_reading(device: str, reason: str, age_s: float) -> HealthReading:
    return HealthReading(
        device=device,
        metric=Metric.TELEMETRY_STALE,
        value=round(age_s, 3),
        status=ReadingStatus.STALE,
        reason=reason,
    )
