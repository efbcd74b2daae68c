"""Watching what a rank alone owns while nothing should write to it: between two optimizer steps.

A shard that is held once has no copy to be compared with. But from the end of one optimizer step to the beginning of
the next its parameters and optimizer state only rest, so a signature at the end must be that at the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from scout_core.consensus.signature import signatures
from scout_core.replay.local_tensors import local_part
from scout_core.replay.schedule import window

State = Sequence[tuple[str, str, torch.Tensor]]
_MOST_WINDOWS = 1024


@dataclass(frozen=True, kw_only=True)
class _Window:
    """Views of owned state by device, and their signatures and versions as they began to rest."""

    names: list[str]
    views: list[torch.Tensor]
    versions: list[int]
    signed: dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Rest:
    """What the windows since the last check showed: names of tensors that changed, and whether there was a window."""

    watched: bool
    changed: tuple[str, ...]


class AtRest:
    """Windows over owned state, one after the other, in turn over all of it. Local to the rank, no collectives.

    Nothing waits for the device before `take`. Tensors that the job itself wrote to, which raises their version, are
    not judged.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._turn = 0
        self._window: _Window | None = None
        self._ended: list[tuple[list[str], torch.Tensor]] = []
        self._watched = False

    def begin(self, state: State) -> None:
        """Right after an optimizer step: sign the next window over `state`, `(surface, name, tensor)` each."""
        pieces = window([(t.numel(), t.element_size()) for _, _, t in state], self._turn, self._budget)
        self._turn += 1
        views = [local_part(state[p.index][2]).reshape(-1)[p.start : p.stop] for p in pieces]
        self._window = _Window(
            names=[state[p.index][1] for p in pieces],
            views=views,
            versions=[view._version for view in views],
            signed=_signed(views),
        )

    def end(self) -> None:
        """Right before the next optimizer step writes: sign the window once more."""
        if self._window is None:
            return
        rested, self._window = self._window, None
        now = _signed(rested.views)
        for kind, before in rested.signed.items():
            mine = [i for i, view in enumerate(rested.views) if view.device.type == kind]
            lawful = torch.tensor([rested.views[i]._version != rested.versions[i] for i in mine])
            apart = (before != now[kind]) & ~lawful.to(before.device)
            self._ended.append(([rested.names[i] for i in mine], apart))
        self._watched = True
        del self._ended[:-_MOST_WINDOWS]

    def take(self) -> Rest:
        """What was found since the last call. Waits for the device."""
        found = [name for names, apart in self._ended for name, bad in zip(names, apart.tolist(), strict=True) if bad]
        rest = Rest(watched=self._watched, changed=tuple(dict.fromkeys(found)))
        self._ended, self._watched = [], False
        return rest


def _signed(views: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    kinds = sorted({view.device.type for view in views})
    return {kind: signatures([view for view in views if view.device.type == kind]) for kind in kinds}
