"""Replay of sampled training work on equivalent peers, and the verdicts from it."""

from scout_core.replay.result import ReplayResult

__all__ = ["ReplayResult"]
