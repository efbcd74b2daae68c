"""Episodes of slowness: when one begins, lasts, ends and comes back, and when slowness only moves between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scout_core.timing.pace_series import Shift

MEMORY = 16
"""Ended episodes that are remembered, of all ranks together."""


@dataclass(kw_only=True)
class Episode:
    """One stretch of time in which a rank was slow. `begun` and `ended` count observations, `onset_step` is a step.

    `window` is the length over which it was seen and `least` what counted as a change then: when less than half of this
    is left, it has ended. `earlier` is how many episodes of this rank preceded it, none of another rank between them.
    """

    position: int
    onset_step: int
    window: int
    least: float
    excess: float
    begun: int
    earlier: int = 0
    ended: int | None = None


class Episodes:
    """The open episodes of all ranks and the last ended ones."""

    def __init__(self, *, persistent: int, gap: int) -> None:
        self._persistent = persistent
        self._gap = gap
        self._now = 0
        self._ended: list[Episode] = []
        self.open: dict[int, Episode] = {}

    def observe(self, shifts: Mapping[int, list[Shift]], onsets: Mapping[int, int]) -> None:
        """Take one observation. `onsets` names the positions that are slow now, with the step since when."""
        self._now += 1
        for position, episode in list(self.open.items()):
            now = next((shift for shift in shifts.get(position, ()) if shift.window == episode.window), None)
            if now is not None and now.value < episode.least / 2:
                episode.ended = self._now
                self._ended = [*self._ended, self.open.pop(position)][-MEMORY:]
            elif now is not None:
                episode.excess = now.value
        for position, step in onsets.items():
            if position not in self.open:
                shift = next(shift for shift in shifts[position] if shift.exceeded)
                self.open[position] = self._begin(position, step, shift)

    def lasts(self, episode: Episode) -> bool:
        """Whether it has lasted so long that it will not pass by itself."""
        return self._now - episode.begun >= self._persistent

    def moves(self, episode: Episode) -> bool:
        """Whether another rank's slowness ended shortly before: then it is passing from one rank to the next."""
        return any(
            other.position != episode.position
            and other.begun < episode.begun
            and other.ended is not None
            and episode.begun - other.ended < self._persistent
            for other in self._ended
        )

    def _begin(self, position: int, step: int, shift: Shift) -> Episode:
        previous = next((index for index, e in reversed([*enumerate(self._ended)]) if e.position == position), None)
        earlier = 0
        if previous is not None:
            before, between = self._ended[previous], self._ended[previous + 1 :]
            if before.ended is not None and self._now - before.ended < self._gap:
                self._ended.remove(before)  # it had not really ended
                before.ended = None
                return before
            earlier = 0 if between else before.earlier + 1
        return Episode(
            position=position,
            onset_step=step,
            window=shift.window,
            least=shift.limit,
            excess=shift.value,
            begun=self._now,
            earlier=earlier,
        )
