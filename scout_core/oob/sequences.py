"""Finding the first call at which the ranks of one group part. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from scout_core.oob.records import Call, GroupView


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Call number `sequence` of a group, at which ranks issued different calls.

    `apart` are the ranks outside a strict majority, empty when there is none. `how` says what the first of them did:
    `missing call`, `extra call`, `wrong order` or `other call`. `expected` and `found` are texts of the calls.
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


def first_divergence(views: Mapping[int, GroupView]) -> Divergence | None:
    """The first call on which the ranks' views (by global rank) of one group differ, or None.

    Calls that some rank has not issued yet, or that fell out of a ring, are no difference.
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
            return _divergence(views, here, sequence)
    return None


def _divergence(views: Mapping[int, GroupView], here: Mapping[int, Call], sequence: int) -> Divergence:
    camps: dict[int, list[int]] = {}
    for rank in sorted(here):
        camps.setdefault(here[rank].fingerprint, []).append(rank)
    largest = max(camps.values(), key=len)
    decided = len(largest) * 2 > len(here)
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
        step=here[other].step,
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
