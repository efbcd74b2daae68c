"""SCOUT: names the rank at fault in distributed training by comparing equivalent peers."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {
    "C3Result": "consensus",
    "C3Status": "consensus",
    "ConfigError": "config",
    "ReplayHarnessConfig": "config",
    "ReplayResult": "replay",
    "Scout": "session",
    "ScoutConfig": "config",
    "attach": "session",
}


def __getattr__(name: str) -> Any:
    """A public name from its module, which is loaded then: an observer needs few of them, and torch's are large."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
