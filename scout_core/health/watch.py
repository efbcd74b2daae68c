"""`HealthWatch`: the hardware of one training rank, watched beside it, told as fault reports."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from scout_core.health.config import HealthConfig
from scout_core.health.identity import rank_identity
from scout_core.health.identity_map import IdentityMap
from scout_core.health.monitor import HardwareHealthMonitor
from scout_core.health.nvml import NvmlSource
from scout_core.health.types import DeviceIdentity, HealthEvent, HealthReading, HealthSeverity
from scout_core.health.xid_source import XidSource
from scout_core.report.fault_report import SCOUTFaultReport
from scout_core.report.health_reports import health_report

logger = logging.getLogger(__name__)
_MOST_STEPS = 4096
_TOLD_AGAIN_S = 600.0
"""A warning that comes and goes is handed on at most this often per device and metric; the monitor counts them all."""


class StepLog:
    """Which optimizer step it was at a given time, as seen at each poll; a source without readings.

    Bounded: when full, every other entry is dropped, so that old times are answered more coarsely and never later.
    """

    name = "steps"

    def __init__(self, step: Callable[[], int], clock: Callable[[], float]) -> None:
        self._step = step
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: list[tuple[float, int]] = [(clock(), step())]

    def read(self) -> list[HealthReading]:
        with self._lock:
            if len(self._seen) >= _MOST_STEPS:
                self._seen = self._seen[::2]
            self._seen.append((self._clock(), self._step()))
        return []

    def close(self) -> None:
        """Nothing to release."""

    def before(self, time_s: float) -> int:
        """The newest step that was surely over before the poll at `time_s` could have missed a sign: one poll back."""
        with self._lock:
            earlier = [step for when, step in self._seen if when <= time_s]
        return earlier[-2] if len(earlier) > 1 else self._seen[0][1]


class RankXids:
    """XIDs of the rank's own GPU. Other GPUs of the host are told by the ranks that run on them."""

    name = "xid"

    def __init__(self, own: Callable[[], DeviceIdentity], make: Callable[[str], XidSource]) -> None:
        self._own = own
        self._make = make
        self._source: XidSource | None = None

    def read(self) -> list[HealthReading]:
        if self._source is None:
            uuid = self._own().uuid
            if uuid is None:
                return []  # asked again at the next poll; the NVML source says what is wrong
            self._source = self._make(uuid)
        return self._source.read()

    def close(self) -> None:
        if self._source is not None:
            self._source.close()


class HealthWatch:
    """Watches this rank's CUDA device and calls `deliver` with a `SCOUTFaultReport` for every fault and warning.

    One per rank; local, no collectives, no CUDA context. `deliver` runs on the monitor's thread, at most once per
    fault; what it raises is logged. `ordinal` is the rank's CUDA device number in this process; None (a CPU rank)
    watches nothing and says so in the log. Where NVML is missing or does not start, one `telemetry_lost` report says
    why. `step` tells the optimizer step now: `first_seen_step` of a report is the last one seen before the first sign.
    `monitor` is the running monitor, e.g. for `active_warnings()`; None on a CPU rank. `module`, `environ` and
    `kernel_log` as in `NvmlSource` and `XidSource`.
    """

    def __init__(
        self,
        config: HealthConfig,
        *,
        rank: int,
        ordinal: int | None,
        deliver: Callable[[SCOUTFaultReport], None],
        step: Callable[[], int] = lambda: 0,
        module: Any = None,
        environ: Mapping[str, str] | None = None,
        kernel_log: str | Path | None = "/dev/kmsg",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.monitor: HardwareHealthMonitor | None = None
        self._bare = DeviceIdentity(host=socket.gethostname(), cuda_ordinal=ordinal, rank=rank)
        self._deliver = deliver
        self._step = step
        self._told: dict[tuple[str, str], float] = {}
        if ordinal is None:
            return
        self._nvml = NvmlSource.for_cuda_device(ordinal, rank=rank, module=module, environ=environ)
        self._steps = StepLog(step, clock)
        xids = RankXids(
            lambda: self._nvml.identity or rank_identity(rank, ordinal, module=module, environ=environ),
            lambda uuid: XidSource(devices=[uuid], kernel_log=kernel_log, module=module, clock=clock),
        )
        self.monitor = HardwareHealthMonitor(
            config, [self._nvml, xids, self._steps], self._fatal, on_warning=self._warning, clock=clock
        )

    def start(self) -> HealthWatch:
        """Begin. Returns at once: NVML is opened on the monitor's threads. Raises `RuntimeError` the second time."""
        if self.monitor is None:
            logger.info("SCOUT: rank %s has no CUDA device, so no hardware is watched", self._bare.rank)
        else:
            self.monitor.start()
        return self

    def close(self) -> None:
        """End within 1 s, whatever a driver call is doing. A second call does nothing."""
        if self.monitor is not None:
            self.monitor.close()

    def report(self, event: HealthEvent) -> SCOUTFaultReport:
        """The report of one of this rank's events: device, host and rank filled in."""
        own = self._nvml.identity or self._bare
        told = event if event.identity is not None else replace(event, identity=self._bare)
        return health_report(told, ranks=IdentityMap(devices=(own,)), step=self._step(), step_at=self._steps.before)

    def _fatal(self, event: HealthEvent) -> None:
        self._deliver(self.report(event))

    def _warning(self, event: HealthEvent) -> None:
        last = self._told.get(event.key)
        if event.severity is HealthSeverity.INFO or (last is not None and event.time_s - last < _TOLD_AGAIN_S):
            return
        self._told[event.key] = event.time_s
        self._deliver(self.report(event))
