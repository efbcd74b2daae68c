"""From words that differ to the first call that does: what ranks say after a check whose contract showed a desync."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from scout_core.oob.findings import Finding, make
from scout_core.oob.fingerprints import group_key
from scout_core.oob.records import Call, GroupView, RankView
from scout_core.oob.sequences import first_divergence, in_steps
from scout_core.oob.tally import Members, TalliedCalls
from scout_core.oob.verdict import judge_calls
from scout_core.peers import PeerGroup

_WHOLE_TABLE = 256
"""Most ranks of a table whose calls all of them get; in a larger one, only calls of rows that differ go beyond them."""


def exchange(own: TalliedCalls, peers: PeerGroup, partners: PeerGroup) -> dict[int, TalliedCalls]:
    """What each rank of the table has tallied, by rank. All of them call: one object gather among partners where there
    are any, and one among peers."""
    row = _gather({peers.rank: own}, partners)
    if partners.size * peers.size > _WHOLE_TABLE and not any(_camps(row)):
        row = {peers.rank: own}
    return _gather(row, peers)


def explain(tallied: Mapping[int, TalliedCalls]) -> Finding | None:
    """The finding on the first call that differs, as far back as calls are kept; None when all words agree. Pure."""
    views = {rank: _view(rank, found) for rank, found in tallied.items()}
    finding = judge_calls(views)
    if finding is not None:
        return finding
    finding = judge_calls({r: replace(v, groups=tuple(map(in_steps, v.groups))) for r, v in views.items()})
    if finding is not None:
        return replace(
            finding,
            message=finding.message.replace("other call", "step drift, the same call in another step"),
            evidence={**finding.evidence, "how": "step drift"},
        )
    return _between_groups(tallied, views) or _forgotten(tallied, views)


def _gather(own: dict[int, TalliedCalls], group: PeerGroup) -> dict[int, TalliedCalls]:
    if group.control is None:
        return own
    gathered: list[Any] = [None] * group.size
    dist.all_gather_object(gathered, own, group=group.control)
    return {rank: found for one in gathered for rank, found in one.items()}


def _view(rank: int, tallied: TalliedCalls) -> RankView:
    calls: dict[Members, list[Call]] = {members: [] for members in tallied.groups}
    for members, number, fingerprint, text, step in tallied.calls:
        call = Call(sequence=number, fingerprint=fingerprint, text=text, state="returned", step=step)
        calls.setdefault(members, []).append(call)
    groups = tuple(
        GroupView(
            key=group_key(members),
            members=members,
            issued=max([c.sequence for c in found], default=0),
            calls=tuple(found),
        )
        for members, found in calls.items()
    )
    return RankView(rank=rank, step=tallied.calls[-1][4] if tallied.calls else 0, groups=groups)


def _between_groups(tallied: Mapping[int, TalliedCalls], views: Mapping[int, RankView]) -> Finding | None:
    """Calls in the right order on each group, and in another order between groups that the same ranks share."""
    for members in sorted({tuple(sorted(tallied))} | {m for found in tallied.values() for m in found.groups}):
        mixed: dict[int, GroupView] = {}
        for rank in members:
            if rank not in tallied or len(tallied[rank].calls) < sum(n for n, _ in tallied[rank].groups.values()):
                continue  # without its first calls the order cannot be counted from the start
            shared = [call for call in tallied[rank].calls if set(members) <= set(call[0])]
            calls = tuple(
                Call(sequence=i + 1, fingerprint=fp ^ group_key(m), text=text, state="returned", step=step)
                for i, (m, _, fp, text, step) in enumerate(shared)
            )
            mixed[rank] = GroupView(key=0, members=members, issued=len(calls), calls=calls)
        if first_divergence(mixed) is not None:
            return judge_calls({rank: replace(views[rank], groups=(view,)) for rank, view in mixed.items()})
    return None


def _forgotten(tallied: Mapping[int, TalliedCalls], views: Mapping[int, RankView]) -> Finding | None:
    """Words differ and the calls that are kept do not: the first that did is older, or is missing at the end."""
    for members, camps in _camps(tallied):
        usual, votes = Counter(camps.values()).most_common(1)[0]
        apart = tuple(r for r, said in camps.items() if said != usual) if votes * 2 > len(camps) else ()
        agreeing = [rank for rank in camps if apart and rank not in apart]
        who = f" on rank {', '.join(map(str, apart))}" if apart else ""
        issued = {str(rank): count for rank, (count, _) in camps.items()}
        return make(
            "collective_desync",
            apart,
            views,
            basis="majority" if apart else "none",
            message=f"collectives on the group of ranks {list(members)} differ{who}: calls since the last check "
            f"{issued}; the first that differs is not among those that are kept",
            evidence={"how": "other call", "group": list(members), "issued": issued},
            exonerating={str(rank): "issued what the majority did" for rank in agreeing},
        )
    return None


def _camps(tallied: Mapping[int, TalliedCalls]) -> Sequence[tuple[Members, dict[int, tuple[int, int]]]]:
    """Groups whose members' words differ, with calls issued and word by rank."""
    said: dict[Members, dict[int, tuple[int, int]]] = {}
    for rank, found in sorted(tallied.items()):
        for members, word in found.groups.items():
            said.setdefault(members, {})[rank] = word
    return [(members, words) for members, words in said.items() if len(set(words.values())) > 1]
