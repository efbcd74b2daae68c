"""`FakeNvml`: a stand-in for the `pynvml` module, for tests and for drills with `scout health --fake FILE`.

It has the names, signatures, constants, structures and error classes of the real module that SCOUT uses, and nothing
else; `tests/health/test_fake_nvml.py` compares it with the real one.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from scout_core.health.fake_nvml_names import (
    CONSTANTS,
    ERRORS,
    NVMLError,
    c_nvmlEccSramErrorStatus_v1_t,
    c_nvmlGpuFabricInfo_t,
    error_class_name,
)

_FABRIC_STATES = ("not_supported", "not_started", "in_progress", "completed")

# What a healthy, busy H200 answers. `null` is 'not supported'.
DEFAULT_DEVICE: dict[str, Any] = {
    "name": "NVIDIA H200",
    "temperature": 45,
    "shutdown": 95,
    "tlimit_margin": None,
    "tlimit_at_shutdown": None,
    "clock_events": 0,
    "sm_mhz": 1980,
    "sm_max_mhz": 1980,
    "utilization": 90,
    "power_limit_w": 700,
    "power_default_w": 700,
    "ecc_uncorrectable": 0,
    "ecc_correctable": 0,
    "ecc_uncorrectable_lifetime": 0,
    "ecc_correctable_lifetime": 0,
    "sram_uncorrectable": 0,
    "sram_correctable": 0,
    "sram_threshold_exceeded": 0,
    "remapped": [0, 0, 0, 0],
    "pcie_generation": 5,
    "pcie_generation_max": 5,
    "pcie_width": 16,
    "pcie_width_max": 16,
    "pcie_replay": 0,
    "recovery_action": 0,
    "fabric": "completed",
    "mig_mode": 0,
    "mig_uuids": [],
    "links": None,
    "nvlink_generation": 4,
    "link_recovery": {},
    "link_crc": {},
    "link_replay": {},
    "link_recovery_failed": {},
    "xid_events": True,
    "errors": {},
}


class FakeDevice(SimpleNamespace):
    """One GPU's state, as attributes named like the keys of `DEFAULT_DEVICE`. Change them between polls.

    `errors` maps a function name, or `*` for all but handle look-ups, to an NVML error's name without its prefix
    (`GPU_IS_LOST`). `block` is called at the start of every query, for tests of slow drivers. `reads` counts queries.
    """

    def __init__(self, index: int, description: Mapping[str, Any]) -> None:
        unknown = set(description) - set(DEFAULT_DEVICE) - {"uuid", "pci"}
        if unknown:
            raise ValueError(f"unknown keys of a fake device: {sorted(unknown)}")
        super().__init__(**json.loads(json.dumps(DEFAULT_DEVICE)))
        self.index = index
        self.uuid = f"GPU-{index:08x}-0000-4000-8000-{index:012x}"
        self.pci = f"00000000:{0x10 + index:02X}:00.0"
        self.block: Callable[[], None] | None = None
        self.reads = 0
        self.__dict__.update(json.loads(json.dumps(dict(description))))
        if self.__dict__["links"] is None:
            self.links: list[int] = [1] * 18 if self.name == "NVIDIA H200" else []


class _Handle:
    """What NVML hands out for a device: the GPU, or a MIG instance on it."""

    def __init__(self, device: FakeDevice, mig_uuid: str | None = None) -> None:
        self.device = device
        self.mig_uuid = mig_uuid


class FakeNvml:
    """The module object. `description`: {"devices": [..], "driver": "..", "init_error": "UNKNOWN" or absent}.

    Each device is a dict over `DEFAULT_DEVICE`, plus optional `uuid` and `pci`. Raises `ValueError` for unknown keys.
    """

    NVMLError = NVMLError
    c_nvmlEccSramErrorStatus_v1_t = c_nvmlEccSramErrorStatus_v1_t
    c_nvmlGpuFabricInfo_t = c_nvmlGpuFabricInfo_t

    def __init__(self, description: Mapping[str, Any]) -> None:
        unknown = set(description) - {"devices", "driver", "init_error"}
        if unknown:
            raise ValueError(f"unknown keys of a fake NVML: {sorted(unknown)}")
        for name, value in {**CONSTANTS, **ERRORS}.items():
            setattr(self, name, value)
        for name, code in ERRORS.items():
            setattr(self, error_class_name(name), NVMLError.class_for(code))
        self.devices = [FakeDevice(index, one) for index, one in enumerate(description.get("devices", ()))]
        self.driver = description.get("driver", "570.00-fake")
        self.init_error: str | None = description.get("init_error")
        self.opened = 0
        self._events: deque[tuple[int, int]] = deque()

    @classmethod
    def from_file(cls, path: str | Path) -> FakeNvml:
        """Load a description from a JSON file. Raises `OSError` or `ValueError` with what is wrong."""
        return cls(json.loads(Path(path).read_text(encoding="utf-8")))

    def reload(self, path: str | Path) -> None:
        """Take over the devices' state from a file that was changed; devices keep their order and number."""
        fresh = FakeNvml.from_file(path)
        self.init_error = fresh.init_error
        for mine, theirs in zip(self.devices, fresh.devices, strict=False):
            mine.__dict__.update({key: value for key, value in vars(theirs).items() if key not in ("block", "reads")})

    def emit_xid(self, index: int, code: int) -> None:
        """Queue an XID event of device `index`."""
        self._events.append((index, code))

    # --- library -------------------------------------------------------------------------------------------------

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise self._error(self.init_error)
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self._library()
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        self._library()
        return str(self.driver)

    def nvmlDeviceGetCount(self) -> int:
        self._library()
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> _Handle:
        self._library()
        if not 0 <= index < len(self.devices):
            raise self._error("INVALID_ARGUMENT")
        return self._checked(_Handle(self.devices[index]), "nvmlDeviceGetHandleByIndex")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> _Handle:
        self._library()
        for device in self.devices:
            if uuid == device.uuid:
                return self._checked(_Handle(device), "nvmlDeviceGetHandleByUUID")
            if uuid in device.mig_uuids:
                return self._checked(_Handle(device, uuid), "nvmlDeviceGetHandleByUUID")
        raise self._error("NOT_FOUND")

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, migDevice: _Handle) -> _Handle:
        return _Handle(self._of(migDevice, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", mig_too=True))

    # --- identity ------------------------------------------------------------------------------------------------

    def nvmlDeviceGetUUID(self, handle: _Handle) -> str:
        return handle.mig_uuid or str(self._of(handle, "nvmlDeviceGetUUID").uuid)

    def nvmlDeviceGetName(self, handle: _Handle) -> str:
        return str(self._of(handle, "nvmlDeviceGetName", mig_too=True).name)

    def nvmlDeviceGetPciInfo(self, handle: _Handle) -> Any:
        return SimpleNamespace(busId=self._of(handle, "nvmlDeviceGetPciInfo").pci)

    def nvmlDeviceGetIndex(self, handle: _Handle) -> int:
        return int(self._of(handle, "nvmlDeviceGetIndex").index)

    def nvmlDeviceGetMigMode(self, device: _Handle) -> list[int]:
        mode = self._value(device, "nvmlDeviceGetMigMode", "mig_mode")
        return [mode, mode]

    # --- readings ------------------------------------------------------------------------------------------------

    def nvmlDeviceGetTemperature(self, handle: _Handle, sensor: int) -> int:
        return int(self._value(handle, "nvmlDeviceGetTemperature", "temperature"))

    def nvmlDeviceGetTemperatureThreshold(self, handle: _Handle, threshold: int) -> int:
        return int(self._value(handle, "nvmlDeviceGetTemperatureThreshold", "shutdown"))

    def nvmlDeviceGetMarginTemperature(self, handle: _Handle) -> int:
        return int(self._value(handle, "nvmlDeviceGetMarginTemperature", "tlimit_margin"))

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: _Handle) -> int:
        return int(self._value(handle, "nvmlDeviceGetCurrentClocksEventReasons", "clock_events"))

    def nvmlDeviceGetClockInfo(self, handle: _Handle, type: int) -> int:
        return int(self._value(handle, "nvmlDeviceGetClockInfo", "sm_mhz"))

    def nvmlDeviceGetMaxClockInfo(self, handle: _Handle, type: int) -> int:
        return int(self._value(handle, "nvmlDeviceGetMaxClockInfo", "sm_max_mhz"))

    def nvmlDeviceGetUtilizationRates(self, handle: _Handle) -> Any:
        return SimpleNamespace(gpu=int(self._value(handle, "nvmlDeviceGetUtilizationRates", "utilization")), memory=0)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: _Handle) -> int:
        return int(1000 * self._value(handle, "nvmlDeviceGetEnforcedPowerLimit", "power_limit_w"))

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: _Handle) -> int:
        return int(1000 * self._value(handle, "nvmlDeviceGetPowerManagementDefaultLimit", "power_default_w"))

    def nvmlDeviceGetTotalEccErrors(self, handle: _Handle, errorType: int, counterType: int) -> int:
        kind = ("ecc_correctable", "ecc_uncorrectable")[errorType]
        return int(self._value(handle, "nvmlDeviceGetTotalEccErrors", kind + ("", "_lifetime")[counterType]))

    def nvmlDeviceGetRemappedRows(self, device: _Handle) -> tuple[int, ...]:
        return tuple(self._value(device, "nvmlDeviceGetRemappedRows", "remapped"))

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: _Handle) -> int:
        return int(self._value(handle, "nvmlDeviceGetCurrPcieLinkGeneration", "pcie_generation"))

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: _Handle) -> int:
        return int(self._value(handle, "nvmlDeviceGetMaxPcieLinkGeneration", "pcie_generation_max"))

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: _Handle) -> int:
        return int(self._value(handle, "nvmlDeviceGetCurrPcieLinkWidth", "pcie_width"))

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: _Handle) -> int:
        return int(self._value(handle, "nvmlDeviceGetMaxPcieLinkWidth", "pcie_width_max"))

    def nvmlDeviceGetPcieReplayCounter(self, handle: _Handle) -> int:
        return int(self._value(handle, "nvmlDeviceGetPcieReplayCounter", "pcie_replay"))

    def nvmlDeviceGetSramEccErrorStatus(self, device: _Handle, status: Any) -> int:
        record = status._obj
        record.volatileUncSecDed = self._value(device, "nvmlDeviceGetSramEccErrorStatus", "sram_uncorrectable")
        record.volatileCor = device.device.sram_correctable
        record.bThresholdExceeded = device.device.sram_threshold_exceeded
        return 0

    def nvmlDeviceGetGpuFabricInfo(self, device: _Handle, gpuFabricInfo: Any) -> int:
        state = self._value(device, "nvmlDeviceGetGpuFabricInfo", "fabric")
        gpuFabricInfo._obj.state = _FABRIC_STATES.index(state)
        return 0

    # --- links ---------------------------------------------------------------------------------------------------

    def nvmlDeviceGetNvLinkState(self, device: _Handle, link: int) -> int:
        links = self._value(device, "nvmlDeviceGetNvLinkState", "links")
        if not links:
            raise self._error("NOT_SUPPORTED")
        if link >= len(links):
            raise self._error("INVALID_ARGUMENT")
        return int(links[link])

    def nvmlDeviceGetNvLinkErrorCounter(self, device: _Handle, link: int, counter: int) -> int:
        owner = self._of(device, "nvmlDeviceGetNvLinkErrorCounter")
        names = {0: "link_replay", 1: "link_recovery", 2: "link_crc"}
        if owner.nvlink_generation >= 4 or counter not in names:
            raise self._error("NOT_SUPPORTED")
        return self._link_value(owner, names[counter], link)

    def nvmlDeviceGetFieldValues(self, handle: _Handle, fieldIds: list[Any]) -> list[Any]:
        device = self._of(handle, "nvmlDeviceGetFieldValues")
        return [self._field(device, field, scope) for field, scope in fieldIds]

    def _field(self, device: FakeDevice, field: int, scope: int) -> Any:
        name = _FIELD_NAMES.get(field)
        try:
            if name is None:
                raise self._error("NOT_SUPPORTED")
            value = self._field_value(device, name, scope)
            code = 0
        except NVMLError as error:
            value, code = 0, error.value
        union = SimpleNamespace(sllVal=value)
        return SimpleNamespace(fieldId=field, scopeId=scope, nvmlReturn=code, valueType=4, value=union)

    def _field_value(self, device: FakeDevice, name: str, scope: int) -> int:
        if name == "link_count":
            if not device.links:
                raise self._error("NOT_SUPPORTED")
            return len(device.links)
        if name.startswith("link_"):
            generation = 5 if name.endswith("@5") else 4
            if device.nvlink_generation != generation:
                raise self._error("NOT_SUPPORTED")
            return self._link_value(device, name.partition("@")[0], scope)
        value = getattr(device, name)
        if value is None:
            raise self._error("NOT_SUPPORTED")
        return int(value)

    def _link_value(self, device: FakeDevice, name: str, link: int) -> int:
        counters = getattr(device, name)
        if counters is None or link >= len(device.links):
            raise self._error("NOT_SUPPORTED")
        return int(counters.get(str(link), 0))

    # --- events --------------------------------------------------------------------------------------------------

    def nvmlEventSetCreate(self) -> Any:
        self._library()
        return SimpleNamespace(devices=set())

    def nvmlDeviceGetSupportedEventTypes(self, handle: _Handle) -> int:
        offered = self._value(handle, "nvmlDeviceGetSupportedEventTypes", "xid_events")
        return CONSTANTS["nvmlEventTypeXidCriticalError"] if offered else 0

    def nvmlDeviceRegisterEvents(self, handle: _Handle, eventTypes: int, eventSet: Any) -> None:
        eventSet.devices.add(self._of(handle, "nvmlDeviceRegisterEvents").index)

    def nvmlEventSetWait_v2(self, eventSet: Any, timeoutms: int) -> Any:
        self._library()
        while self._events:
            index, code = self._events.popleft()
            if index in eventSet.devices:
                kind = CONSTANTS["nvmlEventTypeXidCriticalError"]
                return SimpleNamespace(device=_Handle(self.devices[index]), eventType=kind, eventData=code)
        raise self._error("TIMEOUT")

    def nvmlEventSetFree(self, eventSet: Any) -> None:
        self._library()

    # --- checks --------------------------------------------------------------------------------------------------

    def _error(self, name: str) -> Exception:
        code = ERRORS.get(f"NVML_ERROR_{name}")
        if code is None:
            raise ValueError(f"{name} is no NVML error; use a name such as GPU_IS_LOST")
        return NVMLError(code)

    def _library(self) -> None:
        if not self.opened:
            raise self._error("UNINITIALIZED")

    def _checked(self, handle: _Handle, function: str) -> _Handle:
        self._refuse(handle.device, function)
        return handle

    def _refuse(self, device: FakeDevice, function: str) -> None:
        error = device.errors.get(function)
        if error is None and not function.startswith("nvmlDeviceGetHandleBy"):
            error = device.errors.get("*")
        if error is not None:
            raise self._error(error)

    def _of(self, handle: _Handle, function: str, mig_too: bool = False) -> FakeDevice:
        """The device behind a handle, after what a real driver would do first: count, block, fail."""
        self._library()
        device = handle.device
        device.reads += 1
        if device.block is not None:
            device.block()
        self._refuse(device, function)
        if handle.mig_uuid is not None and not mig_too:
            raise self._error("NOT_SUPPORTED")
        return device

    def _value(self, handle: _Handle, function: str, key: str) -> Any:
        value = getattr(self._of(handle, function), key)
        if value is None:
            raise self._error("NOT_SUPPORTED")
        return value


_FIELD_NAMES = {
    CONSTANTS["NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"]: "recovery_action",
    CONSTANTS["NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT"]: "tlimit_at_shutdown",
    CONSTANTS["NVML_FI_DEV_NVLINK_LINK_COUNT"]: "link_count",
    CONSTANTS["NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY"]: "link_recovery@4",
    CONSTANTS["NVML_FI_DEV_NVLINK_ERROR_DL_CRC"]: "link_crc@4",
    CONSTANTS["NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY"]: "link_replay@4",
    CONSTANTS["NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS"]: "link_recovery@5",
    CONSTANTS["NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS"]: "link_crc@5",
    CONSTANTS["NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS"]: "link_recovery_failed@5",
}
