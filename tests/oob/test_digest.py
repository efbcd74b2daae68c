"""What a rank tallies of its collectives between checks, and what is said when the words of two ranks differ."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from scout_core.oob.digest import explain
from scout_core.oob.fingerprints import describe, group_key
from scout_core.oob.tally import KEPT_CALLS, KEPT_GROUPS, Tally

WORLD = (0, 1, 2)
PAIR = (0, 1)


def tally(calls: str, members: Sequence[tuple[int, ...]] = (WORLD,), peers: tuple[int, ...] = WORLD) -> Tally:
    """One call for each letter, on the groups in turn."""
    made = Tally(peers)
    for index, letter in enumerate(calls):
        made.add(members[index % len(members)], describe(letter, (), f"{letter}.py:1"), step=index // 4)
    return made


def said(*each: Tally) -> tuple[tuple[int, ...], str] | None:
    finding = explain({rank: one.calls() for rank, one in enumerate(each)})
    return None if finding is None else (finding.ranks, finding.evidence["how"])


@pytest.mark.parametrize(
    ("calls", "how"), [("abdcef", "wrong order"), ("abdef", "missing call"), ("abxcdef", "extra call")]
)
def test_the_odd_rank_and_what_it_did(calls: str, how: str) -> None:
    usual = tally("abcdef")
    assert said(usual, tally(calls), usual) == ((1,), how)
    assert said(usual, usual, usual) is None


def test_a_call_that_is_missing_at_the_end_is_found_by_its_number() -> None:
    usual = tally("aaaa")
    assert said(usual, tally("aaa"), usual) == ((1,), "other call")


def test_what_differed_before_the_newest_calls_is_still_told() -> None:
    """The words are over all calls; the calls themselves are kept in part."""
    usual, odd = tally("ab" + "c" * KEPT_CALLS), tally("ba" + "c" * KEPT_CALLS)
    assert said(usual, odd, usual) == ((1,), "other call")
    assert len(usual.calls().calls) == KEPT_CALLS


def test_order_between_groups_of_the_same_ranks_counts() -> None:
    """Right on each group, but on rank 1 the group of all ranks comes first; that of more ranks holds the peers too."""
    wider = (0, 1, 2, 3)
    usual, odd = tally("ab", [WORLD, wider]), tally("ba", [wider, WORLD])
    assert usual.digest != odd.digest
    assert said(usual, odd, usual) == ((1,), "wrong order")


def test_a_group_inside_the_peers_is_compared_by_itself() -> None:
    words = tally("ab", [PAIR]).words(WORLD)
    assert words[0] == group_key(PAIR) and words[1] != tally("ba", [PAIR]).words(WORLD)[1]
    assert tally("ab", [PAIR]).words((1, 2)) == [0] * len(words), "one member meets nobody"
    assert tally("ab", [WORLD]).words(WORLD) == [0] * len(words), "the digest has it"


def test_a_group_that_rests_shows_and_a_reset_forgets_its_calls_alone() -> None:
    one = tally("ab", [PAIR])
    one.reset()
    assert one.words(WORLD)[:2] == [group_key(PAIR), 0] and one.calls().calls == []


def test_groups_beyond_what_is_kept_are_not_compared() -> None:
    one = tally("a" * (KEPT_GROUPS + 5), [(0, rank) for rank in range(1, KEPT_GROUPS + 6)])
    assert len(one.calls().groups) == KEPT_GROUPS
    one.reset()
    one.add((0, 1000), describe("a", (), "a.py:1"), 0)
    assert set(one.calls().groups) == {(0, 1000)}, "those that rest make room"
