"""The emergency replay: after a hang, the whole catalog once more, before memory is trusted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scout_core.replay.guard import attempt
from scout_core.replay.result import ReplayResult
from scout_core.trust.certify import Vote, agree, outcome_of
from scout_core.trust.channel import JobChannel
from scout_core.trust.decision import Emergency
from scout_core.trust.states import Outcome

Replay = Callable[[], ReplayResult | None]


@dataclass(frozen=True, kw_only=True)
class EmergencyReplay:
    """What the replay came to, equal on every rank. `ranks` are those that it found corrupt."""

    word: Emergency
    why: str
    ranks: tuple[int, ...] = ()


def replay_in_emergency(channel: JobChannel, step: int, replay: Replay | None) -> EmergencyReplay:
    """Replay the catalog on every rank, if every rank can.

    Every rank calls; `replay` is None on one that cannot. Collectives: two gathers, and those of the replay, which no
    rank enters before all have said that they will, at the same step.
    """
    rows = channel.gather([step, int(replay is not None)])
    unable = [rank for rank, row in enumerate(rows) if not row[1]]
    if len(unable) == channel.size:
        return EmergencyReplay(word="unavailable", why="no rank can replay")
    if unable:
        return EmergencyReplay(word="incomplete", why=f"rank {_names(unable)} cannot replay")
    if len({row[0] for row in rows}) > 1:
        return EmergencyReplay(word="incomplete", why=f"the ranks are at steps {[row[0] for row in rows]}")
    assert replay is not None
    result = attempt("replaying in an emergency", replay).value
    vote = Vote(step=step, outcome=outcome_of(result), broken=result is None)
    verdict = agree([Vote.decode(row) for row in channel.gather(vote.encode())])
    if verdict.broken_ranks:
        return EmergencyReplay(word="incomplete", why=f"the replay broke off on rank {_names(verdict.broken_ranks)}")
    if verdict.outcome is Outcome.SDC:
        told = channel.gather_json([] if result is None else list(result.sdc_ranks))
        ranks = tuple(sorted({rank for one in told for rank in one}))
        return EmergencyReplay(word="sdc", why=f"it found rank {_names(ranks)} corrupt", ranks=ranks)
    if not verdict.outcome.accepts:
        return EmergencyReplay(word="incomplete", why="part of the catalog gave no verdict")
    return EmergencyReplay(word="clean", why="")


def _names(ranks: list[int] | tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) or "unknown"
