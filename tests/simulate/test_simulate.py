"""Synthetic ranks with faults, judged by the code that judges real ones."""

from __future__ import annotations

from typing import Any

import pytest

from scout_core.config import ConfigError
from scout_core.peers import Grid
from scout_core.simulate import Boundary, Report, SimFault, SimModel, simulate


def job(faults: list[dict[str, Any]], *, checks: int = 8, model: dict[str, Any] | None = None, **sizes: int) -> Report:
    given = SimModel(grid=Grid.of_sizes(**sizes), **(model or {}))
    return simulate(given, [SimFault(**fault) for fault in faults], checks=checks)


def answers(report: Report) -> list[tuple[str, Boundary | None]]:
    assert report.false_alarms == ()
    return [(outcome.answer, outcome.boundary if outcome.answer != "hit" else None) for outcome in report.outcomes]


@pytest.mark.parametrize("collective", range(5))
@pytest.mark.parametrize("surface", ["output", "input_gradient", "parameter_gradient", "parameter_state"])
@pytest.mark.parametrize("rank", [0, 13, 23])
def test_a_fault_that_travels_to_all_partners_is_its_own_ranks_alone(rank: int, surface: str, collective: int) -> None:
    fault = {"kind": "corruption", "rank": rank, "surface": surface, "collective": collective}
    report = job([fault], world=24, tp=4, cp=2)
    assert answers(report) == [("hit", None)]


@pytest.mark.parametrize(
    "fault",
    [
        {"recipe": "state", "surface": "parameter_state"},
        {"recipe": "state", "surface": "optimizer_state", "window": 1},
        {"recipe": "optimizer", "surface": "gradient"},
        {"recipe": "optimizer", "surface": "updated_state", "varies": True},
        {"recipe": "embedding", "surface": "output", "varies": True},
        {"recipe": "hidden", "layer": 1, "surface": "output", "chance": 0.7, "step": 3},
    ],
)
def test_every_surface_of_the_catalog_is_found_on_its_rank(fault: dict[str, Any]) -> None:
    assert answers(job([{"kind": "corruption", "rank": 5, **fault}], world=12, tp=2, checks=12)) == [("hit", None)]


@pytest.mark.parametrize(
    ("fault", "sizes", "boundary"),
    [
        ({"kind": "common_mode"}, {"world": 8}, Boundary.COMMON_MODE),
        ({"kind": "transient"}, {"world": 8}, Boundary.ONE_SHOT),
        ({"kind": "corruption"}, {"world": 2}, Boundary.TWO_PEERS),
        ({"kind": "corruption"}, {"world": 4, "pp": 4}, Boundary.NO_PEERS),
        ({"kind": "corruption", "step": 5, "until": 6, "layer": 1}, {"world": 4}, Boundary.NOT_SAMPLED),
        ({"kind": "corruption", "surface": "parameter_state"}, {"world": 4, "dp_shard": 4}, Boundary.SINGLE_OWNER),
        ({"kind": "corruption", "chance": 1e-9}, {"world": 4}, Boundary.INTERMITTENT),
        ({"kind": "slow_endpoint", "rank": 1}, {"world": 4}, Boundary.ONE_GROUP),
        ({"kind": "straggler", "factor": 1.1}, {"world": 4}, Boundary.THRESHOLD),
    ],
)
def test_what_lies_beyond_the_contract_is_said_to(
    fault: dict[str, Any], sizes: dict[str, int], boundary: Boundary
) -> None:
    report = job([fault], **sizes)
    assert answers(report) in ([("miss", boundary)], [("noticed", boundary)])
    assert report.sound


def test_shard_peers_are_compared_after_gathering() -> None:
    assert answers(job([{"kind": "corruption", "rank": 2}], world=4, dp_shard=4)) == [("hit", None)]


def test_half_of_the_peers_are_no_majority_and_fewer_are() -> None:
    both = [{"kind": "corruption", "rank": rank} for rank in (0, 3)]
    assert answers(job(both, world=4)) == [("noticed", Boundary.NO_MAJORITY)] * 2
    assert answers(job(both, world=5)) == [("hit", None)] * 2


def test_of_two_faults_in_one_row_the_first_is_named_and_hides_the_second() -> None:
    first = {"kind": "corruption", "rank": 4, "collective": 0}
    second = {"kind": "corruption", "rank": 5, "collective": 2}
    assert answers(job([first, second], world=16, tp=4)) == [("hit", None), ("noticed", Boundary.SAME_ROW)]


def test_a_fault_from_the_first_check_on_does_not_hide_a_later_one_as_nondeterministic() -> None:
    first = {"kind": "corruption", "rank": 5, "surface": "parameter_state"}
    later = {"kind": "corruption", "rank": 14, "surface": "output", "step": 8}
    report = job([first, later], world=20, tp=4, checks=12, model={"layers": 1})
    assert answers(report) == [("hit", None), ("hit", None)]


def test_a_rank_that_is_not_ready_stops_its_whole_cohort_and_no_other() -> None:
    missing = {"kind": "not_ready", "rank": 1}
    beside = {"kind": "corruption", "rank": 2}
    report = job([missing, beside], world=12, tp=4)
    assert answers(report) == [("hit", None), ("miss", Boundary.NOT_READY)]
    elsewhere = {"kind": "corruption", "rank": 13, "layer": 2}
    assert answers(job([missing, elsewhere], world=24, tp=4, pp=2)) == [("hit", None), ("hit", None)]


@pytest.mark.parametrize("kind", ["raises", "desync", "drift", "nondeterministic", "straggler", "slow_endpoint"])
def test_other_faults_are_told_for_what_they_are(kind: str) -> None:
    assert answers(job([{"kind": kind, "rank": 9}], world=24, tp=4, cp=2)) == [("hit", None)]


def test_a_slow_link_or_job_names_nobody() -> None:
    for fault in ({"kind": "slow_link", "rank": 3, "other_rank": 2}, {"kind": "slow_job"}):
        assert answers(job([fault], world=24, tp=4, cp=2)) == [("hit", None)]


def test_more_collectives_than_words_of_evidence_name_the_cohort() -> None:
    late = {"kind": "corruption", "rank": 5, "surface": "parameter_gradient", "collective": 12}
    report = job([late], world=12, tp=4, model={"forward": 8, "backward": 8})
    assert answers(report) == [("noticed", Boundary.COHORT)]


def test_an_unexplained_miss_is_not_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scout_core.simulate.checks.travel", lambda *given: {})
    report = job([{"kind": "corruption", "rank": 2}], world=4)
    assert answers(report) == [("miss", None)]
    assert not report.sound


def test_blame_on_a_healthy_rank_is_a_false_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SimFault(kind="corruption", rank=2)
    monkeypatch.setattr("scout_core.simulate.cohort.Cohort.place", lambda self, rank: (0, 1))
    report = simulate(SimModel(grid=Grid.of_sizes(world=4)), [real], checks=2)
    assert {(what, rank) for _, what, rank in report.false_alarms} == {("hidden:0", 1)}
    assert not report.sound


def test_a_healthy_job_is_quiet_in_every_cohort() -> None:
    model = SimModel(grid=Grid.of_sizes(world=96, tp=4, pp=2, ep=2))
    report = simulate(model, [], healthy=True)
    assert (report.sound, report.healthy_cohorts, report.outcomes) == (True, 2, ())
    assert (report.groups.peer_groups, report.groups.peers) == (16, 6)
    assert (report.groups.cohorts, report.groups.partners) == (12, 8)


def test_what_a_rank_sends_does_not_grow_with_the_job() -> None:
    small = simulate(SimModel(grid=Grid.of_sizes(world=8, tp=2)), []).cost
    large = simulate(SimModel(grid=Grid.of_sizes(world=131_072, tp=8, pp=16, cp=2, ep=8)), []).cost
    assert small.messages == large.messages <= 4
    assert large.bytes_per_surface <= 64
    assert large.bytes <= small.bytes < 2048


def test_the_largest_job_finds_its_faults() -> None:
    sizes = {"world": 131_072, "tp": 8, "pp": 16, "cp": 2, "ep": 8}
    faults = [
        {"kind": "corruption", "rank": 70_001, "layer": 17, "collective": 1},
        {"kind": "corruption", "rank": 1234, "recipe": "state", "surface": "optimizer_state"},
        {"kind": "slow_endpoint", "rank": 4242},
    ]
    assert answers(job(faults, checks=4, **sizes)) == [("hit", None)] * 3


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"kind": "corruption", "rank": 8}, "ranks 0 to 7"),
        ({"kind": "corruption", "layer": 9}, "does not run hidden:9"),
        ({"kind": "corruption", "rank": 7, "recipe": "embedding"}, "does not run embedding, which is on another stage"),
    ],
)
def test_faults_at_places_that_the_job_does_not_have(fault: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        job([fault], world=8, pp=2)
