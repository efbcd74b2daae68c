"""What a judgement comes to, before it becomes a fault report. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from scout_core.oob.records import RankView

Kind = Literal[
    "collective_desync",
    "collective_hang",
    "process_stall",
    "process_exit",
    "dataloader_stall",
    "checkpoint_io_stall",
    "environment_changed",
]
Basis = Literal["majority", "direct", "none"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One judgement. `ranks` are those at fault, empty when none can be blamed; `exonerating` clears others by rank."""

    kind: Kind
    ranks: tuple[int, ...]
    phase: str
    step: int
    basis: Basis
    message: str
    surface: str | None = None
    hosts: tuple[str, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    exonerating: Mapping[str, Any] = field(default_factory=dict)


def make(
    kind: Kind,
    ranks: Sequence[int],
    views: Mapping[int, RankView],
    *,
    basis: Basis,
    message: str,
    surface: str | None = None,
    step: int | None = None,
    evidence: Mapping[str, Any] | None = None,
    exonerating: Mapping[str, Any] | None = None,
) -> Finding:
    """A finding with the phase and step of the first rank named (or of the slowest rank, if none is)."""
    named = [views[rank] for rank in ranks if rank in views]
    about = named[0] if named else min(views.values(), key=lambda view: view.position)
    states = {str(rank): summary(view) for rank, view in sorted(views.items())}
    return Finding(
        kind=kind,
        ranks=tuple(sorted(ranks)),
        phase=about.phase,
        step=about.step if step is None else step,
        basis=basis,
        message=message,
        surface=surface,
        hosts=tuple(view.host for view in sorted(named, key=lambda view: view.rank)),
        evidence={**(evidence or {}), "states": states},
        exonerating=dict(exonerating or {}) if ranks else {},
    )


def summary(view: RankView) -> str:
    """One line on a rank: where it is and what its process does."""
    where = f"step {view.step} pass {view.micro} layer {view.stage}, {view.phase}"
    activity = f", in {view.activity} {view.activity_name}".rstrip() if view.activity != "none" else ""
    ended = f", exit code {view.process.exit_code}" if view.process.exit_code is not None else ""
    quiet = f"quiet {view.quiet_s:.1f} s of {view.threshold_s:g}"
    return f"{view.status}, state {view.process.state}, {where}{activity}, {quiet}{ended}"


def exonerate(ranks: Sequence[int], views: Mapping[int, RankView]) -> dict[str, str]:
    """What the ranks that are not named were doing."""
    return {str(rank): summary(view) for rank, view in sorted(views.items()) if rank not in ranks}
