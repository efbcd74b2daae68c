"""`XidSource`: XID errors as they happen, from NVML events where offered and from the kernel log otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scout_core.health.identity import describe
from scout_core.health.kmsg import KernelFinding, KernelLogReader, normalize_pci
from scout_core.health.nvml_api import NvmlApi, NvmlUnavailable
from scout_core.health.types import HOST, DeviceIdentity, HealthReading, Metric, ReadingStatus

_MOST_EVENTS = 256
"""XIDs taken from NVML in one poll; a storm is finished in the polls that follow."""


class XidSource:
    """A `HealthSource` of XID events for all GPUs of the host, or for those in `devices` (UUIDs).

    NVML events are registered at the first `read()`, and later for devices that failed to answer then. The kernel log
    (`kernel_log`; None: no log) is followed from its end for what NVML does not say: XIDs of devices without events,
    and GPUs that fall off the bus without an XID. Each XID is read once, with its time on the monotonic clock and a
    running sequence number. `pci_map` names devices by PCI address where NVML cannot. GPUs that NVML does not show are
    another tenant's and are left out.
    """

    def __init__(
        self,
        *,
        devices: Sequence[str] | None = None,
        kernel_log: str | Path | None = "/dev/kmsg",
        pci_map: Mapping[str, str] | None = None,
        module: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = "xid"
        self._wanted = frozenset(devices) if devices is not None else None
        self._path = kernel_log
        self._nvml = NvmlApi(module)
        self._clock = clock
        self._sequence = 0
        self._offset_s: float | None = None
        self._events: Any = None
        self._log: KernelLogReader | None = None
        self._reason = self._log_reason = ""
        self._ready = False
        self._by_nvml: frozenset[str] = frozenset()
        self._identities: dict[str, DeviceIdentity] = {}
        self._by_pci = {normalize_pci(pci): uuid for pci, uuid in (pci_map or {}).items()}

    def read(self) -> list[HealthReading]:
        if not self._ready:
            self._start()
        readings = self._nvml_events() if self._events is not None else []
        if self._log is not None:
            findings = self._log.read()
            self._set_offset(findings)
            readings += [reading for finding in findings if (reading := self._from_log(finding)) is not None]
        if not readings and self._events is None and self._log is None:
            reason = "; ".join(filter(None, (self._reason, self._log_reason)))
            readings.append(
                HealthReading(device=HOST, metric=Metric.XID, status=ReadingStatus.UNSUPPORTED, reason=reason)
            )
        return readings

    def close(self) -> None:
        if self._events is not None:
            self._nvml.ask("nvmlEventSetFree", self._events)
            self._events = None
        if self._log is not None:
            self._log.close()
            self._log = None
        self._nvml.close()

    def _start(self) -> None:
        self._ready = True
        self._register()
        if self._path is None or self._log is not None:
            return
        try:
            self._log = KernelLogReader(self._path)
        except OSError as error:
            self._log_reason = f"{self._path}: {error.strerror}"

    def _register(self) -> None:
        """Register for every wanted device that offers XID events; devices already registered stay as they are.

        A device that fails now is asked again at the next read: it may only be the driver that is not up yet.
        """
        try:
            self._nvml.open()
        except NvmlUnavailable as error:
            self._reason = str(error)
            self._ready = False
            return
        count = self._nvml.ask("nvmlDeviceGetCount")
        self._ready = count.ok
        if self._events is None:
            created = self._nvml.ask("nvmlEventSetCreate")
            self._events = created.value if created.ok else None
        for index in range(count.value if count.ok else 0):
            handle = self._nvml.ask("nvmlDeviceGetHandleByIndex", index)
            if handle.status is ReadingStatus.FAILED or (handle.ok and not self._register_one(handle.value, index)):
                self._ready = False
        if self._events is not None and not self._by_nvml:
            self._nvml.ask("nvmlEventSetFree", self._events)
            self._events = None

    def _register_one(self, handle: Any, index: int) -> bool:
        """False when the device failed to answer and should be asked again."""
        uuid = self._nvml.ask("nvmlDeviceGetUUID", handle)
        if not uuid.ok:
            return uuid.status is not ReadingStatus.FAILED
        if uuid.value in self._by_nvml or (self._wanted is not None and uuid.value not in self._wanted):
            return True
        identity = self._identities[uuid.value] = describe(self._nvml, handle, index=index)
        if identity.pci_bus_id is not None:
            self._by_pci[identity.pci_bus_id] = uuid.value
        types = self._nvml.ask("nvmlDeviceGetSupportedEventTypes", handle)
        bit = self._nvml.constant("nvmlEventTypeXidCriticalError") or 0
        if self._events is None or not types.ok or not types.value & bit:
            self._reason = types.reason or "NVML offers no XID events here"
            return types.status is not ReadingStatus.FAILED
        done = self._nvml.ask("nvmlDeviceRegisterEvents", handle, bit, self._events)
        if done.ok:
            self._by_nvml |= {uuid.value}
        return done.status is not ReadingStatus.FAILED

    def _nvml_events(self) -> list[HealthReading]:
        bit = self._nvml.constant("nvmlEventTypeXidCriticalError")
        readings: list[HealthReading] = []
        for _ in range(_MOST_EVENTS):
            # A wait of 0 ms answers 'timeout' when nothing is queued.
            event = self._nvml.ask("nvmlEventSetWait_v2", self._events, 0)
            if not event.ok:
                if event.code != self._nvml.constant("NVML_ERROR_TIMEOUT"):
                    readings.append(self._register_again(event.reason))
                break
            uuid = self._nvml.ask("nvmlDeviceGetUUID", event.value.device)
            if event.value.eventType == bit and uuid.ok:
                readings.append(self._reading(uuid.value, int(event.value.eventData), "", self._clock()))
        return readings

    def _register_again(self, reason: str) -> HealthReading:
        """The event set is of no use any more (driver reloaded, a registered GPU lost): a new one at the next read."""
        self._nvml.ask("nvmlEventSetFree", self._events)
        self._events, self._by_nvml, self._ready = None, frozenset(), False
        self._nvml.close()
        return HealthReading(device=HOST, metric=Metric.XID, status=ReadingStatus.FAILED, reason=reason)

    def _set_offset(self, findings: Sequence[KernelFinding]) -> None:
        """Kernel time to monotonic time. The two drift apart over weeks, so the difference is measured here: it is
        at most what it is when a line has just been read."""
        now = self._clock()
        offsets = [now - finding.time_s for finding in findings if finding.time_s is not None]
        if offsets:
            self._offset_s = min(offsets) if self._offset_s is None else min(self._offset_s, *offsets)

    def _from_log(self, finding: KernelFinding) -> HealthReading | None:
        uuid = self._by_pci.get(finding.pci)
        if uuid is None and self._by_pci:
            return None
        if (self._wanted is not None and uuid not in self._wanted) or (finding.code and uuid in self._by_nvml):
            return None
        now = self._clock()
        when = now if finding.time_s is None or self._offset_s is None else finding.time_s + self._offset_s
        device = uuid or f"pci:{finding.pci}"
        if finding.code is not None:
            return self._reading(device, finding.code, finding.text, when)
        return HealthReading(
            device=device,
            metric=Metric.PRESENCE,
            value="lost",
            reason=f"kernel log: {finding.text}",
            identity=self._identities.get(device),
        )

    def _reading(self, device: str, code: int, text: str, when: float) -> HealthReading:
        self._sequence += 1
        return HealthReading(
            device=device,
            metric=Metric.XID,
            value=code,
            reason=text,
            occurred_s=when,
            sequence=self._sequence,
            identity=self._identities.get(device),
        )
