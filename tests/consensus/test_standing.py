"""Readiness of a table of ranks: two gathers, after which all of them decide alike."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scout_core.consensus.readiness import (
    RankContract,
    Readiness,
    ReadinessVerdict,
    RecipeContract,
    encode,
    judge_readiness,
)
from scout_core.consensus.standing import GROUP_WORDS, join_standings, judge_groups, standing_of, statement

ROWS, COLUMNS = 3, 2
READY = RecipeContract(readiness=Readiness.READY, identity=11, capture_step=7, structure=22, shape=33)
USUAL = {"step": 7, "check_index": 2, "collective_digest": 5, "hidden": READY, "output": READY}
CHANGES: list[dict[str, object]] = [
    {},
    {"step": 8},
    {"check_index": 3},
    {"collective_digest": 6},
    {"hidden": RecipeContract(readiness=Readiness.NO_CAPTURE)},
    {"hidden": RecipeContract(readiness=Readiness.READY, identity=12, capture_step=7, structure=22, shape=33)},
    {"output": RecipeContract(readiness=Readiness.READY, identity=11, capture_step=7, structure=23, shape=33)},
    {"output": RecipeContract(readiness=Readiness.READY, identity=11, capture_step=7, structure=22, shape=34)},
    {"groups": [9, 1]},
]
Changes = dict[tuple[int, int], dict[str, object]]


def decide(changes: Changes) -> dict[tuple[int, int], ReadinessVerdict]:
    """What each rank (row, column) of the table decides; rank numbers are 2 * row + column."""
    said, groups = {}, {}
    for place in itertools.product(range(ROWS), range(COLUMNS)):
        values = {**USUAL, "groups": [9, 4], **changes.get(place, {})}
        recipes = {name: values[name] for name in ("hidden", "output")}
        header = {name: values[name] for name in ("step", "check_index", "collective_digest")}
        said[place] = RankContract(seed=1, recipes=recipes, **header)  # type: ignore[arg-type]
        groups[place] = [*values["groups"], *[0] * (GROUP_WORDS - 2)]  # type: ignore[misc]
    standings = [
        standing_of(
            [statement(said[row, c]) for c in range(COLUMNS)],
            [groups[row, c] for c in range(COLUMNS)],
            [row * COLUMNS + c for c in range(COLUMNS)],
        )
        for row in range(ROWS)
    ]
    found = {}
    for row, column in said:
        ranks = [r * COLUMNS + column for r in range(ROWS)]
        own = judge_readiness([encode(said[r, column]) for r in range(ROWS)], ranks)
        found[row, column] = join_standings(own, standings, ranks)
    return found


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.tuples(st.integers(0, ROWS - 1), st.integers(0, COLUMNS - 1)), st.sampled_from(CHANGES), max_size=4
    )
)
def test_all_ranks_of_a_table_run_the_same_and_explain_together(changes: Changes) -> None:
    found = decide(changes).values()
    assert len({verdict.runnable for verdict in found}) == 1
    assert len({str(verdict.sizes) for verdict in found}) == 1, "each source's sizes are known to all alike"
    explained = {any(reason.field == "collective_digest" for reason in verdict.reasons) for verdict in found}
    assert len(explained) == 1, "an explanation is a collective of all of them"


def test_a_healthy_table_runs_everything_and_has_nothing_to_say() -> None:
    for verdict in decide({}).values():
        assert verdict.runnable == ("hidden", "output") and verdict.reasons == ()


@pytest.mark.parametrize(
    ("change", "runnable", "field"),
    [
        ({"step": 8}, (), "step"),
        ({"collective_digest": 6}, (), "collective_digest"),
        ({"groups": [9, 1]}, (), "collective_digest"),
        ({"hidden": RecipeContract(readiness=Readiness.NO_CAPTURE)}, ("output",), "partner"),
        (CHANGES[5], ("output",), "partner"),
        (CHANGES[7], ("hidden", "output"), None),
    ],
)
def test_a_column_hears_what_happened_in_the_one_beside_it(
    change: dict[str, object], runnable: tuple[str, ...], field: str | None
) -> None:
    """Rank 3 is odd, in row 1 of column 1; column 0 learns of it through rank 2, its partner."""
    verdict = decide({(1, 1): change})[0, 0]
    assert verdict.runnable == runnable
    assert [(reason.field, reason.ranks) for reason in verdict.reasons] == ([] if field is None else [(field, (2,))])


def test_groups_are_compared_among_those_who_know_them() -> None:
    words = [[9, 4, 7, 1], [9, 4, 0, 0], [7, 2, 9, 4]]
    reason = judge_groups(words, (10, 11, 12))
    assert reason is not None and reason.ranks == (10, 12) and reason.field == "collective_digest"
    assert judge_groups(words[:2], (10, 11)) is None
    assert judge_groups([[9, 4], [9, 5], [9, 4]], (1, 2, 3)).ranks == (2,)  # type: ignore[union-attr]
