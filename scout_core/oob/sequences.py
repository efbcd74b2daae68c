"""Finding the first call at which the ranks of one group part. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from scout_core.oob.records import Call, GroupView


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Call number `sequence` of a group, at which ranks issued different calls.

    `apart` are the ranks outside a strict majority of the group, empty when there is none. `how` says what the first
    of them did: `missing call`, `extra call`, `wrong order` or `other call`. `expected` and `found` are texts of the
    calls. `step` is the first optimizer step in which one of these two was issued.
    """

    group: int
    members: tuple[int, ...]
    sequence: int
    apart: tuple[int, ...]
    agreeing: tuple[int, ...]
    how: str
    expected: str
    found: str
    step: int
    camps: tuple[tuple[str, tuple[int, ...]], ...]


def first_divergence(views: Mapping[int, GroupView], among: Collection[int] = ()) -> Divergence | None:
    """The first call on which the ranks' views (by global rank) of one group differ, or None.

    Calls that some rank has not issued yet, or that fell out of a ring, are no difference. `among` are the ranks that
    are compared, those with views if not given: its members of the group are the whole of which a majority is one,
    also those that have not come to the call or gave no answer.
    """
    if len(views) < 2:
        return None
    calls = {rank: {call.sequence: call for call in view.calls} for rank, view in views.items()}
    starts = [min(found) for found in calls.values() if found]
    if not starts:
        return None
    for sequence in range(max(starts), max(view.issued for view in views.values()) + 1):
        here = {rank: found[sequence] for rank, found in calls.items() if sequence in found}
        if len({call.fingerprint for call in here.values()}) > 1:
            return _divergence(views, here, sequence, _whole(next(iter(views.values())), among or views))
    return None


def settle(found: Divergence, groups: Mapping[int, Mapping[int, GroupView]], among: Collection[int]) -> Divergence:
    """A divergence without a majority in its group, decided by corresponding groups if they can. Pure.

    In a mesh, the groups along one dimension run one program: same size, same distances between members, and equal
    calls before this one. Their ranks count with the camp whose call they issued; a strict majority of all of them and
    of the group decides. `among` as in `first_divergence`.
    """
    own = groups[found.group]
    before = _before(own, found.sequence)
    votes: dict[int, list[int]] = {}
    whole = {found.group: _whole(next(iter(own.values())), among)}
    for view in _corresponding(found, groups):
        call = next((c for c in view[1].calls if c.sequence == found.sequence), None)
        if call is not None and before and _agree(_common(before, view[1], found.sequence), before):
            votes.setdefault(call.fingerprint, []).append(view[0])
            whole[view[1].key] = _whole(view[1], among)
    camps: dict[int, list[int]] = {}
    for rank, view_of in own.items():
        for call in view_of.calls:
            if call.sequence == found.sequence:
                camps.setdefault(call.fingerprint, []).append(rank)
    every = {word: camps.get(word, []) + votes.get(word, []) for word in {*camps, *votes}}
    best = max(every, key=lambda word: len(every[word]))
    if best not in camps or len(every[best]) * 2 <= sum(whole.values()):
        return found
    apart = tuple(sorted(rank for word, ranks in camps.items() if word != best for rank in ranks))
    here = {rank: next(c for c in own[rank].calls if c.sequence == found.sequence) for w in camps for rank in camps[w]}
    model, other = here[camps[best][0]], here[apart[0]]
    return replace(
        found,
        apart=apart,
        agreeing=tuple(sorted(every[best])),
        how=compare_tails(_tail(own[apart[0]], found.sequence), _tail(own[camps[best][0]], found.sequence)),
        expected=model.text,
        found=other.text,
        step=min(model.step, other.step),
    )


def in_steps(view: GroupView) -> GroupView:
    """The same with calls that are equal only if they were issued in the same optimizer step."""
    calls = tuple(
        replace(c, fingerprint=hash((c.fingerprint, c.step)), text=f"{c.text} in step {c.step}") for c in view.calls
    )
    return replace(view, calls=calls)


def _corresponding(found: Divergence, groups: Mapping[int, Mapping[int, GroupView]]) -> list[tuple[int, GroupView]]:
    """Ranks and views of the groups that have the shape of this one and no member of it."""
    shape = [member - found.members[0] for member in found.members]
    return [
        (rank, view)
        for key, seen in groups.items()
        if key != found.group
        for rank, view in seen.items()
        if [m - view.members[0] for m in view.members] == shape and not set(view.members) & set(found.members)
    ]


def _before(views: Mapping[int, GroupView], sequence: int) -> list[int]:
    """The calls before this one that every rank of the group still has, newest first."""
    shortest = min(views.values(), key=lambda view: sum(c.sequence < sequence for c in view.calls))
    return [c.fingerprint for c in reversed(shortest.calls) if c.sequence < sequence]


def _common(before: Sequence[int], view: GroupView, sequence: int) -> list[int]:
    return [c.fingerprint for c in reversed(view.calls) if c.sequence < sequence][: len(before)]


def _whole(view: GroupView, among: Collection[int]) -> int:
    """How many ranks of a group are compared."""
    return sum(rank in among for rank in view.members)


def _divergence(views: Mapping[int, GroupView], here: Mapping[int, Call], sequence: int, whole: int) -> Divergence:
    camps: dict[int, list[int]] = {}
    for rank in sorted(here):
        camps.setdefault(here[rank].fingerprint, []).append(rank)
    largest = max(camps.values(), key=len)
    decided = len(largest) * 2 > whole
    apart = tuple(rank for rank in sorted(here) if decided and rank not in largest)
    other = apart[0] if apart else next(ranks[0] for ranks in camps.values() if ranks is not largest)
    model = here[largest[0]]
    view = next(iter(views.values()))
    return Divergence(
        group=view.key,
        members=view.members,
        sequence=sequence,
        apart=apart,
        agreeing=tuple(largest) if decided else (),
        how=compare_tails(_tail(views[other], sequence), _tail(views[largest[0]], sequence)),
        expected=model.text,
        found=here[other].text,
        step=min(model.step, here[other].step),
        camps=tuple((here[ranks[0]].text, tuple(ranks)) for ranks in camps.values()),
    )


def _tail(view: GroupView, sequence: int) -> list[int]:
    return [call.fingerprint for call in view.calls if call.sequence >= sequence]


def compare_tails(found: Sequence[int], expected: Sequence[int]) -> str:
    """How `found` came to differ from `expected` at their first words."""
    if len(found) > 1 and len(expected) > 1 and found[:2] == [expected[1], expected[0]]:
        return "wrong order"
    if len(expected) > 1 and _agree(found, expected[1:]):
        return "missing call"
    if len(found) > 1 and _agree(found[1:], expected):
        return "extra call"
    return "other call"


def _agree(one: Iterable[int], other: Iterable[int]) -> bool:
    """Equal as far as both go, and both go somewhere."""
    pairs = [(a, b) for a, b in zip_longest(one, other) if a is not None and b is not None]
    return bool(pairs) and all(a == b for a, b in pairs)
