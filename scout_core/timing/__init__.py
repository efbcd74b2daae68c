"""Judgement of times: which peer is slow, persistently and by its own fault; and whose fault slow collectives are."""

from scout_core.timing.localization import CrossGroupResult, GroupTiming, localize
from scout_core.timing.pace import PaceFinding, PaceJudge, PaceThresholds, PaceVerdict
from scout_core.timing.straggler_history import StragglerHistory
from scout_core.timing.stragglers import (
    StragglerJudge,
    StragglerReason,
    StragglerThresholds,
    StragglerVerdict,
    candidates,
    confirm,
)

__all__ = [
    "CrossGroupResult",
    "GroupTiming",
    "PaceFinding",
    "PaceJudge",
    "PaceThresholds",
    "PaceVerdict",
    "StragglerHistory",
    "StragglerJudge",
    "StragglerReason",
    "StragglerThresholds",
    "StragglerVerdict",
    "candidates",
    "confirm",
    "localize",
]
