"""One source on one daemon thread, read under a deadline. A source that blocks costs its own thread and no other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from scout_core.health.types import HealthReading, HealthSource

_MOST_READINGS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadResult:
    """What one read gave. `error`: why it gave nothing, or what part of it was nonsense."""

    readings: tuple[HealthReading, ...]
    finished_s: float
    error: str = ""


def sensible(raw: object) -> tuple[tuple[HealthReading, ...], str]:
    """The usable part of whatever a source returned, and what was wrong with the rest. Pure."""
    if not isinstance(raw, list | tuple):
        return (), f"read() returned {type(raw).__name__}, not a sequence of readings"
    good = tuple(item for item in raw[:_MOST_READINGS] if _is_reading(item))
    dropped = len(raw) - len(good)
    return good, f"{dropped} of {len(raw)} items are not readings" if dropped else ""


def _is_reading(item: object) -> bool:
    return (
        isinstance(item, HealthReading)
        and isinstance(item.device, str)
        and isinstance(item.metric, str)
        and bool(item.device)
    )


class SourceWorker:
    """Reads `source` when asked to, on its own daemon thread.

    `request()` and `take()` are called from one thread. A result that comes late is taken by a later poll: what it
    says is still true of its time.
    """

    def __init__(self, source: HealthSource, clock: Callable[[], float], done: threading.Condition) -> None:
        self.source = source
        self.name = str(source.name)
        self._clock = clock
        self._done = done
        self._wanted = threading.Event()
        self._stopping = False
        self._busy = False
        self._asked_s = 0.0
        self._result: ReadResult | None = None
        self._thread = threading.Thread(target=self._run, name=f"scout-health {self.name}", daemon=True)
        self._thread.start()

    @property
    def has_result(self) -> bool:
        return self._result is not None

    @property
    def ready(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._result is not None or not self._busy

    def request(self) -> bool:
        """Ask for a read. False when the last one has not ended yet."""
        if self._busy:
            return False
        self._busy = True
        self._asked_s = self._clock()
        self._wanted.set()
        return True

    def waiting_s(self) -> float:
        return self._clock() - self._asked_s

    def take(self) -> ReadResult | None:
        result, self._result = self._result, None
        return result

    def stop(self, timeout_s: float) -> bool:
        """End the thread. False when it is inside a read that does not return; it is then left behind as a daemon."""
        self._stopping = True
        self._wanted.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._stopping:
                return
            result = self._read()
            with self._done:
                self._result = result
                self._busy = False
                self._done.notify_all()

    def _read(self) -> ReadResult:
        try:
            readings, error = sensible(self.source.read())
        except Exception as caught:  # noqa: BLE001 - a source's failure must reach neither the monitor nor training
            readings, error = (), f"{type(caught).__name__}: {caught}"
        return ReadResult(readings=readings, finished_s=self._clock(), error=error)
