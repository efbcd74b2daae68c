"""What the entry points name: a callback for every Trainer of a process that asks for it by environment variable."""

from __future__ import annotations

import os

from scout_core.config import ConfigError
from scout_lightning.callback import ScoutCallback

SWITCH = "SCOUT_LIGHTNING"
CONFIG = "SCOUT_LIGHTNING_CONFIG"


def callbacks() -> list[ScoutCallback]:
    """One callback when `SCOUT_LIGHTNING=1`, else none; `SCOUT_LIGHTNING_CONFIG` may name its configuration file.

    Beside a callback that the script gives, this one does nothing. Raises `ConfigError` for another value.
    """
    wanted = os.environ.get(SWITCH, "0")
    if wanted not in ("0", "1", ""):
        raise ConfigError(f"{SWITCH}={wanted!r}; set it to 1 to watch this job, or to 0")
    return [ScoutCallback(config=os.environ.get(CONFIG) or None)] if wanted == "1" else []
