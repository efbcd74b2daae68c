"""Trust states and recovery selection: the contract's tables. That no path leads to a bad one: `test_model.py`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from scout_core.trust.decision import RecoveryDecision
from scout_core.trust.selection import Available, Failure, select_recovery
from scout_core.trust.states import (
    Boundary,
    Outcome,
    TrustBook,
    TrustRules,
    TrustState,
    advance,
    worst,
)

CATALOG = frozenset({"embedding", "hidden:0", "output"})
DENSE = TrustRules()
DYNAMIC = TrustRules(dense=False, catalog=CATALOG)


def walk(rules: TrustRules, *boundaries: tuple[int, Outcome, frozenset[str]]) -> TrustBook:
    book = TrustBook()
    for step, outcome, recipes in boundaries:
        book, _ = advance(book, rules, Boundary(step=step, outcome=outcome, recipes=recipes))
    return book


def have(
    step: int, state: TrustState = TrustState.RECOVERY_VERIFIED, source: Any = "durable", **more: Any
) -> Available:
    values: dict[str, Any] = {"run_id": "r", "topology_digest": "t", "checkpoint_id": f"c{step}", **more}
    return Available(source=source, step=step, state=state, **values)


def failure(kind: Any, **more: Any) -> Failure:
    return Failure(kind=kind, **{"step": 100, "run_id": "r", "topology_digest": "t", **more})


def test_a_dense_check_certifies_at_once() -> None:
    book = walk(DENSE, (10, Outcome.CLEAN, CATALOG), (20, Outcome.STRAGGLER, CATALOG))
    assert book.verified() == (20, 10)


@pytest.mark.parametrize("outcome", [Outcome.SDC, Outcome.INCONCLUSIVE])
def test_a_rejected_boundary_keeps_the_prior_one(outcome: Outcome) -> None:
    book = walk(DENSE, (10, Outcome.CLEAN, CATALOG))
    book, change = advance(book, DENSE, Boundary(step=20, outcome=outcome))
    assert not change.capture and 20 in change.rejected
    assert book.verified() == (10,) and book.latest == 10 and book.states[20] is TrustState.REJECTED


def test_a_dynamic_candidate_waits_for_the_following_cycle() -> None:
    parts = [frozenset({name}) for name in sorted(CATALOG)]
    first = [(i + 1, Outcome.CLEAN, p) for i, p in enumerate(parts)]
    book = walk(DYNAMIC, *first)
    assert book.candidates() == (3,) and book.verified() == ()
    book = walk(DYNAMIC, *first, *[(i + 4, Outcome.CLEAN, p) for i, p in enumerate(parts)])
    assert book.verified() == (3,) and book.candidates() == (6,)


def test_sdc_rejects_the_candidate_and_a_gap_begins_the_cycle_anew() -> None:
    book = walk(DYNAMIC, (1, Outcome.CLEAN, CATALOG), (2, Outcome.SDC, CATALOG), (3, Outcome.CLEAN, CATALOG))
    assert book.states[1] is TrustState.REJECTED and book.verified() == () and book.candidates() == (3,)
    gap = walk(DYNAMIC, (1, Outcome.CLEAN, CATALOG), (2, Outcome.CLEAN, frozenset({"output"})))
    gap, _ = advance(gap, DYNAMIC, Boundary(step=3, outcome=Outcome.INCONCLUSIVE))
    rest = CATALOG - {"output"}
    gap, change = advance(gap, DYNAMIC, Boundary(step=4, outcome=Outcome.CLEAN, recipes=rest))
    assert change.promoted == () and gap.verified() == ()


def test_the_worst_group_decides_for_the_job() -> None:
    assert worst([Outcome.CLEAN, Outcome.STRAGGLER]) is Outcome.STRAGGLER
    assert worst([Outcome.SDC, Outcome.CLEAN]) is Outcome.SDC
    assert worst([Outcome.CLEAN, Outcome.INCONCLUSIVE]) is Outcome.INCONCLUSIVE
    assert worst([]) is Outcome.INCONCLUSIVE


@pytest.mark.parametrize(
    ("kind", "more", "mode", "step"),
    [
        ("sdc", {}, "RECOVERY_VERIFIED", 80),
        ("sdc", {"emergency": "clean"}, "RECOVERY_VERIFIED", 80),
        ("inaccessible", {}, "RECOVERY_VERIFIED", 80),
        ("straggler", {}, "GEMINI", 95),
        ("straggler", {"all_ranks_accessible": False}, "RECOVERY_VERIFIED", 80),
        ("hang", {"emergency": "clean"}, "GEMINI", 95),
        ("hang", {"emergency": "clean", "all_ranks_accessible": False}, "RECOVERY_VERIFIED", 80),
        ("hang", {"emergency": "incomplete"}, "RECOVERY_VERIFIED", 80),
        ("uncertain", {"emergency": "sdc"}, "RECOVERY_VERIFIED", 80),
        ("uncertain", {}, "RECOVERY_VERIFIED", 80),
    ],
)
def test_the_contracts_table(kind: str, more: dict[str, Any], mode: str, step: int) -> None:
    found = [have(80), have(60), have(95, TrustState.LATEST_GEMINI, "gemini"), have(90, TrustState.CANDIDATE)]
    decision = select_recovery(failure(kind, **more), found)
    assert (decision.mode, decision.step) == (mode, step)
    assert decision.available and decision.lost_steps == 100 - step


@pytest.mark.parametrize(
    "bad",
    [
        {"run_id": "other"},
        {"topology_digest": "other"},
        {"complete": False},
        {"load_failures": 2},
        {"state": TrustState.QUARANTINED},
        {"state": TrustState.REJECTED},
        {"step": 5000},
    ],
)
def test_what_cannot_be_trusted_is_passed_over(bad: dict[str, Any]) -> None:
    newest = have(**{"step": 90, **bad})
    decision = select_recovery(failure("sdc"), [newest, have(40)])
    assert decision.step == 40
    alone = select_recovery(failure("sdc"), [newest])
    assert alone.mode == "RESTART_FROM_SCRATCH" and alone.lost_steps == 100 and not alone.available
    assert f"step {newest.step}" in alone.reason


def test_f19_no_checkpoint_says_scratch_and_a_spent_budget_says_stop() -> None:
    first = select_recovery(failure("sdc", step=5, restarts_used=0, restart_budget=1), [])
    assert first.mode == "RESTART_FROM_SCRATCH" and first.lost_steps == 5
    again = select_recovery(failure("sdc", step=5, restarts_used=1, restart_budget=1), [have(3)])
    assert again.mode == "STOP" and not again.available


def test_a_decision_survives_json_and_refuses_the_unknown() -> None:
    decision = select_recovery(failure("sdc", exclude_hosts=("h2",), exclude_ranks=(2,)), [have(40)])
    assert RecoveryDecision.model_validate_json(decision.model_dump_json()) == decision
    values = json.loads(decision.model_dump_json())
    for change in ({"more": 1}, {"schema_version": 2}, {"step": "40"}, {"step": -1}):
        with pytest.raises(ValidationError):
            RecoveryDecision.model_validate_json(json.dumps({**values, **change}))


@settings(max_examples=300, deadline=None)
@given(
    kind=st.sampled_from(["sdc", "inaccessible", "straggler", "hang", "uncertain"]),
    emergency=st.sampled_from([None, "clean", "incomplete", "unavailable", "sdc"]),
    reachable=st.booleans(),
    found=st.lists(
        st.builds(
            have,
            st.integers(0, 120),
            st.sampled_from(TrustState),
            st.sampled_from(["gemini", "durable"]),
            complete=st.booleans(),
            load_failures=st.integers(0, 3),
            run_id=st.sampled_from(["r", "x"]),
        ),
        max_size=8,
    ),
)
def test_only_the_table_opens_gemini(kind: Any, emergency: Any, reachable: bool, found: list[Available]) -> None:
    decision = select_recovery(failure(kind, emergency=emergency, all_ranks_accessible=reachable), found)
    may = reachable and (kind == "straggler" or (kind in ("hang", "uncertain") and emergency == "clean"))
    if decision.mode == "GEMINI":
        assert may
    if decision.available:
        chosen = [a for a in found if (a.step, a.source) == (decision.step, decision.source)]
        assert any(
            a.complete
            and a.run_id == "r"
            and a.load_failures < 2
            and (decision.mode == "GEMINI" or a.state is TrustState.RECOVERY_VERIFIED)
            for a in chosen
        )
