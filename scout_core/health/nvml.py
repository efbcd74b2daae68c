"""`NvmlSource`: everything NVML tells about one GPU, read once a poll."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from scout_core.health.identity import IdentityError, Resolved, Selector, resolve
from scout_core.health.nvml_api import Answer, NvmlApi, NvmlUnavailable
from scout_core.health.nvml_links import LinkReader
from scout_core.health.nvml_queries import FIELDS, FIXED, POLLED, Query
from scout_core.health.types import SIBLINGS, DeviceIdentity, HealthReading, Metric, ReadingStatus


class NvmlSource:
    """A `HealthSource` for one GPU. Never raises for what NVML or the device does: it becomes a reading.

    `device_index` is the physical NVML index, which is not the CUDA ordinal under `CUDA_VISIBLE_DEVICES`; use
    `for_cuda_device` for that. NVML is opened at the first `read()`, on the monitor's thread, and again after it
    was lost; once the UUID is known the device is only ever found by it, since indices shift when a GPU is lost.
    `module` replaces `pynvml` (see `FakeNvml`). `rank` only travels along in the identity.
    """

    def __init__(self, *, device_index: int, rank: int | None = None, module: Any = None) -> None:
        self._setup(Selector(nvml_index=device_index), rank=rank, module=module, environ={})

    @classmethod
    def for_cuda_device(
        cls,
        ordinal: int | None = None,
        *,
        uuid: str | None = None,
        rank: int | None = None,
        module: Any = None,
        environ: Mapping[str, str] | None = None,
    ) -> NvmlSource:
        """The source for this process's CUDA device `ordinal`, or for a GPU or MIG `uuid` (a unique prefix will do).

        `CUDA_VISIBLE_DEVICES` and `CUDA_DEVICE_ORDER` are read now; the device is resolved at the first `read()`.
        Raises `ValueError` unless exactly one of the two is given.
        """
        source = cls.__new__(cls)
        remembered = dict(os.environ if environ is None else environ)
        source._setup(Selector(cuda_ordinal=ordinal, uuid=uuid), rank=rank, module=module, environ=remembered)
        return source

    def _setup(self, selector: Selector, *, rank: int | None, module: Any, environ: Mapping[str, str]) -> None:
        self.name = f"nvml {selector}"
        self._selector = selector
        self._rank = rank
        self._environ = environ
        self._nvml = NvmlApi(module)
        self._handle: Any = None
        self._identity: DeviceIdentity | None = None
        self._links: LinkReader | None = None
        self._fixed: dict[str, Answer] = {}

    @property
    def identity(self) -> DeviceIdentity | None:
        """Who the device is; None before the first successful read."""
        return self._identity

    @property
    def device(self) -> str:
        """The key of this device's readings: the instance's MIG id, the GPU's UUID, or how it was asked for."""
        if self._identity is None:
            return str(self._selector)
        return self._identity.mig_uuid or self._identity.uuid or str(self._selector)

    def read(self) -> list[HealthReading]:
        """One reading per metric, `device.presence` first. About thirty NVML calls, no CUDA."""
        try:
            self._nvml.open()
            if self._handle is None:
                self._attach(self._resolve())
        except NvmlUnavailable as error:
            return [self._presence("lost" if error.lost else "unavailable", str(error))]
        except IdentityError as error:
            return [self._not_found(error)]
        return self._read_device()

    def close(self) -> None:
        self._handle = self._links = None
        self._nvml.close()

    def _resolve(self) -> Resolved:
        known = self._identity
        if known is None:
            return resolve(self._selector, self._nvml, self._environ)
        return resolve(Selector(uuid=known.mig_uuid or known.uuid), self._nvml, self._environ)

    def _attach(self, found: Resolved) -> None:
        identity = replace(found.identity, rank=self._rank)
        if self._identity is not None:
            identity = replace(identity, cuda_ordinal=self._identity.cuda_ordinal)
        self._handle = found.handle
        self._fixed = {}
        # Only a UUID lets the device be found again safely; without one the index is kept, and never reopened.
        self._identity = identity if (identity.uuid or identity.mig_uuid) else None
        count = self._nvml.ask("nvmlDeviceGetCount")
        self._links = LinkReader(
            self._nvml, self._handle, self.device, identity.name, int(count.value) if count.ok else 1
        )

    def _not_found(self, error: IdentityError) -> HealthReading:
        if error.lost:
            return self._presence("lost", str(error))
        if self._identity is not None or error.failed:
            siblings = self._siblings()
            self._forget()
            return self._presence("unreachable", str(error), siblings)
        return self._presence("unavailable", str(error))

    def _read_device(self) -> list[HealthReading]:
        readings = self._fixed_readings()
        shared: dict[tuple[str, ...], Answer] = {}
        answers: list[tuple[Query, Answer]] = [(query, self._ask(query, shared)) for query in POLLED]
        readings += [self._reading(query.metric, answer, query) for query, answer in answers]
        readings += self._field_readings() + self._struct_readings()
        if self._links is not None:
            readings += self._links.read()
        return [self._judge_presence(answers, readings), *readings]

    def _ask(self, query: Query, shared: dict[tuple[str, ...], Answer] | None = None) -> Answer:
        """One query; those that read different items of the same call share it through `shared`."""
        key = (query.function, *query.constants)
        answer = shared.get(key) if shared is not None else None
        if answer is None:
            answer = self._call(query)
            if shared is not None:
                shared[key] = answer
        if not answer.ok or query.item is None:
            return answer
        item = query.item
        return replace(answer, value=getattr(answer.value, item) if isinstance(item, str) else answer.value[item])

    def _call(self, query: Query) -> Answer:
        constants = [self._nvml.constant(name) for name in query.constants]
        if any(constant is None for constant in constants):
            return Answer(status=ReadingStatus.UNSUPPORTED, reason=f"this pynvml lacks {query.constants}")
        answer = self._nvml.ask(query.function, self._handle, *constants)
        if query.otherwise is not None and answer.status is ReadingStatus.UNSUPPORTED:
            answer = self._nvml.ask(query.otherwise, self._handle, *constants)
        return answer

    def _reading(self, metric: str, answer: Answer, query: Query | None = None) -> HealthReading:
        limit = self._fixed.get(query.limit) if query is not None and query.limit else None
        value = answer.value if answer.ok else None
        if value is not None and query is not None and query.scale != 1:
            value *= query.scale
        return HealthReading(
            device=self.device,
            metric=metric,
            value=value,
            status=answer.status,
            reason=answer.reason,
            limit=float(limit.value) if limit is not None and limit.ok else None,
            identity=self._identity,
        )

    def _fixed_readings(self) -> list[HealthReading]:
        readings = []
        for query in FIXED:
            if query.metric not in self._fixed or self._fixed[query.metric].status is ReadingStatus.FAILED:
                self._fixed[query.metric] = self._ask(query)
            readings.append(self._reading(query.metric, self._fixed[query.metric], query))
        return readings

    def _field_readings(self) -> list[HealthReading]:
        wanted = [(metric, self._nvml.constant(name)) for metric, name in FIELDS]
        offered = [(metric, field) for metric, field in wanted if field is not None]
        answers = self._nvml.ask_fields(self._handle, [(field, 0) for _, field in offered])
        return [self._reading(metric, answer) for (metric, _), answer in zip(offered, answers, strict=True)]

    def _struct_readings(self) -> list[HealthReading]:
        sram = self._nvml.ask_struct("nvmlDeviceGetSramEccErrorStatus", "c_nvmlEccSramErrorStatus_v1_t", self._handle)
        fabric = self._nvml.ask_struct("nvmlDeviceGetGpuFabricInfo", "c_nvmlGpuFabricInfo_t", self._handle)
        record = sram.value
        values = {
            Metric.SRAM_UNCORRECTABLE: record.volatileUncParity + record.volatileUncSecDed if sram.ok else None,
            Metric.SRAM_CORRECTABLE: record.volatileCor if sram.ok else None,
            Metric.SRAM_THRESHOLD: record.bThresholdExceeded if sram.ok else None,
        }
        readings = [self._reading(metric, replace(sram, value=value)) for metric, value in values.items()]
        state = self._fabric_state(fabric.value.state) if fabric.ok else None
        return [*readings, self._reading(Metric.FABRIC_STATE, replace(fabric, value=state))]

    def _fabric_state(self, state: int) -> str:
        for name in ("NOT_SUPPORTED", "NOT_STARTED", "IN_PROGRESS", "COMPLETED"):
            if self._nvml.constant(f"NVML_GPU_FABRIC_STATE_{name}") == state:
                return name.lower()
        return f"state {state}"

    def _judge_presence(self, answers: list[tuple[Query, Answer]], readings: list[HealthReading]) -> HealthReading:
        """Present if any hardware query answers, or if none is even offered (MIG). Lost only if the driver says so."""
        if any(answer.ok for query, answer in answers if query.vital):
            return self._presence("present")
        lost = next((answer for _, answer in answers if answer.lost), None)
        if lost is not None:
            return self._presence("lost", lost.reason)
        failed = next((reading for reading in readings if reading.status is ReadingStatus.FAILED), None)
        if failed is None or any(answer.ok for _, answer in answers):
            return self._presence("present", "no hardware query is offered here" if failed is None else failed.reason)
        siblings = self._siblings()
        self._forget()
        return self._presence("unreachable", failed.reason, siblings)

    def _presence(self, value: str, reason: str = "", siblings: int = 0) -> HealthReading:
        return HealthReading(
            device=self.device,
            metric=Metric.PRESENCE,
            value=value,
            reason=reason,
            parts={SIBLINGS: siblings} if value == "unreachable" else {},
            identity=self._identity,
        )

    def _siblings(self) -> int:
        """How many other GPUs of this host answer now: the control that tells a lost device from lost telemetry."""
        mine = self._identity.uuid if self._identity is not None else None
        count = self._nvml.ask("nvmlDeviceGetCount")
        answering = 0
        for index in range(int(count.value) if count.ok else 0):
            handle = self._nvml.ask("nvmlDeviceGetHandleByIndex", index)
            uuid = self._nvml.ask("nvmlDeviceGetUUID", handle.value) if handle.ok else handle
            if not uuid.ok or uuid.value == mine or (mine is None and index == self._selector.nvml_index):
                continue
            sensor = self._nvml.constant("NVML_TEMPERATURE_GPU")
            answering += self._nvml.ask("nvmlDeviceGetTemperature", handle.value, sensor).ok
        return answering

    def _forget(self) -> None:
        """Let go of NVML, so that the next poll starts it afresh: a reloaded driver invalidates old handles."""
        self._handle = self._links = None
        self._nvml.close()
