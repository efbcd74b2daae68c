"""What may run at a check, decided from the rows of all peers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.consensus.readiness import (
    RECIPE_CLASSES,
    ROW_WORDS,
    RankContract,
    Readiness,
    RecipeContract,
    encode,
    judge_readiness,
)

READY = RecipeContract(readiness=Readiness.READY, identity=11, capture_step=7, structure=22, shape=33)
HEADER = {"step": 8, "check_index": 3, "collective_digest": 99}


def contract(**slots: RecipeContract) -> RankContract:
    return RankContract(step=7, check_index=2, collective_digest=5, seed=1, recipes=slots)


def judge(contracts, ranks=None):
    return judge_readiness([encode(c) for c in contracts], ranks or range(len(contracts)))


def with_one(size: int, odd: int, changed: RankContract, usual: RankContract) -> list[RankContract]:
    return [changed if position == odd else usual for position in range(size)]


def test_peers_alike_run_everything_due() -> None:
    verdict = judge([contract(hidden=READY, state=READY)] * 4)
    assert verdict.runnable == ("hidden", "state")
    assert verdict.reasons == ()


def test_seeds_are_handed_on_by_position() -> None:
    verdict = judge([replace(contract(hidden=READY), seed=seed) for seed in (5, -6, (1 << 64) - 1)])
    assert verdict.seeds == (5, -6, -1)


@pytest.mark.parametrize("field", HEADER)
@pytest.mark.parametrize("odd", range(4))
def test_a_header_field_that_differs_stops_everything_and_names_the_rank(field: str, odd: int) -> None:
    usual = contract(hidden=READY, optimizer=READY)
    verdict = judge(with_one(4, odd, replace(usual, **{field: HEADER[field]}), usual), ranks=(10, 20, 30, 40))
    assert verdict.runnable == ()
    assert [(r.recipe, r.field, r.ranks) for r in verdict.reasons] == [("check", field, ((10, 20, 30, 40)[odd],))]
    assert f"rank {(10, 20, 30, 40)[odd]}" in verdict.reasons[0].message and field in verdict.reasons[0].message


@pytest.mark.parametrize("field", ["identity", "capture_step", "structure"])
@pytest.mark.parametrize("name", RECIPE_CLASSES)
def test_a_slot_field_that_differs_stops_that_recipe_only(name: str, field: str) -> None:
    usual = contract(**dict.fromkeys(RECIPE_CLASSES, READY))
    slots = {**usual.recipes, name: replace(READY, **{field: 77})}
    verdict = judge(with_one(5, 3, replace(usual, recipes=slots), usual))
    assert set(verdict.runnable) == set(RECIPE_CLASSES) - {name}
    assert [(r.recipe, r.field, r.ranks) for r in verdict.reasons] == [(name, field, (3,))]


def test_another_shape_is_replayed_but_says_so() -> None:
    usual = contract(hidden=READY)
    verdict = judge(with_one(4, 1, contract(hidden=replace(READY, shape=34)), usual))
    assert verdict.runnable == ("hidden",)
    assert [(r.recipe, r.field, r.ranks) for r in verdict.reasons] == [("hidden", "shape", (1,))]


def test_another_shape_on_top_of_another_structure_is_not_replayed() -> None:
    usual = contract(hidden=READY)
    verdict = judge(with_one(4, 1, contract(hidden=replace(READY, shape=34, structure=1)), usual))
    assert verdict.runnable == ()
    assert verdict.reasons[0].field == "structure"


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (Readiness.NO_CAPTURE, "captured no invocation"),
        (Readiness.FAILED, "failed while preparing"),
        (Readiness.UNAVAILABLE, "cannot replay"),
        (Readiness.NOT_DUE, "did not schedule"),
    ],
)
def test_a_rank_that_is_not_ready_is_named_with_what_it_lacks(state: Readiness, words: str) -> None:
    usual = contract(hidden=READY, output=READY)
    changed = contract(hidden=RecipeContract(readiness=state), output=READY)
    verdict = judge(with_one(4, 2, changed, usual))
    assert verdict.runnable == ("output",)
    assert [(r.recipe, r.field, r.ranks) for r in verdict.reasons] == [("hidden", "readiness", (2,))]
    assert words in verdict.reasons[0].message and "rank 2" in verdict.reasons[0].message


def test_nobody_ready_names_everybody_alike() -> None:
    verdict = judge([contract(hidden=RecipeContract(readiness=Readiness.UNAVAILABLE))] * 3)
    assert verdict.runnable == ()
    assert verdict.reasons[0].ranks == (0, 1, 2) and "every rank" in verdict.reasons[0].message


def test_a_recipe_that_is_due_nowhere_is_no_reason() -> None:
    verdict = judge([contract()] * 3)
    assert verdict.runnable == () and verdict.reasons == ()


def test_without_a_majority_all_are_named_and_the_groups_are_shown() -> None:
    changed = contract(hidden=replace(READY, structure=1))
    verdict = judge([contract(hidden=READY)] * 2 + [changed] * 2)
    assert verdict.reasons[0].ranks == (0, 1, 2, 3)
    assert "no majority" in verdict.reasons[0].message and "ranks 0, 1; ranks 2, 3" in verdict.reasons[0].message


def test_steps_are_shown_in_words() -> None:
    usual = contract(hidden=READY)
    verdict = judge(with_one(4, 0, replace(usual, step=6), usual))
    assert "(6 against 7)" in verdict.reasons[0].message


def test_a_row_has_one_size_whatever_is_due() -> None:
    rows = [encode(contract(**dict.fromkeys(names, READY))) for names in ((), ("hidden",), RECIPE_CLASSES)]
    assert {len(row) for row in rows} == {ROW_WORDS}


words = st.integers(min_value=-(1 << 63), max_value=(1 << 64) - 1)
recipe_contracts = st.builds(
    RecipeContract,
    readiness=st.sampled_from(Readiness),
    identity=st.integers(0, 1),
    capture_step=st.integers(0, 1),
    structure=st.integers(0, 1),
    shape=st.integers(0, 1),
)
rank_contracts = st.builds(
    RankContract,
    step=st.integers(0, 1),
    check_index=st.just(0),
    seed=words,
    recipes=st.dictionaries(st.sampled_from(RECIPE_CLASSES), recipe_contracts),
)
jobs = st.lists(rank_contracts, min_size=1, max_size=6)


@given(words, words)
def test_any_64_bit_word_fits_a_row(digest: int, seed: int) -> None:
    row = encode(RankContract(step=0, check_index=0, collective_digest=digest, seed=seed, recipes={}))
    assert all(-(1 << 63) <= word < 1 << 63 for word in row)
    assert (row[3] - digest) % (1 << 64) == 0 and (row[4] - seed) % (1 << 64) == 0


@given(jobs, st.randoms())
def test_order_of_peers_changes_nothing_but_the_order(contracts, random) -> None:
    ranks = list(range(len(contracts)))
    paired = list(zip(contracts, ranks, strict=True))
    random.shuffle(paired)
    before, after = judge(contracts), judge([c for c, _ in paired], [r for _, r in paired])
    assert before.runnable == after.runnable
    assert [(r.recipe, r.field, set(r.ranks)) for r in before.reasons] == [
        (r.recipe, r.field, set(r.ranks)) for r in after.reasons
    ]


@given(jobs)
def test_only_what_every_peer_has_alike_runs_and_the_rest_has_a_reason(contracts) -> None:
    verdict = judge(contracts)
    slots = [{name: c.recipes.get(name, RecipeContract()) for name in RECIPE_CLASSES} for c in contracts]
    for name in verdict.runnable:
        kinds = {(s[name].readiness, s[name].identity, s[name].capture_step, s[name].structure) for s in slots}
        assert len(kinds) == 1 and slots[0][name].readiness is Readiness.READY
    if not any(reason.recipe == "check" for reason in verdict.reasons):
        due = {name for s in slots for name in s if s[name].readiness is not Readiness.NOT_DUE}
        assert due - set(verdict.runnable) <= {reason.recipe for reason in verdict.reasons}
    for reason in verdict.reasons:
        assert reason.ranks and set(reason.ranks) <= set(range(len(contracts)))
