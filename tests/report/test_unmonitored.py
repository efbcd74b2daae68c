"""A check that broke off: only a strict minority that stayed away is named."""

import pytest

from scout_core.peers import PeerGroup
from scout_core.replay.schedule import Plan
from scout_core.report.fault_report import FaultKind
from scout_core.report.unmonitored import absent_ranks, unmonitored_report

PEERS = PeerGroup(ranks=(2, 5, 8, 11), rank=2, control=None, data=None)
PLAN = Plan(step=30, ordinal=3, recipes=())


def test_one_that_did_not_come_is_named_and_the_others_are_cleared() -> None:
    report = unmonitored_report(PLAN, PEERS, (8,), "RuntimeError: timed out")
    assert (report.kind, report.ranks, report.status, report.severity) == (
        FaultKind.COLLECTIVE_DESYNC, (8,), "Attributed", "warning",
    )  # fmt: skip
    assert report.exonerating == {"present_ranks": [2, 5, 11]} and report.recommended_action == "observe"
    assert report.message.startswith("rank 8 did not come to the check after step 30") and report.step == 30


@pytest.mark.parametrize("missing", [(), (5, 8), (2, 5, 8)])
def test_nobody_half_or_most_name_nobody_and_the_error_is_told(missing: tuple[int, ...]) -> None:
    report = unmonitored_report(PLAN, PEERS, missing, "RuntimeError: timed out")
    assert (report.ranks, report.status, report.scope, report.exonerating) == ((), "Inconclusive", "group", {})
    assert "checks are off from now on: RuntimeError: timed out" in report.message
    assert report.evidence["missing_ranks"] == list(missing)


def test_a_rank_without_peers_misses_nobody() -> None:
    assert absent_ranks(PEERS, PLAN) == ()
