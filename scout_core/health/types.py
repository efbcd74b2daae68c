"""The words of hardware health: what a source reads, what the monitor says, and the contract of a source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, Protocol, runtime_checkable

HOST = "host"
"""The pseudo-device of events that concern a whole machine: telemetry lost on all devices, fabric down."""

SIBLINGS = "siblings_answering"
"""Part of an `unreachable` presence reading: how many other GPUs of the host answered just then."""
NODE_WIDE = "no GPU of this node has an active link"
"""Reason of a links reading of 0 when all other GPUs of the node show the same."""


class HealthSeverity(str, Enum):
    """`fatal` asks a manager to act, `warning` records a precursor, `info` explains without accusing."""

    INFO = "info"
    WARNING = "warning"
    FATAL = "fatal"


class ReadingStatus(str, Enum):
    """Why a reading has, or has not, a value. Only `ok` readings are ever judged: absent is not zero.

    `unsupported`: the device, driver, module or permission does not offer it. `failed`: it was asked for and the
    query failed. `stale`: it did not come within its deadline.
    """

    OK = "ok"
    UNSUPPORTED = "unsupported"
    FAILED = "failed"
    STALE = "stale"


class HealthAction(str, Enum):
    """What a manager should do with the device. The order is that of gravity, mildest first."""

    CONTINUE = "continue"
    OBSERVE = "observe"
    RESET_AT_NEXT_STOP = "reset_at_next_stop"
    CHECK_LINK = "check_link"
    RESTART_RANK = "restart_rank"
    EXCLUDE_UNTIL_RESET = "exclude_until_reset"
    EXCLUDE = "exclude"

    @property
    def gravity(self) -> int:
        return list(HealthAction).index(self)


class Metric:
    """Names of the built-in readings. Units: counters count since driver load, temperatures are in degrees C."""

    PRESENCE = "device.presence"
    """Value `present`, `lost` (the driver says so) or `unreachable` (every query failed with a library error)."""
    ECC_UNCORRECTABLE = "ecc.uncorrectable"
    ECC_CORRECTABLE = "ecc.correctable"
    ECC_UNCORRECTABLE_LIFETIME = "ecc.uncorrectable_lifetime"
    ECC_CORRECTABLE_LIFETIME = "ecc.correctable_lifetime"
    SRAM_UNCORRECTABLE = "ecc.sram_uncorrectable"
    SRAM_CORRECTABLE = "ecc.sram_correctable"
    SRAM_THRESHOLD = "ecc.sram_threshold_exceeded"
    REMAP_PENDING = "remap.pending"
    REMAP_FAILURE = "remap.failure"
    REMAP_CORRECTABLE = "remap.rows_correctable"
    REMAP_UNCORRECTABLE = "remap.rows_uncorrectable"
    NVLINK_RECOVERY = "nvlink.recovery"
    NVLINK_CRC = "nvlink.crc"
    NVLINK_REPLAY = "nvlink.replay"
    NVLINK_RECOVERY_FAILED = "nvlink.recovery_failed"
    NVLINK_LINKS = "nvlink.links_active"
    NVLINK_FABRIC = "nvlink.fabric"
    FABRIC_STATE = "fabric.state"
    TEMPERATURE = "temperature.gpu_c"
    TEMPERATURE_SHUTDOWN = "temperature.shutdown_c"
    TLIMIT_MARGIN = "temperature.tlimit_margin_c"
    TLIMIT_SHUTDOWN = "temperature.tlimit_at_shutdown_c"
    SHUTDOWN_MARGIN = "temperature.shutdown_margin"
    CLOCK_EVENTS = "clocks.event_reasons"
    CLOCK_SM = "clocks.sm_mhz"
    CLOCK_SM_MAX = "clocks.sm_max_mhz"
    POWER_LIMIT = "power.limit_w"
    POWER_DEFAULT = "power.default_limit_w"
    POWER_CAP = "power.cap"
    UTILIZATION = "utilization.gpu_percent"
    PCIE_GENERATION = "pcie.generation"
    PCIE_WIDTH = "pcie.width"
    PCIE_LINK = "pcie.link"
    PCIE_REPLAY = "pcie.replay"
    RECOVERY_ACTION = "recovery.action"
    MIG_MODE = "mig.mode"
    XID = "xid"
    TELEMETRY_LOST = "telemetry_lost"
    TELEMETRY_STALE = "telemetry_stale"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceIdentity:
    """Who a device is, as far as known. `uuid` is the physical GPU's, `mig_uuid` an instance's on it.

    `nvml_index` is the physical NVML index, `cuda_ordinal` this process's CUDA device number: they differ under
    `CUDA_VISIBLE_DEVICES`.
    """

    host: str
    uuid: str | None = None
    pci_bus_id: str | None = None
    name: str | None = None
    nvml_index: int | None = None
    cuda_ordinal: int | None = None
    mig_uuid: str | None = None
    rank: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthReading:
    """One thing read from one device at one time.

    `device` is the GPU's UUID where known; any stable name serves a custom source. `parts` splits a counter (per
    link, per memory). `limit` is the reading's own reference: links expected, the maximum a link can train to.
    `occurred_s` (monotonic clock) and `sequence` are for events such as XIDs: a reading without them is a level.
    `severity` is a custom source's own judgement of a metric the classifier does not know; it is ignored for
    the metrics of `Metric`.
    """

    device: str
    metric: str
    value: float | int | str | None = None
    status: ReadingStatus = ReadingStatus.OK
    reason: str = ""
    parts: Mapping[str, int] = field(default_factory=dict)
    limit: float | None = None
    occurred_s: float | None = None
    sequence: int | None = None
    severity: HealthSeverity | None = None
    identity: DeviceIdentity | None = None

    def to_json(self) -> dict[str, Any]:
        return _plain(asdict(self))


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSample:
    """All readings one source made of one device in one poll. `time_s`: monotonic, when they were complete."""

    device: str
    time_s: float
    readings: tuple[HealthReading, ...]
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class HealthEvent:
    """Something about a device changed for the worse (or, `info`, is worth knowing).

    `first_sign_s`: the earliest sign of the same trouble on this device (monotonic); state saved since then
    should not be certified when `blocks_certification`. `action` is advice; SCOUT itself acts on nothing.
    """

    severity: HealthSeverity
    device: str
    metric: str
    time_s: float
    first_sign_s: float
    message: str
    action: HealthAction = HealthAction.OBSERVE
    value: float | int | str | None = None
    threshold: float | None = None
    cause: str = ""
    blocks_certification: bool = False
    evidence: Mapping[str, Any] = field(default_factory=dict)
    identity: DeviceIdentity | None = None
    source: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return (self.device, self.metric)

    def to_json(self) -> dict[str, Any]:
        return {"type": "HealthEvent", **_plain(asdict(self))}


@runtime_checkable
class HealthSource(Protocol):
    """Anything that can be asked about hardware.

    `read()` is called from one thread of the monitor's, never concurrently with itself, once per poll. It may be
    slow, raise or block: the monitor goes on without it and reports the source's devices as stale. `close()` is
    called once, from the thread that closes the monitor, and not while `read()` is still running.
    """

    name: str

    def read(self) -> Sequence[HealthReading]: ...

    def close(self) -> None: ...


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """Enums as their values, all the way down: ready for `json.dumps`."""
    return {key: _plain_value(value) for key, value in record.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value(item) for item in value]
    return value
