"""How long no progress is fine: by phase, and for loaders and checkpoint files by what they took as a rule. Pure."""

from __future__ import annotations

from scout_core.config import OobConfig
from scout_core.oob.layout import Activity, Phase


def threshold_s(phase: Phase, activity: Activity, usual_ns: int, config: OobConfig) -> float:
    """Seconds without a publication that are still fine."""
    usual_s = usual_ns / 1e9
    if activity is Activity.DATALOADER:
        if not usual_ns:  # workers are being started, and nothing is known of this loader yet
            return max(3 * config.dataloader_stall_s, config.stall_startup_s if phase is Phase.STARTUP else 0.0)
        return max(config.dataloader_stall_s, config.dataloader_stall_relative * usual_s)
    if activity in (Activity.CHECKPOINT_READ, Activity.CHECKPOINT_WRITE):
        return max(config.checkpoint_stall_s, config.checkpoint_stall_relative * usual_s)
    graces = {
        Phase.STARTUP: config.stall_startup_s,
        Phase.COMPILE: config.stall_compile_s,
        Phase.TRAIN: config.stall_train_s,
        Phase.EVAL: config.stall_eval_s,
        Phase.CHECKPOINT: config.stall_checkpoint_s,
        Phase.TEARDOWN: config.stall_teardown_s,
    }
    return graces[phase]


def look_every_s(config: OobConfig) -> float:
    """Pause between two looks: a tenth of the shortest threshold, 0.1 s at least and 2 s at most."""
    shortest = min(config.stall_train_s, config.dataloader_stall_s, config.checkpoint_stall_s, config.stall_eval_s)
    return min(max(shortest / 10, 0.1), 2.0)
