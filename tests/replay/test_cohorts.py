"""Joining the verdicts of ranks in lockstep: blame goes to the rank on which the fault began."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.consensus.c3 import C3Status
from scout_core.replay.cohorts import VIEW_WORDS, ColumnView, Joined, join
from scout_core.replay.evidence import MARKS, Observation, surfaces_of
from scout_core.replay.verdict import RecipeVerdict, Suspect, judge_recipe

NAMES = surfaces_of("hidden", lockstep=True)
TABLE = ([0, 2, 4, 6], [1, 3, 5, 7])


def column(odd: dict[int, dict[str, int]], *, peers: int = 4, forward: int = 2) -> RecipeVerdict:
    """The verdict of one column; `odd[p]` holds the words in which its peer at position p differs.

    `mark0`, `mark1`, ... are inputs of collectives, of which `forward` belong to the forward pass.
    """
    seen = []
    for p in range(peers):
        words = {name: odd.get(p, {}).get(name, 1) for name in NAMES}
        marks = tuple(odd.get(p, {}).get(f"mark{k}", 1) for k in range(MARKS))
        words["collective_input"] = hash(marks) >> 1
        seen.append(Observation(words=tuple(words.values()), marks=marks, forward_marks=forward))
    ranks = range(peers)
    return judge_recipe(
        "hidden:1", "hidden", [seen, seen], qualified=True, earlier_repeats=10_000, ranks=ranks, lockstep=True
    )


def joined(*columns: RecipeVerdict, table: tuple[list[int], ...] = TABLE, travels: bool = True) -> list[Joined]:
    views = [ColumnView.decode(ColumnView.of(verdict).encode()) for verdict in columns]
    return [join(verdict, views, i, table, travels=travels) for i, verdict in enumerate(columns)]


def blamed(joined_columns: list[Joined]) -> set[int]:
    return {TABLE[i][p] for i, one in enumerate(joined_columns) for p, bad in enumerate(one.verdict.bitmap) if bad}


def test_columns_that_agree_stay_as_they_are() -> None:
    found = joined(column({}), column({}))
    assert [one.verdict.status for one in found] == [C3Status.AGREE] * 2
    assert not any(one.more or one.closer for one in found)


@pytest.mark.parametrize(
    ("origin", "victim"),
    [
        ({"parameter_state": 7, "mark0": 7, "mark1": 7, "output": 7}, {"mark1": 8, "output": 8}),
        ({"mark0": 7, "output": 7}, {"output": 8, "parameter_gradient": 8}),
        ({"output": 7, "mark2": 7}, {"mark3": 8, "parameter_gradient": 8}),
        ({"mark2": 7}, {"parameter_gradient": 8}),
    ],
)
def test_the_rank_that_stood_apart_first_is_blamed(origin: dict[str, int], victim: dict[str, int]) -> None:
    found = joined(column({2: victim}), column({2: origin}))
    assert blamed(found) == {5}
    assert found[0].verdict.status is C3Status.INCONCLUSIVE
    assert "rank 4 differs only from when on it had values from rank 5" in str(found[0].verdict.reason)
    assert found[0].verdict.persistence is None, "the victim's column must not report a fault of its own"


def test_an_output_comes_before_the_inputs_of_backward() -> None:
    found = joined(column({1: {"output": 7}}), column({1: {"mark2": 8}}))
    assert blamed(found) == {2}


def test_partners_that_differ_from_the_same_moment_on_are_named_together() -> None:
    found = joined(column({2: {"output": 7}}), column({2: {"output": 8}}))
    assert blamed(found) == set()
    assert all("the fault lies with one of ranks 4, 5" in str(one.verdict.reason) for one in found)
    assert [one.verdict.persistence for one in found] == ["persistent", None], "one column speaks for both"


def test_two_faults_on_two_replicas_are_blamed_each() -> None:
    found = joined(
        column({0: {"mark0": 7}, 2: {"output": 8}}, peers=5),
        column({2: {"mark0": 9}, 0: {"output": 9}}, peers=5),
        table=([0, 2, 4, 6, 8], [1, 3, 5, 7, 9]),
    )
    assert [[p for p, bad in enumerate(one.verdict.bitmap) if bad] for one in found] == [[0], [2]]


def test_state_that_only_a_rank_itself_holds_is_blamed_on_each_that_has_it_wrong() -> None:
    found = joined(column({1: {"parameter_state": 7}}), column({1: {"parameter_state": 8}}))
    assert blamed(found) == {2, 3}


def test_between_two_replicas_the_column_where_it_began_is_told_apart() -> None:
    found = joined(column({1: {"output": 7}}, peers=2), column({1: {"mark0": 7}}, peers=2), table=([0, 2], [1, 3]))
    assert blamed(found) == set()
    assert "values from ranks 1, 3" in str(found[0].verdict.reason)
    assert found[1].verdict.persistence == "persistent"


def test_a_victims_column_asks_for_no_further_executions() -> None:
    def provisional(odd: dict[str, int]) -> RecipeVerdict:
        seen = []
        for p in range(4):
            words = {name: odd.get(name, 1) if p == 2 else 1 for name in NAMES}
            seen.append(Observation(words=tuple(words.values()), forward_marks=2))
        return judge_recipe("hidden:1", "hidden", [seen, seen], qualified=True, lockstep=True)

    origin, victim = provisional({"parameter_state": 7, "output": 7}), provisional({"output": 8})
    assert (origin.more, victim.more > 0) == (0, True)
    assert [one.more for one in joined(victim, origin)] == [0, 0]
    assert [one.more for one in joined(victim, column({}))] == [victim.more] * 2


def test_nobody_is_blamed_when_a_partners_replay_raised_or_does_not_repeat_itself() -> None:
    failed = RecipeVerdict(recipe_id="hidden:1", status=C3Status.INCONCLUSIVE, raised=True)
    views = [ColumnView.of(column({2: {"mark0": 7}})), ColumnView.of(failed)]
    assert not any(join(column({2: {"mark0": 7}}), views, 0, TABLE, travels=True).verdict.bitmap)
    varying = RecipeVerdict(recipe_id="hidden:1", status=C3Status.INCONCLUSIVE, nondeterministic=True)
    views[1] = ColumnView.of(varying)
    found = join(column({2: {"mark0": 7}}), views, 0, TABLE, travels=True).verdict
    assert found.nondeterministic and not any(found.bitmap)


@pytest.mark.parametrize(("listing", "differs"), [((5, 5), True), ((5, 6), False)])
def test_shared_state_is_compared_where_the_listings_are_equal(listing: tuple[int, int], differs: bool) -> None:
    agreed = column({})
    views = [ColumnView.of(agreed, shared=word, listing=what) for word, what in zip((1, 2), listing, strict=True)]
    found = [join(agreed, views, i, TABLE, travels=False) for i in range(2)]
    assert [one.shared_differs for one in found] == [differs] * 2
    assert [one.verdict.status for one in found] == [C3Status.INCONCLUSIVE if differs else C3Status.AGREE] * 2


def test_shared_state_is_not_judged_while_a_rank_stands_apart_from_its_peers() -> None:
    own, other = column({2: {"parameter_state": 7}}), column({})
    views = [ColumnView.of(own, shared=1, listing=5), ColumnView.of(other, shared=2, listing=5)]
    found = join(own, views, 0, TABLE, travels=False)
    assert not found.shared_differs and found.verdict.status is C3Status.ATTRIBUTED


suspects = st.builds(Suspect, position=st.integers(0, 1 << 20), moment=st.integers(0, 40))
views = st.builds(
    ColumnView,
    more=st.integers(0, 1000),
    raised=st.booleans(),
    nondeterministic=st.booleans(),
    qualified=st.booleans(),
    closer=st.booleans(),
    diverges=st.booleans(),
    too_many=st.booleans(),
    suspects=st.lists(suspects, max_size=4).map(tuple),
    shared=st.integers(-(1 << 63), (1 << 63) - 1),
    listing=st.integers(-(1 << 63), (1 << 63) - 1),
)


@given(views)
def test_a_view_survives_the_gather(view: ColumnView) -> None:
    assert len(view.encode()) == VIEW_WORDS
    assert ColumnView.decode(view.encode()) == view
