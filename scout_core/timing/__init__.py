"""Judgement of times: which peer is slow, persistently and by its own fault."""

from scout_core.timing.stragglers import (
    StragglerHistory,
    StragglerJudge,
    StragglerReason,
    StragglerThresholds,
    StragglerVerdict,
    candidates,
    confirm,
)

__all__ = [
    "StragglerHistory",
    "StragglerJudge",
    "StragglerReason",
    "StragglerThresholds",
    "StragglerVerdict",
    "candidates",
    "confirm",
]
