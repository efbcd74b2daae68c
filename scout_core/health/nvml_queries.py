"""The table of NVML queries: which function answers which reading."""

from __future__ import annotations

from dataclasses import dataclass

from scout_core.health.types import Metric


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """One reading from one call. `constants` are names of the module's constants passed after the handle.

    `item` picks an attribute (str) or a position (int) of the answer; `scale` converts to the reading's unit.
    `vital`: the device's hardware must answer, so an answer shows that it is there. `limit`: metric, among the
    fixed facts, that is this reading's reference. `otherwise`: the same function's older name.
    """

    metric: str
    function: str
    constants: tuple[str, ...] = ()
    item: str | int | None = None
    scale: float = 1
    vital: bool = False
    limit: str | None = None
    otherwise: str | None = None


_UNCORRECTED, _CORRECTED = "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_MEMORY_ERROR_TYPE_CORRECTED"
_ECC = "nvmlDeviceGetTotalEccErrors"
_REMAP = "nvmlDeviceGetRemappedRows"

PCIE_GENERATION_MAX = "pcie.generation_max"
PCIE_WIDTH_MAX = "pcie.width_max"

FIXED = (
    Query(
        metric=Metric.TEMPERATURE_SHUTDOWN,
        function="nvmlDeviceGetTemperatureThreshold",
        constants=("NVML_TEMPERATURE_THRESHOLD_SHUTDOWN",),
    ),
    Query(metric=Metric.POWER_DEFAULT, function="nvmlDeviceGetPowerManagementDefaultLimit", scale=1e-3),
    Query(metric=Metric.CLOCK_SM_MAX, function="nvmlDeviceGetMaxClockInfo", constants=("NVML_CLOCK_SM",)),
    Query(metric=PCIE_GENERATION_MAX, function="nvmlDeviceGetMaxPcieLinkGeneration"),
    Query(metric=PCIE_WIDTH_MAX, function="nvmlDeviceGetMaxPcieLinkWidth"),
)
"""Facts that do not change while the driver is loaded; read until they answer, then remembered."""

POLLED = (
    Query(
        metric=Metric.TEMPERATURE, function="nvmlDeviceGetTemperature", constants=("NVML_TEMPERATURE_GPU",), vital=True
    ),
    Query(metric=Metric.TLIMIT_MARGIN, function="nvmlDeviceGetMarginTemperature", vital=True),
    Query(
        metric=Metric.CLOCK_EVENTS,
        function="nvmlDeviceGetCurrentClocksEventReasons",
        otherwise="nvmlDeviceGetCurrentClocksThrottleReasons",
        vital=True,
    ),
    Query(metric=Metric.CLOCK_SM, function="nvmlDeviceGetClockInfo", constants=("NVML_CLOCK_SM",), vital=True),
    Query(metric=Metric.UTILIZATION, function="nvmlDeviceGetUtilizationRates", item="gpu", vital=True),
    Query(metric=Metric.POWER_LIMIT, function="nvmlDeviceGetEnforcedPowerLimit", scale=1e-3),
    Query(metric=Metric.ECC_UNCORRECTABLE, function=_ECC, constants=(_UNCORRECTED, "NVML_VOLATILE_ECC"), vital=True),
    Query(metric=Metric.ECC_CORRECTABLE, function=_ECC, constants=(_CORRECTED, "NVML_VOLATILE_ECC"), vital=True),
    Query(metric=Metric.ECC_UNCORRECTABLE_LIFETIME, function=_ECC, constants=(_UNCORRECTED, "NVML_AGGREGATE_ECC")),
    Query(metric=Metric.ECC_CORRECTABLE_LIFETIME, function=_ECC, constants=(_CORRECTED, "NVML_AGGREGATE_ECC")),
    Query(metric=Metric.REMAP_CORRECTABLE, function=_REMAP, item=0),
    Query(metric=Metric.REMAP_UNCORRECTABLE, function=_REMAP, item=1),
    Query(metric=Metric.REMAP_PENDING, function=_REMAP, item=2),
    Query(metric=Metric.REMAP_FAILURE, function=_REMAP, item=3),
    Query(metric=Metric.PCIE_GENERATION, function="nvmlDeviceGetCurrPcieLinkGeneration", limit=PCIE_GENERATION_MAX),
    Query(metric=Metric.PCIE_WIDTH, function="nvmlDeviceGetCurrPcieLinkWidth", limit=PCIE_WIDTH_MAX),
    Query(metric=Metric.PCIE_REPLAY, function="nvmlDeviceGetPcieReplayCounter"),
    Query(metric=Metric.MIG_MODE, function="nvmlDeviceGetMigMode", item=0),
)

FIELDS = (
    (Metric.RECOVERY_ACTION, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION"),
    (Metric.TLIMIT_SHUTDOWN, "NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT"),
)
"""Readings that are NVML fields, all asked in one call."""
