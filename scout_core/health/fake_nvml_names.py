"""Names, numbers, errors and structures of NVML as far as the fake needs them; compared with `pynvml` by a test."""

from __future__ import annotations

import ctypes
import string

CONSTANTS: dict[str, int] = {
    "NVML_AGGREGATE_ECC": 1,
    "NVML_CLOCK_SM": 1,
    "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION": 230,
    "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS": 215,
    "NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS": 214,
    "NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS": 208,
    "NVML_FI_DEV_NVLINK_ERROR_DL_CRC": 163,
    "NVML_FI_DEV_NVLINK_ERROR_DL_RECOVERY": 162,
    "NVML_FI_DEV_NVLINK_ERROR_DL_REPLAY": 161,
    "NVML_FI_DEV_NVLINK_LINK_COUNT": 91,
    "NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT": 193,
    "NVML_GPU_FABRIC_STATE_COMPLETED": 3,
    "NVML_GPU_FABRIC_STATE_IN_PROGRESS": 2,
    "NVML_GPU_FABRIC_STATE_NOT_STARTED": 1,
    "NVML_GPU_FABRIC_STATE_NOT_SUPPORTED": 0,
    "NVML_MEMORY_ERROR_TYPE_CORRECTED": 0,
    "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
    "NVML_NVLINK_ERROR_DL_CRC_FLIT": 2,
    "NVML_NVLINK_ERROR_DL_RECOVERY": 1,
    "NVML_NVLINK_ERROR_DL_REPLAY": 0,
    "NVML_NVLINK_MAX_LINKS": 36,
    "NVML_SUCCESS": 0,
    "NVML_TEMPERATURE_GPU": 0,
    "NVML_TEMPERATURE_THRESHOLD_SHUTDOWN": 0,
    "NVML_VALUE_TYPE_DOUBLE": 0,
    "NVML_VALUE_TYPE_SIGNED_INT": 5,
    "NVML_VALUE_TYPE_SIGNED_LONG_LONG": 4,
    "NVML_VALUE_TYPE_UNSIGNED_INT": 1,
    "NVML_VALUE_TYPE_UNSIGNED_LONG": 2,
    "NVML_VALUE_TYPE_UNSIGNED_LONG_LONG": 3,
    "NVML_VALUE_TYPE_UNSIGNED_SHORT": 6,
    "NVML_VOLATILE_ECC": 0,
    "nvmlEventTypeXidCriticalError": 8,
}

ERRORS: dict[str, int] = {
    "NVML_ERROR_UNINITIALIZED": 1,
    "NVML_ERROR_INVALID_ARGUMENT": 2,
    "NVML_ERROR_NOT_SUPPORTED": 3,
    "NVML_ERROR_NO_PERMISSION": 4,
    "NVML_ERROR_ALREADY_INITIALIZED": 5,
    "NVML_ERROR_NOT_FOUND": 6,
    "NVML_ERROR_INSUFFICIENT_SIZE": 7,
    "NVML_ERROR_INSUFFICIENT_POWER": 8,
    "NVML_ERROR_DRIVER_NOT_LOADED": 9,
    "NVML_ERROR_TIMEOUT": 10,
    "NVML_ERROR_IRQ_ISSUE": 11,
    "NVML_ERROR_LIBRARY_NOT_FOUND": 12,
    "NVML_ERROR_FUNCTION_NOT_FOUND": 13,
    "NVML_ERROR_CORRUPTED_INFOROM": 14,
    "NVML_ERROR_GPU_IS_LOST": 15,
    "NVML_ERROR_RESET_REQUIRED": 16,
    "NVML_ERROR_OPERATING_SYSTEM": 17,
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": 18,
    "NVML_ERROR_IN_USE": 19,
    "NVML_ERROR_MEMORY": 20,
    "NVML_ERROR_NO_DATA": 21,
    "NVML_ERROR_VGPU_ECC_NOT_SUPPORTED": 22,
    "NVML_ERROR_INSUFFICIENT_RESOURCES": 23,
    "NVML_ERROR_FREQ_NOT_SUPPORTED": 24,
    "NVML_ERROR_ARGUMENT_VERSION_MISMATCH": 25,
    "NVML_ERROR_DEPRECATED": 26,
    "NVML_ERROR_NOT_READY": 27,
    "NVML_ERROR_GPU_NOT_FOUND": 28,
    "NVML_ERROR_INVALID_STATE": 29,
    "NVML_ERROR_RESET_TYPE_NOT_SUPPORTED": 30,
    "NVML_ERROR_UNKNOWN": 999,
}


def error_class_name(constant: str) -> str:
    """`NVML_ERROR_GPU_IS_LOST` -> `NVMLError_GpuIsLost`, as the real module names its classes."""
    words = constant.removeprefix("NVML_ERROR_").replace("_", " ")
    return "NVMLError_" + string.capwords(words).replace(" ", "")


class NVMLError(Exception):
    """An NVML error by code. As in the real module, creating one gives an instance of the code's own class."""

    value: int
    _classes: dict[int, type[NVMLError]] = {}  # noqa: RUF012 - filled once below

    def __new__(cls, value: int) -> NVMLError:
        error = super().__new__(cls._classes.get(value, cls))
        error.value = value
        return error

    def __str__(self) -> str:
        name = next((name for name, code in ERRORS.items() if code == self.value), f"code {self.value}")
        return name.removeprefix("NVML_ERROR_").replace("_", " ").capitalize()

    @classmethod
    def class_for(cls, code: int) -> type[NVMLError]:
        return cls._classes[code]


def _error_classes() -> dict[int, type[NVMLError]]:
    classes: dict[int, type[NVMLError]] = {}
    for name, code in ERRORS.items():
        classes[code] = type(error_class_name(name), (NVMLError,), {})
    return classes


NVMLError._classes.update(_error_classes())


class c_nvmlEccSramErrorStatus_v1_t(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        *(
            (name, ctypes.c_ulonglong)
            for name in (
                "aggregateUncParity",
                "aggregateUncSecDed",
                "aggregateCor",
                "volatileUncParity",
                "volatileUncSecDed",
                "volatileCor",
                "aggregateUncBucketL2",
                "aggregateUncBucketSm",
                "aggregateUncBucketPcie",
                "aggregateUncBucketMcu",
                "aggregateUncBucketOther",
            )
        ),
        ("bThresholdExceeded", ctypes.c_uint),
    )


class c_nvmlGpuFabricInfo_t(ctypes.Structure):
    _fields_ = (
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_ubyte),
    )
