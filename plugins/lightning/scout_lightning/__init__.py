"""SCOUT under Lightning: one callback, and the newest checkpoint that may be trusted."""

from scout_lightning.callback import ScoutCallback
from scout_lightning.ledger import latest_verified

__all__ = ["ScoutCallback", "latest_verified"]
