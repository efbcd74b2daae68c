"""Hardware telemetry: sources, thresholds, and the monitor thread. Imports neither torch nor pynvml."""

from scout_core.health.cause import slowdown_cause
from scout_core.health.classify import Judgement, classify
from scout_core.health.config import HealthConfig
from scout_core.health.fault_history import FaultHistory
from scout_core.health.history import HealthHistory
from scout_core.health.identity import (
    IdentityError,
    Selector,
    host_identities,
    parse_visible_devices,
    rank_identity,
    resolve,
)
from scout_core.health.identity_map import IdentityMap
from scout_core.health.monitor import HardwareHealthMonitor
from scout_core.health.nvml import NvmlSource
from scout_core.health.types import (
    DeviceIdentity,
    DeviceSample,
    HealthAction,
    HealthEvent,
    HealthReading,
    HealthSeverity,
    HealthSource,
    Metric,
    ReadingStatus,
)
from scout_core.health.xid_source import XidSource

__all__ = [
    "DeviceIdentity",
    "DeviceSample",
    "FaultHistory",
    "HardwareHealthMonitor",
    "HealthAction",
    "HealthConfig",
    "HealthEvent",
    "HealthHistory",
    "HealthReading",
    "HealthSeverity",
    "HealthSource",
    "IdentityError",
    "IdentityMap",
    "Judgement",
    "Metric",
    "NvmlSource",
    "ReadingStatus",
    "Selector",
    "XidSource",
    "classify",
    "host_identities",
    "parse_visible_devices",
    "rank_identity",
    "resolve",
    "slowdown_cause",
]
