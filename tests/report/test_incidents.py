"""One fault, one incident: the same id while it lasts, a new one when it returns."""

import itertools
from typing import Any

import pytest

from scout_core.report.check_reports import reports_of
from scout_core.report.incidents import IncidentBook
from tests.report.results import result_of

BAD = [{"output": {1: 9}}] * 2
CLEAN = [{}]


def tell(book: IncidentBook, step: int, recipes, **fields):
    result = result_of(recipes, step=step, **fields)
    return book.assign(reports_of(result), result)


def ids(reports) -> list[str]:
    return [report.incident_id for report in reports]


def test_a_fault_that_goes_on_keeps_its_id_and_its_first_step() -> None:
    book = IncidentBook()
    first, second = tell(book, 10, {"hidden:0": BAD}), tell(book, 20, {"hidden:0": BAD})
    assert ids(first) == ids(second)
    assert (second[0].step, second[0].first_seen_step) == (20, 10)


def test_a_fault_that_returns_is_a_second_incident() -> None:
    book = IncidentBook()
    first = tell(book, 10, {"hidden:0": BAD})
    assert tell(book, 20, {"hidden:0": CLEAN}) == []
    second = tell(book, 30, {"hidden:0": BAD})
    assert ids(first) != ids(second) and second[0].first_seen_step == 30


def test_a_check_that_covers_other_layers_does_not_close_it() -> None:
    book = IncidentBook()
    first = tell(book, 10, {"hidden:0": BAD})
    tell(book, 20, {"hidden:1": CLEAN})
    assert ids(first) == ids(tell(book, 30, {"hidden:0": BAD}))


def test_a_wrong_weight_is_one_incident_whichever_recipe_shows_it() -> None:
    book = IncidentBook()
    weight = [{"parameter_state": {1: 9}}] * 2
    first = tell(book, 10, {"hidden:0": weight, "state": weight})
    second = tell(book, 20, {"hidden:1": CLEAN, "state": weight})
    third = tell(book, 30, {"hidden:0": weight, "state": weight})
    assert len(first) == len(second) == 1 and ids(first) == ids(second) == ids(third)
    assert tell(book, 40, {"hidden:0": CLEAN, "state": CLEAN}) == []
    assert ids(tell(book, 50, {"hidden:0": weight})) != ids(first)


def test_faults_of_two_ranks_are_two_incidents() -> None:
    book = IncidentBook()
    reports = tell(book, 10, {"hidden:0": BAD, "embedding": [{"output": {3: 9}}] * 2})
    assert len(set(ids(reports))) == 2


@pytest.mark.parametrize(
    ("fields", "quiet"),
    [({"nonfinite": True}, 1), ({"straggler_bitmap": (True, False, False, False), "times_ms": {}}, 2)],
    ids=["numbers", "slowness"],
)
def test_numbers_and_slowness_close_and_reopen_too(fields: dict[str, Any], quiet: int) -> None:
    book, steps = IncidentBook(), itertools.count(10, 10)

    def seen() -> list[str]:
        return ids(tell(book, next(steps), {"hidden:0": CLEAN}, **fields))

    def clean(times: int) -> None:
        for _ in range(times):
            assert tell(book, next(steps), {"hidden:0": CLEAN}) == []

    first = seen()
    for pause in range(quiet):  # too short to end it
        clean(pause)
        assert seen() == first
    clean(quiet)
    assert seen() != first


def test_slow_collectives_stay_one_incident_while_any_group_is_slow() -> None:
    """Who is healthy may be unclear for some checks, in which nobody is named."""
    named = {
        "finding": "rank", "rank": 2, "host": None, "resource": None, "confidence": 1.0, "decision": "observe",
        "supporting": [{"ranks": [0, 2]}, {"ranks": [1, 2]}], "reason": "rank 2 is the only rank in all slow groups",
    }  # fmt: skip
    open_, book = {**named, "finding": "no_healthy_group", "rank": None}, IncidentBook()
    (first,) = ids(tell(book, 10, {"hidden:0": CLEAN}, cross_pg_result=named))
    for step in (20, 30, 40):
        assert tell(book, step, {"hidden:0": CLEAN}, cross_pg_result=open_) == []
    assert ids(tell(book, 50, {"hidden:0": CLEAN}, cross_pg_result=named)) == [first]
    for step in (60, 70):
        tell(book, step, {"hidden:0": CLEAN})
    assert ids(tell(book, 80, {"hidden:0": CLEAN}, cross_pg_result=named)) != [first]


def test_peers_that_saw_the_same_give_the_same_ids() -> None:
    one, other = IncidentBook(), IncidentBook()
    assert ids(tell(one, 10, {"hidden:0": BAD})) == ids(tell(other, 10, {"hidden:0": BAD}))
