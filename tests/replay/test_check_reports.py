"""Which reports a check's result deserves, and whom they name."""

import json

import pytest

from scout_core.consensus.readiness import Reason
from scout_core.replay.result import Detail
from scout_core.report.check_reports import reports_of
from scout_core.report.fault_report import FaultKind
from tests.report.results import result_of

CLEAN = [{}]
STATE_AND_LAYER = {
    "hidden:1": [{"parameter_state": {2: 9}, "output": {2: 9}}] * 2,
    "state": [{"parameter_state": {2: 9}}] * 2,
}


def only(result, **more):
    reports = reports_of(result, **more)
    assert len(reports) == 1, [r.message for r in reports]
    return reports[0]


def test_a_clean_check_reports_nothing() -> None:
    assert reports_of(result_of({"embedding": CLEAN, "hidden:0": CLEAN, "state": CLEAN})) == []


def test_corruption_that_lasts_is_fatal_names_rank_and_place_and_clears_the_others() -> None:
    result = result_of({"hidden:1": [{"output": {1: 9}}] * 2}, ranks=(4, 5, 6, 7))
    report = only(result, hosts=("a", "b", "c", "d"), devices=("cuda:0", "cuda:1", "cuda:2", "cuda:3"))
    assert (report.kind, report.severity, report.status, report.basis) == (
        FaultKind.SDC,
        "fatal",
        "Attributed",
        "majority",
    )
    assert (report.ranks, report.hosts, report.devices) == ((5,), ("b",), ("cuda:1",))
    assert report.surface == "hidden:1/output" and report.step == 10
    assert report.exonerating == {"agreeing_ranks": [4, 6, 7]}
    assert report.recommended_action == "restart_excluding" and "rank 5" in report.message
    assert report.evidence["signatures"]["output"] == [f"{word:016x}" for word in (1, 9, 1, 1)]


def test_corruption_that_passes_is_a_warning_to_observe() -> None:
    report = only(result_of({"hidden:1": [{"output": {3: 9}}, {}]}))
    assert (report.kind, report.severity, report.basis, report.ranks) == (FaultKind.SDC, "warning", "self", (3,))
    assert report.recommended_action == "observe" and "intermittent" in report.message


def test_one_fault_seen_on_several_surfaces_is_one_report_that_starts_with_the_state() -> None:
    report = only(result_of(STATE_AND_LAYER))
    assert report.surface == "hidden:1/parameter_state" and report.evidence["also"] == ["state/parameter_state"]
    assert report.ranks == (2,)


def test_faults_of_two_ranks_are_two_reports() -> None:
    result = result_of({"embedding": [{"output": {0: 9}}] * 2, "output": [{"output": {3: 9}}] * 2})
    assert {r.ranks for r in reports_of(result)} == {(0,), (3,)}


def test_the_fatal_one_comes_first() -> None:
    result = result_of({"embedding": [{"output": {0: 9}}, {}], "output": [{"output": {3: 9}}] * 2})
    assert [r.severity for r in reports_of(result)] == ["fatal", "warning"]


@pytest.mark.parametrize(
    ("ranks", "odd"), [((0, 1), {1: 9}), ((0, 1, 2, 3), {2: 9, 3: 9})], ids=["two peers", "half against half"]
)
def test_a_dispute_without_a_majority_blames_nobody(ranks, odd) -> None:
    report = only(result_of({"hidden:0": [{"output": odd}] * 2}, ranks=ranks))
    assert (report.status, report.scope, report.ranks) == ("Inconclusive", "group", ())
    assert report.recommended_action == "stop" and report.exonerating == {}


def test_replicas_that_all_differ_have_drifted_apart_and_no_device_is_blamed() -> None:
    report = only(result_of({"state": [{"parameter_state": {1: 2, 2: 3, 3: 4}}] * 2}))
    assert (report.kind, report.ranks, report.recommended_action) == (FaultKind.REPLICA_DIVERGENCE, (), "stop")


def detail(differing: int, elements: int = 100) -> dict[str, Detail]:
    found = Detail(
        surface="parameter_state",
        tensors=("head.weight",),
        elements=elements,
        differing=(0, 0, differing, 0),
        largest_difference=(0.0, 0.0, 0.25, 0.0),
    )
    return {"state": found}


@pytest.mark.parametrize(
    ("differing", "elements", "kind"),
    [(1, 100, FaultKind.SDC), (80, 100, FaultKind.REPLICA_DIVERGENCE), (1, 1, FaultKind.SDC)],
)
def test_few_changed_elements_are_corruption_and_most_of_them_a_drift(differing, elements, kind) -> None:
    result = result_of({"state": [{"parameter_state": {2: 9}}] * 2}, details=detail(differing, elements))
    report = only(result)
    assert (report.kind, report.ranks) == (kind, (2,))
    assert report.evidence["differing_elements"] == [0, 0, differing, 0] and "head.weight" in report.message


def test_another_learning_rate_on_one_rank_is_a_set_up_that_differs_not_a_bad_device() -> None:
    report = only(result_of({"optimizer": [{"hyperparameters": {1: 9}, "updated_state": {1: 9}}] * 2}))
    assert (report.kind, report.ranks, report.recommended_action) == (FaultKind.REPLICA_DIVERGENCE, (1,), "stop")


@pytest.mark.parametrize("field", ["readiness", "shape", "structure", "step"])
def test_unequal_inputs_are_no_alarm(field: str) -> None:
    reason = Reason(recipe="hidden", field=field, ranks=(1,), message="hidden: differs on rank 1")
    result = result_of({"hidden:0": CLEAN}, inconclusive_reasons=(reason,), complete=False)
    assert reports_of(result) == [] and not result.trustworthy


def test_an_operation_that_does_not_repeat_itself_is_told_once_as_information() -> None:
    report = only(result_of({"hidden:0": [{"output": {0: 2, 1: 3}}, {"output": {0: 4, 2: 5}}]}))
    assert (report.kind, report.severity, report.ranks, report.recommended_action) == (
        FaultKind.NONDETERMINISTIC,
        "info",
        (),
        "continue",
    )


def test_a_value_that_is_no_number_names_the_minority_that_had_it_before_any_reduction() -> None:
    report = only(result_of({"hidden:0": CLEAN}, nonfinite=True, nonfinite_ranks=(3,)))
    assert (report.kind, report.ranks, report.basis, report.severity) == (FaultKind.NUMERIC, (3,), "direct", "warning")
    assert report.exonerating == {"finite_ranks": [0, 1, 2]}


@pytest.mark.parametrize("ranks", [(), (0, 1), (0, 1, 2, 3)])
def test_a_value_that_is_no_number_on_half_of_the_ranks_or_nobodys_own_names_nobody(ranks) -> None:
    result = result_of({"hidden:0": CLEAN}, nonfinite=True, nonfinite_ranks=ranks)
    assert only(result).ranks == () and not result.trustworthy


def test_a_slow_rank_is_a_warning_and_leaves_the_state_trusted() -> None:
    result = result_of(
        {"hidden:0": CLEAN},
        straggler_bitmap=(False, True, False, False),
        straggler_recipes={"hidden:0": (False, True, False, False)},
        times_ms={"hidden:0": (5.0, 15.0, 5.0, 5.0)},
    )
    report = only(result)
    assert (report.kind, report.ranks, report.severity) == (FaultKind.COMPUTE_STRAGGLER, (1,), "warning")
    assert report.evidence["times_ms"] == {"hidden:0": [5.0, 15.0, 5.0, 5.0]} and result.trustworthy


def test_reports_are_strict_json() -> None:
    result = result_of(STATE_AND_LAYER, details={"state": Detail(surface="parameter_state", tensors=("a",))})
    for report in reports_of(result):
        assert json.loads(json.dumps(report.model_dump(mode="json"), allow_nan=False))["kind"] == "sdc"
