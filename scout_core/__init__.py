"""SCOUT: names the rank at fault in distributed training by comparing equivalent peers."""

from scout_core.config import ConfigError, ReplayHarnessConfig, ScoutConfig
from scout_core.consensus import C3Result, C3Status
from scout_core.replay import ReplayResult
from scout_core.session import Scout, attach

__version__ = "0.1.0"

__all__ = [
    "C3Result",
    "C3Status",
    "ConfigError",
    "ReplayHarnessConfig",
    "ReplayResult",
    "Scout",
    "ScoutConfig",
    "attach",
]
