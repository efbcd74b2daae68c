"""Which incident is open, what ends it, and what is kept back while it is."""

from __future__ import annotations

from typing import Any

import pytest

from scout_core.oob.incidents import CLAIM_S, LAUNCHER, Incidents


def report(ranks: list[int], kind: str = "process_stall", incident: str = "a") -> dict[str, Any]:
    return {"kind": kind, "ranks": ranks, "incident_id": incident}


def noted(rank: int, *records: dict[str, Any]) -> Incidents:
    incidents = Incidents(rank)
    for record in records:
        incidents.note(record)
    return incidents


def test_the_first_cause_stays_open_and_only_deaths_are_told_beside_it() -> None:
    incidents = noted(0, report([2]), report([0], "process_exit", "b"))
    assert incidents.open == report([2])
    assert incidents.keep_back("process_stall", [1], 0.0) and incidents.keep_back("collective_desync", [3], 0.0)
    assert not incidents.keep_back("process_exit", [3], 0.0) and incidents.keep_back("process_exit", [0], 0.0)


def test_a_named_rank_that_goes_on_ends_its_incident_for_all() -> None:
    named, other = noted(2, report([2])), noted(0, report([2]))
    assert named.progressed(failing=False) and named.take_ended() == report([2])
    assert not other.progressed(failing=False) and other.take_ended() is None, "the named rank is still held up"
    other.over("a")
    assert other.take_ended() == report([2])
    assert not other.keep_back("process_stall", [2], 0.0), "a second one is reported"


def test_a_rank_that_hears_of_the_end_goes_on_itself_first() -> None:
    """Until then it would judge the old calls once more."""
    other = noted(0, report([2]))
    other.over("a")
    assert other.take_ended() is None and other.keep_back("process_stall", [2], 0.0)
    other.progressed(failing=False)
    assert other.take_ended() is not None


def test_the_end_of_another_incident_ends_nothing() -> None:
    other = noted(0, report([2]))
    other.progressed(failing=False)
    other.over("b")
    assert other.take_ended() is None


@pytest.mark.parametrize(("kind", "ranks"), [("collective_hang", []), ("process_exit", [2])])
def test_without_a_rank_that_could_go_on_any_real_progress_ends_it(kind: str, ranks: list[int]) -> None:
    incidents = noted(0, report(ranks, kind))
    assert not incidents.progressed(failing=True) and incidents.take_ended() is None, "teardown is no recovery"
    assert not incidents.progressed(failing=False) and incidents.take_ended() is not None


def test_a_claim_is_believed_until_its_observer_must_have_died() -> None:
    incidents = Incidents(0)
    incidents.claim("process_exit", [2], 100.0)
    assert incidents.keep_back("process_exit", [2], 100.0 + CLAIM_S / 2)
    assert not incidents.keep_back("process_exit", [2], 100.0 + CLAIM_S)
    assert not incidents.keep_back("process_exit", [1], 100.0)
    incidents.note(report([2], "process_exit"))
    assert incidents.keep_back("process_exit", [2], 1e9), "what was reported stays so"


def test_a_lost_launcher_is_told_once_of_each_rank_and_is_no_incident() -> None:
    told = report([], LAUNCHER) | {"evidence": {"orphans": {"0": 7, "1": 8}}}
    own, other = noted(0, told), noted(2, told)
    assert own.open is None and own.keep_back(LAUNCHER, [], 0.0)
    assert not other.keep_back(LAUNCHER, [], 0.0), "on another host, whose launcher ends later"
    assert not own.keep_back("process_exit", [], 0.0)
    assert not noted(0, report([2])).keep_back(LAUNCHER, [], 0.0), "whoever kills the launcher may do so for a hang"


def test_nothing_open_nothing_ends() -> None:
    incidents = Incidents(0)
    assert not incidents.progressed(failing=False) and incidents.take_ended() is None
