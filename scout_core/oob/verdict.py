"""Judging a stall or a death from what the observers gathered. Pure: no clock, process or network in it.

The order of the questions is the order of proof: calls that do not match, ranks that died, ranks that others wait for.
A rank is named when what it says of itself proves it (stopped, died, inside an exception handler, a loader or a file)
or when a strict majority of its peers waits for it. Whoever waits for somebody is a victim.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from scout_core.oob.endings import judge_endings
from scout_core.oob.findings import Finding, exonerate, make
from scout_core.oob.own_word import is_proof, own_word, speaks, strongest
from scout_core.oob.records import GroupView, RankView
from scout_core.oob.sequences import Divergence, first_divergence, in_steps, settle
from scout_core.oob.waiting import Waits, waits_of

_BUSY = 0.5
_IDLE = 0.2


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What was gathered: views by rank, the ranks of the mesh, and those whose observers gave no answer."""

    views: Mapping[int, RankView]
    members: tuple[int, ...]
    silent: tuple[int, ...] = field(default=())


def judge(views: Sequence[RankView], members: Sequence[int]) -> Finding | None:
    """What is wrong, or None when nothing is or it is too early to say.

    `members` are the ranks that are watched together; those without a view did not answer.
    """
    known = {view.rank: view for view in views}
    situation = Situation(
        views=known, members=tuple(members), silent=tuple(rank for rank in members if rank not in known)
    )
    calls = judge_calls(known, members)
    late = _late(calls, known) if calls is not None and not calls.ranks else []
    if calls is not None and not late:
        return calls
    found = judge_endings(known) or _judge_stall(situation)
    if calls is None or (found is not None and found.ranks):
        return found
    return calls if all(view.stalled or view.status != "alive" for view in late) else None  # they may yet decide it


def _late(undecided: Finding, views: Mapping[int, RankView]) -> list[RankView]:
    """Ranks of the group that have not come to the call on which the others part, without a majority."""
    came = {rank for ranks in undecided.evidence["calls"].values() for rank in ranks}
    return [views[rank] for rank in undecided.evidence["group"] if rank in views and rank not in came]


def drift_of(views: Mapping[int, RankView], members: Collection[int]) -> Divergence | None:
    """The first call that ranks of a group issued in other steps, where corresponding groups tell who is at fault.

    For jobs that stand still only: equal calls that pair up across steps are how a missing one shows.
    """
    groups = {key: {rank: in_steps(view) for rank, view in seen.items()} for key, seen in group_views(views).items()}
    found = [first_divergence(seen, members) for seen in groups.values()]
    settled = [d if d.apart else settle(d, groups, members) for d in found if d is not None]
    decided = [d for d in settled if d.apart]
    return min(decided, key=lambda d: (d.step, d.sequence), default=None)


def group_views(views: Mapping[int, RankView]) -> dict[int, dict[int, GroupView]]:
    """By group key, the view that each of its members has of it."""
    found: dict[int, dict[int, GroupView]] = {}
    for rank, view in views.items():
        for group in view.groups:
            if rank in group.members:
                found.setdefault(group.key, {})[rank] = group
    return found


def judge_calls(views: Mapping[int, RankView], members: Collection[int] = ()) -> Finding | None:
    """Collectives that do not match: the group with the earliest divergence by optimizer step.

    `members` are the ranks that are compared, those with views if not given.
    """
    members = members or views
    groups = group_views(views)
    found = [first_divergence(seen, members) for seen in groups.values()]
    divergences = [d if d.apart else settle(d, groups, members) for d in found if d is not None]
    if not divergences:
        return None
    first = min(divergences, key=lambda d: (not d.apart, d.step, d.sequence))
    return desync_finding(first, views)


def desync_finding(first: Divergence, views: Mapping[int, RankView]) -> Finding:
    """The finding for ranks that issued different calls."""
    who = _ranks(first.apart)
    if first.apart:
        message = (
            f"{who}: {first.how}; collective #{first.sequence} of the group is {first.found} there and "
            f"{first.expected} on {_ranks(first.agreeing)}"
        )
    else:
        message = f"collective #{first.sequence} of the group differs and no majority agrees: " + "; ".join(
            f"{text} on {_ranks(ranks)}" for text, ranks in first.camps
        )
    return make(
        "collective_desync",
        first.apart,
        views,
        basis="majority" if first.apart else "none",
        message=message,
        step=first.step,
        surface=first.found,
        evidence={
            "how": first.how,
            "sequence": first.sequence,
            "group": list(first.members),
            "expected": first.expected,
            "found": first.found,
            "calls": {text: list(ranks) for text, ranks in first.camps},
        },
        exonerating={str(rank): f"issued {first.expected} with the majority" for rank in first.agreeing},
    )


def _judge_stall(situation: Situation) -> Finding | None:
    views = situation.views
    if not any(view.stalled for view in views.values()):
        return None
    waits = waits_of(views)
    holding = waits.roots()
    if holding:
        return _judge_holding(holding, waits, situation)
    own = [view for view in views.values() if view.stalled and speaks(view)]
    if own and (len(own) * 2 < len(views) or len(views) == 1 or any(is_proof(view) for view in own)):
        return own_word(strongest(own), views)
    if own and len(own) == len(views) and len({view.activity for view in own}) == 1:
        return _everybody(own, views)
    if waits.cycle:
        drift = drift_of(views, situation.members)
        return desync_finding(drift, views) if drift is not None else _cycle(waits, views)
    stalled = [view for view in views.values() if view.stalled]
    if len(stalled) * 2 <= len(views) and len(views) > 1:
        return None  # most of the job goes on: nobody waits for these
    return _judge_positions(situation, stalled)


def _judge_holding(holding: tuple[int, ...], waits: Waits, situation: Situation) -> Finding | None:
    """Ranks that others wait for and that wait for nobody."""
    views = situation.views
    late = [views[rank] for rank in holding]
    proven = [view for view in late if is_proof(view) or view.status != "alive"]
    if not proven and not all(view.stalled for view in late):
        return None  # still within its own grace: compiling, saving, evaluating
    victims = {str(rank): text for rank, text in waits.reasons(views).items() if rank not in holding}
    gone = [view for view in late if view.status != "alive"]
    if gone:
        return _left_early(gone, victims, waits, views)
    speaking = [view for view in late if is_proof(view) or (speaks(view) and view.stalled)]
    if speaking:
        return own_word(strongest(speaking), views, victims)
    if waits.alone() and set(waits.alone()) == set(waits.waiting()):
        return _alone(waits, views)
    if all(view.activity in ("collective", "point_to_point") for view in late):
        return _hang_of_some(late, victims, views)
    drift = drift_of(views, situation.members) if len(holding) * 2 >= len(views) else None
    if drift is not None:
        return desync_finding(drift, views)
    if len(holding) * 2 >= len(views):
        return make(
            "process_stall",
            (),
            views,
            basis="none",
            message=f"{_ranks(holding)} hold the others up, and they are no minority that could be blamed",
            evidence={"holding": list(holding)},
        )
    first = min(late, key=lambda view: view.position)
    doing = "busy outside any collective" if first.process.cpu >= _BUSY else "idle outside any collective"
    missing = waits.missing_call(first.rank)
    return make(
        "process_stall",
        holding,
        views,
        basis="majority",
        message=f"{_ranks(holding)}: {doing} for {first.quiet_s:.1f} s (state {first.process.state}) while the others "
        f"wait{f' in {missing}' if missing else ''}",
        surface=missing or None,
        evidence={"doing": doing, "missing_call": missing},
        exonerating=victims,
    )


def _alone(waits: Waits, views: Mapping[int, RankView]) -> Finding:
    """Few ranks are in a call that most never came to, and those are stuck elsewhere: the few made it alone."""
    ranks = waits.waiting()
    call = next(edge.call for edge in waits.edges)
    return make(
        "collective_desync",
        ranks,
        views,
        basis="majority",
        message=f"{_ranks(ranks)}: alone in {call}, which the others never issued; they are elsewhere (in backward, or "
        "in a collective that cannot be seen)",
        surface=call,
        evidence={"how": "extra call", "found": call},
        exonerating=exonerate(ranks, views),
    )


def _hang_of_some(late: list[RankView], victims: dict[str, str], views: Mapping[int, RankView]) -> Finding:
    """Ranks that are all in one call together, which does not end, while the rest of the job waits for them."""
    ranks = [view.rank for view in late]
    first = late[0]
    calls = [c.text for g in first.groups if g.key == first.group for c in g.calls if c.sequence == first.sequence]
    call = calls[0] if calls else first.activity_name or "a collective"
    return make(
        "collective_hang",
        (),
        views,
        basis="none",
        message=f"{_ranks(ranks)}: together inside {call}, to which all of its ranks came; it does not end, and the "
        "others wait for them; no rank can be blamed",
        surface=call,
        evidence={"inside": ranks, "waiting": victims},
    )


def _left_early(
    gone: list[RankView], victims: dict[str, str], waits: Waits, views: Mapping[int, RankView]
) -> Finding | None:
    ranks = tuple(view.rank for view in gone)
    if len(ranks) * 2 >= len(views):
        ranks_named: tuple[int, ...] = ()
    else:
        ranks_named = ranks
    missing = waits.missing_call(ranks[0])
    return make(
        "collective_desync",
        ranks_named,
        views,
        basis="majority" if ranks_named else "none",
        message=f"{_ranks(ranks)}: left (finished or took SCOUT off) without {missing or 'a call'} in which the others "
        "wait",
        surface=missing or None,
        evidence={"how": "missing call", "missing_call": missing, "first_drift_step": waits.first_drift(ranks[0])},
        exonerating=victims,
        step=waits.first_drift(ranks[0]),
    )


def _judge_positions(situation: Situation, stalled: list[RankView]) -> Finding | None:
    """Nobody is seen to wait for anybody: inside one call together, or stuck where no call can be seen."""
    views = situation.views
    if all(view.activity in ("collective", "point_to_point") for view in stalled) and len(stalled) == len(views):
        return _hang(situation, stalled)  # in one call or several, and every one of them is complete
    tops: dict[int, tuple[int, int, int]] = {}  # stages of a pipeline have other layers and passes
    for view in views.values():
        tops[view.role] = max(tops.get(view.role, view.position), view.position)
    behind = [view for view in views.values() if view.position < tops[view.role] and view.status == "alive"]
    if behind and len(behind) * 2 < len(views) and all(view.stalled for view in behind):
        return _apart(behind, views, "behind the others")
    busy = [view for view in stalled if view.process.cpu >= _BUSY]
    idle = [view for view in views.values() if view.process.cpu <= _IDLE]
    if busy and len(busy) * 2 < len(views) and len(busy) + len(idle) == len(views):
        return _apart(busy, views, "busy while the others are idle")
    if len(views) == 1 and len(situation.members) == 1:
        return _apart(stalled, views, "without any progress")
    if len(stalled) == len(views):
        return _hang(situation, stalled)
    return None


def _apart(ranks: list[RankView], views: Mapping[int, RankView], what: str) -> Finding:
    first = min(ranks, key=lambda view: view.position)
    named = tuple(sorted(view.rank for view in ranks))
    return make(
        "process_stall",
        named,
        views,
        basis="majority" if len(views) > 1 else "direct",
        message=f"{_ranks(named)}: {what}, no progress for {first.quiet_s:.1f} s (state {first.process.state}, "
        f"cpu {first.process.cpu:.2f}, step {first.step}, layer {first.stage})",
        evidence={"doing": what},
        exonerating=exonerate(named, views),
    )


def _hang(situation: Situation, stalled: list[RankView]) -> Finding:
    call = next((c for v in stalled for g in v.groups if g.key == v.group for c in g.calls[-1:]), None)
    where = f"inside {call.text}" if call is not None else "where no collective can be seen (backward, or the device)"
    silent = f"; no answer from the observer of {_ranks(situation.silent)}" if situation.silent else ""
    return make(
        "collective_hang",
        (),
        situation.views,
        basis="none",
        message=f"every rank that answered is stuck {where}; no rank can be blamed{silent}",
        surface=call.text if call is not None else None,
        evidence={"silent": list(situation.silent)},
    )


def _cycle(waits: Waits, views: Mapping[int, RankView]) -> Finding:
    return make(
        "collective_desync",
        (),
        views,
        basis="none",
        message="ranks wait for each other in different groups: " + "; ".join(waits.reasons(views).values()),
        evidence={"how": "wrong order", "waits": {str(r): t for r, t in waits.reasons(views).items()}},
    )


def _everybody(own: list[RankView], views: Mapping[int, RankView]) -> Finding:
    kind: Literal["dataloader_stall", "checkpoint_io_stall"] = (
        "dataloader_stall" if own[0].activity == "dataloader" else "checkpoint_io_stall"
    )
    return make(
        kind,
        (),
        views,
        basis="none",
        message=f"every rank waits in {own[0].activity} {own[0].activity_name!r}: storage or input of the whole job",
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
