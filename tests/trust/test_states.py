"""Trust states and recovery selection: the contract's tables, and no path to a contaminated checkpoint."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
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
    quarantine,
    restarted,
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


class TrustModel(RuleBasedStateMachine):
    """Any order of checks, silent corruption, crashes, restarts and late files.

    The model knows what SCOUT does not: `tainted_from` is the step from which the live state is corrupt. Corruption
    is detected by the first check after it (that is what the checks are for; a check that misses it is outside trust).
    """

    def __init__(self) -> None:
        super().__init__()
        self.book = TrustBook()
        self.step = 0
        self.corrupt = False
        self.tainted: set[int] = set()
        self.captured: set[int] = set()
        self.invisible: set[int] = set()
        self.clean_cycles_after: dict[int, int] = {}

    @initialize(dense=st.booleans())
    def start(self, dense: bool) -> None:
        self.rules = DENSE if dense else DYNAMIC

    @rule(part=st.sampled_from([CATALOG, *[frozenset({name}) for name in sorted(CATALOG)]]), slow=st.booleans())
    def check(self, part: frozenset[str], slow: bool) -> None:
        self.step += 1
        sees = self.rules.dense or part == CATALOG or not self.corrupt
        clean = Outcome.STRAGGLER if slow else Outcome.CLEAN
        outcome = Outcome.SDC if self.corrupt and sees else clean
        self._advance(outcome, part)

    @rule()
    def inconclusive(self) -> None:
        self.step += 1
        self._advance(Outcome.INCONCLUSIVE, frozenset())

    def _advance(self, outcome: Outcome, part: frozenset[str]) -> None:
        # under the dynamic rule a partial check may miss corruption of what it does not look at
        covers = not self.corrupt or outcome is not Outcome.CLEAN
        before = self.book
        self.book, change = advance(
            self.book, self.rules, Boundary(step=self.step, outcome=outcome, recipes=part if covers else frozenset())
        )
        assert change.capture == outcome.accepts
        if change.capture:
            self.captured.add(self.step)
            if self.corrupt:
                self.tainted.add(self.step)
        if not outcome.accepts:
            assert self.book.verified() == before.verified()

    @rule()
    def corrupts(self) -> None:
        self.corrupt = True

    @rule(delay=st.booleans())
    def visibility(self, delay: bool) -> None:
        self.invisible = set(self.captured) if delay else set()

    @rule()
    def restart(self) -> None:
        decision = self.choose("sdc")
        self.book = restarted(self.book)
        self.corrupt = False
        if decision.available and decision.step is not None:
            self.step = max(self.step, decision.step)

    @rule()
    def load_fails_twice(self) -> None:
        newest = self.book.verified()[:1]
        for step in newest:
            self.book = quarantine(self.book, step)

    def choose(self, kind: Any, **more: Any) -> RecoveryDecision:
        found = [
            have(
                step,
                state,
                "gemini" if state is TrustState.LATEST_GEMINI else "durable",
                complete=step not in self.invisible,
            )
            for step, state in self.book.states.items()
        ]
        return select_recovery(failure(kind, step=self.step, **more), found)

    @invariant()
    def never_contaminated(self) -> None:
        for kind in ("sdc", "inaccessible", "hang"):
            decision = self.choose(kind)
            if decision.available:
                assert decision.mode == "RECOVERY_VERIFIED"
                assert decision.step not in self.tainted
                assert decision.step not in self.invisible
                assert self.book.states[decision.step or 0] is TrustState.RECOVERY_VERIFIED
            else:
                assert decision.mode == "RESTART_FROM_SCRATCH"


TestTrustModel = TrustModel.TestCase
TestTrustModel.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


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
