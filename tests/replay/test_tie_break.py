"""Who may be blamed by a reference: a pure function of what two peers say of their own."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.consensus.c3 import C3Status
from scout_core.replay.reference import Obstacle
from scout_core.replay.tie_break import Statement, disputed, settle
from scout_core.replay.verdict import PROOF_EXECUTIONS, RecipeVerdict, judge_recipe
from tests.report.results import executions

RANKS = (4, 9)
WORD = st.integers(-(1 << 63), (1 << 63) - 1)
RATIO = st.floats(min_value=0) | st.just(math.inf)
SAID = st.builds(Statement, obstacle=st.sampled_from(Obstacle), signature=st.integers(0, 1), ratio=RATIO)


def judged(*runs: dict[str, dict[int, int]], peers: int = 2) -> RecipeVerdict:
    seen = executions("hidden", peers, *runs)
    return judge_recipe("hidden:3", "hidden", seen, qualified=True, earlier_repeats=PROOF_EXECUTIONS)


OPEN = judged({"output": {1: 9}}, {"output": {1: 9}})


@given(st.tuples(SAID, SAID))
def test_one_is_blamed_exactly_when_both_have_one_reference_and_one_alone_is_outside(said) -> None:
    verdict = settle(OPEN, said, RANKS)
    sound = all(t.obstacle is Obstacle.NONE for t in said) and said[0].signature == said[1].signature
    outside = tuple(t.ratio > 1 for t in said)
    if sound and sum(outside) == 1:
        assert (verdict.status, verdict.bitmap, verdict.basis) == (C3Status.ATTRIBUTED, outside, "reference")
        assert verdict.persistence == "persistent" and verdict.reason is None and verdict.first_surface == "output"
        assert verdict.surfaces["output"].bitmap == outside and not any(verdict.surfaces["invocation"].bitmap)
    else:
        assert verdict.status is C3Status.INCONCLUSIVE and not any(verdict.bitmap) and verdict.basis == "none"
        assert verdict.reason is not None and verdict.reason.startswith("hidden:3: two peers disagree; ")


@given(st.tuples(SAID, SAID, SAID))
def test_a_majority_is_overruled_only_when_everybody_is_inside_of_one_reference(said) -> None:
    before = judged({"output": {1: 9}}, {"output": {1: 9}}, peers=3)
    verdict = settle(before, said, (4, 9, 11))
    sound = all(s.obstacle is Obstacle.NONE for s in said) and len({s.signature for s in said}) == 1
    if sound and all(s.ratio <= 1 for s in said):
        assert verdict.status is C3Status.INCONCLUSIVE and verdict.nondeterministic and not any(verdict.bitmap)
        assert verdict.reason is not None and "rank 9 rounds otherwise" in verdict.reason
    else:
        assert verdict == before and verdict.bitmap == (False, True, False)


@given(st.sampled_from(Obstacle), WORD, RATIO)
def test_testimony_survives_its_row(obstacle: Obstacle, signature: int, ratio: float) -> None:
    said = Statement(obstacle=obstacle, signature=signature, ratio=ratio)
    assert Statement.decode(said.encode()) == said and len(said.encode()) == 3


@pytest.mark.parametrize("obstacle", [o for o in Obstacle if o is not Obstacle.NONE])
def test_each_obstacle_names_the_rank_that_met_it(obstacle: Obstacle) -> None:
    fine = Statement(obstacle=Obstacle.NONE, signature=1, ratio=99.0)
    verdict = settle(OPEN, (fine, Statement(obstacle=obstacle, signature=0, ratio=0.0)), RANKS)
    assert verdict.reason is not None and "rank 9" in verdict.reason and "rank 4" not in verdict.reason


def test_only_what_two_peers_computed_for_good_is_settled() -> None:
    assert disputed(OPEN) == ("output",)
    assert disputed(judged({}, {})) == ()
    assert disputed(judged({"output": {1: 9}}, {})) == ()
    state = {"parameter_state": {1: 9}, "output": {1: 9}}
    assert disputed(judged(state, state)) == ()
    assert disputed(judged({"rng": {0: 2}}, {"rng": {0: 2}})) == ()
    both = {"output": {1: 9}, "input_gradient": {1: 8}}
    assert disputed(judged(both, both)) == ("output", "input_gradient")
    assert disputed(judged({"output": {1: 9}}, {"output": {1: 9}}, peers=3)) == ("output",)
    assert disputed(judged(state, state, peers=3)) == ()
    halves = {"output": {1: 9, 3: 9}}
    assert disputed(judged(halves, halves, peers=4)) == ()
