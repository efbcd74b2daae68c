"""From evidence to blame: every branch, and how seldom chance can look like a device."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.consensus.c3 import C3Status
from scout_core.replay.evidence import SURFACES, Flags, Observation
from scout_core.replay.verdict import EXECUTED, PROOF_EXECUTIONS, RecipeVerdict, judge_recipe

HIDDEN = SURFACES["hidden"]
QUIET = Flags()
GOOD = tuple(range(1, len(HIDDEN) + 1))


def words(**changed: int) -> tuple[int, ...]:
    return tuple(changed.get(name, word) for name, word in zip(HIDDEN, GOOD, strict=True))


def run(peers: int = 4, flags: Flags = QUIET, **odd) -> list[Observation]:
    """One execution: `odd` maps `p2` to that peer's words."""
    return [Observation(words=odd.get(f"p{p}", GOOD), flags=flags) for p in range(peers)]


def judge(executions, *, qualified: bool = True, repeats: int = PROOF_EXECUTIONS, **more) -> RecipeVerdict:
    return judge_recipe("hidden:1", "hidden", executions, qualified=qualified, earlier_repeats=repeats, **more)


BAD = words(output=-5, parameter_gradient=-6)
OTHER = words(output=-7, parameter_gradient=-8)


def test_one_execution_that_agrees_is_enough() -> None:
    verdict = judge([run()])
    assert verdict.status is C3Status.AGREE and not verdict.more and verdict.repeats == 3


def test_one_execution_that_differs_asks_for_another() -> None:
    verdict = judge([run(p2=BAD)])
    assert verdict.more == 1 and not any(verdict.bitmap) and verdict.repeats == 0


@pytest.mark.parametrize("peer", range(4))
def test_a_difference_that_recurs_is_persistent_and_the_minoritys(peer: int) -> None:
    verdict = judge([run(**{f"p{peer}": BAD})] * 2)
    assert verdict.status is C3Status.ATTRIBUTED and verdict.basis == "majority"
    assert verdict.persistence == "persistent" and verdict.first_surface == "output"
    assert verdict.bitmap == tuple(p == peer for p in range(4))


def test_a_difference_that_does_not_recur_is_intermittent_and_the_ranks_own() -> None:
    verdict = judge([run(p3=BAD), run()])
    assert (verdict.status, verdict.basis, verdict.persistence) == (C3Status.ATTRIBUTED, "self", "intermittent")
    assert verdict.bitmap == (False, False, False, True)
    assert {name for name, r in verdict.surfaces.items() if r.status is C3Status.ATTRIBUTED} == {
        "output",
        "parameter_gradient",
    }


def test_a_rank_that_never_repeats_itself_is_persistent_by_its_own_contradiction() -> None:
    verdict = judge([run(p0=BAD), run(p0=OTHER)])
    assert (verdict.basis, verdict.persistence, verdict.bitmap) == ("self", "persistent", (True, False, False, False))


def test_two_peers_cannot_settle_a_lasting_difference() -> None:
    verdict = judge([run(2, p1=BAD)] * 2)
    assert verdict.status is C3Status.INCONCLUSIVE and not any(verdict.bitmap)
    assert verdict.persistence == "persistent" and "two peers" in str(verdict.reason)


def test_two_peers_are_enough_when_one_contradicts_itself() -> None:
    verdict = judge([run(2, p1=BAD), run(2)])
    assert (verdict.basis, verdict.bitmap) == ("self", (False, True))


def test_half_against_half_blames_nobody() -> None:
    verdict = judge([run(p2=BAD, p3=BAD)] * 2)
    assert verdict.status is C3Status.INCONCLUSIVE and not any(verdict.bitmap)
    assert "majority" in str(verdict.reason)


def test_two_of_five_are_both_named() -> None:
    verdict = judge([run(5, p1=BAD, p4=OTHER)] * 2)
    assert verdict.bitmap == (False, True, False, False, True)


def test_different_minorities_on_different_surfaces_that_add_up_to_half_blame_nobody() -> None:
    verdict = judge([run(p1=words(output=-1), p2=words(input_gradient=-1))] * 2)
    assert verdict.status is C3Status.INCONCLUSIVE and not any(verdict.bitmap)


def test_all_replicas_different_is_softwares_doing() -> None:
    odd = {f"p{p}": words(output=-p - 1) for p in range(4)}
    verdict = judge([run(**odd)] * 2)
    assert verdict.status is C3Status.INCONCLUSIVE and "software" in str(verdict.reason)


def test_two_that_vary_make_the_operation_nondeterministic() -> None:
    verdict = judge([run(p0=BAD), run(p2=OTHER)])
    assert verdict.nondeterministic and not any(verdict.bitmap) and not verdict.qualified
    assert "ranks 0, 2" in str(verdict.reason)


def test_one_that_varies_in_an_operation_known_to_have_no_deterministic_kernel_is_not_blamed() -> None:
    noted = Flags(nondeterministic_op=True)
    verdict = judge([run(flags=noted, p1=BAD), run(flags=noted)])
    assert verdict.nondeterministic and verdict.status is C3Status.INCONCLUSIVE


def test_a_second_offender_shows_that_it_is_the_operation() -> None:
    executions = [run(p1=BAD), run()]
    assert judge(executions, earlier_offenders=frozenset({3})).nondeterministic
    assert judge(executions, earlier_offenders=frozenset({1})).basis == "self"


def test_others_that_disagree_cannot_witness_against_one_that_varies() -> None:
    verdict = judge([run(p1=BAD, p2=OTHER), run(p2=OTHER)])
    assert verdict.status is C3Status.INCONCLUSIVE and verdict.apart == (1,) and not verdict.more


def test_an_execution_that_raised_is_inconclusive_and_named_by_global_rank() -> None:
    raised = run()
    raised[1] = Observation(words=(0,) * len(HIDDEN), flags=Flags(failed=True))
    verdict = judge([raised], ranks=(2, 5, 8, 11))
    assert verdict.status is C3Status.INCONCLUSIVE and verdict.raised and verdict.apart == (1,)
    assert "rank 5" in str(verdict.reason) and not verdict.more and verdict.persistence is None
    assert verdict.surfaces["output"].evidence[1] is None


def test_a_peer_alone_has_no_verdict() -> None:
    verdict = judge([run(1)])
    assert verdict.status is C3Status.INCONCLUSIVE and not verdict.more and "no peer" in str(verdict.reason)


def test_first_use_that_repeats_itself_qualifies() -> None:
    assert judge([run()] * 2, qualified=False, repeats=0).qualified
    assert not judge([run()], qualified=False, repeats=0).qualified


@pytest.mark.parametrize("peers", [2, 4, 8, 200])
def test_a_computed_difference_waits_for_the_others_to_repeat_themselves_often_enough(peers: int) -> None:
    executions = [run(peers, p0=BAD)] * 2
    verdict = judge(executions, qualified=False, repeats=0)
    wanted = len(executions) + verdict.more
    assert (wanted - 1) * (peers - 1) < PROOF_EXECUTIONS <= wanted * (peers - 1) or verdict.more == 0
    assert not any(verdict.bitmap) or verdict.more == 0
    final = judge([run(peers, p0=BAD)] * wanted, qualified=False, repeats=0)
    assert final.more == 0 and (any(final.bitmap) or peers == 2)


@pytest.mark.parametrize("surface", [name for name in HIDDEN if name not in EXECUTED])
def test_state_that_differs_before_the_execution_needs_no_such_proof(surface: str) -> None:
    bad = words(**{surface: -1, "output": -2})
    verdict = judge([run(p3=bad)] * 2, repeats=0)
    assert verdict.bitmap == (False, False, False, True) and verdict.first_surface == surface


def test_state_that_differs_on_one_does_not_explain_results_that_differ_on_another() -> None:
    verdict = judge([run(5, p3=words(parameter_state=-1), p1=BAD)] * 2, repeats=0)
    assert verdict.more > 0 and not any(verdict.bitmap)


def test_a_very_first_execution_that_differs_is_taken_for_warming_up() -> None:
    executions = [run(p1=BAD)] + [run()] * 60
    verdict = judge(executions, qualified=False, repeats=0)
    assert verdict.status is C3Status.INCONCLUSIVE and verdict.apart == (1,) and verdict.persistence is None
    assert judge(executions, qualified=True, repeats=0).basis == "self"


evidence = st.integers(2, 6).flatmap(
    lambda peers: st.lists(
        st.lists(
            st.builds(
                Observation,
                words=st.tuples(*[st.integers(0, 1)] * len(HIDDEN)),
                flags=st.builds(Flags, failed=st.just(False), nondeterministic_op=st.booleans()),
            ),
            min_size=peers,
            max_size=peers,
        ),
        min_size=1,
        max_size=4,
    )
)


@given(evidence, st.booleans(), st.integers(0, 200))
def test_blame_is_consistent_and_never_reaches_half_by_majority(executions, qualified, repeats) -> None:
    verdict = judge(executions, qualified=qualified, repeats=repeats)
    peers = len(executions[0])
    assert any(verdict.bitmap) == (verdict.status is C3Status.ATTRIBUTED)
    if verdict.basis == "majority":
        assert 2 * sum(verdict.bitmap) < peers
    if verdict.basis == "self":
        assert sum(verdict.bitmap) == 1
    if verdict.more or verdict.nondeterministic:
        assert not any(verdict.bitmap)


@given(evidence, st.randoms())
def test_order_of_peers_permutes_the_bitmap(executions, shuffler) -> None:
    order = list(range(len(executions[0])))
    shuffler.shuffle(order)
    before = judge(executions)
    after = judge([[seen[p] for p in order] for seen in executions])
    assert after.status is before.status and after.nondeterministic == before.nondeterministic
    if before.bitmap:
        assert after.bitmap == tuple(before.bitmap[p] for p in order)


def simulate(rate: float, seed: int, *, checks: int, peers: int, values: int) -> Counter[str]:
    """Checks of an operation that takes another value in `rate` of its calls, on every peer alike."""
    chance = random.Random(seed)
    known = {"qualified": False, "repeats": 0}
    offenders: set[int] = set()
    counts: Counter[str] = Counter()
    nondeterministic = False
    for _ in range(checks):
        executions: list[list[Observation]] = []
        more = 1 if known["qualified"] else 2
        while more:
            for _ in range(more):
                seen = [
                    words(output=-chance.randrange(values)) if chance.random() < rate else GOOD for _ in range(peers)
                ]
                executions.append([Observation(words=w) for w in seen])
            verdict = judge(executions, earlier_offenders=frozenset(offenders), **known)
            more = verdict.more
        known = {
            "qualified": known["qualified"] or verdict.qualified,
            "repeats": known["repeats"] + verdict.repeats,
        }
        offenders |= {p for p, bad in enumerate(verdict.bitmap) if bad}
        counts["blamed"] += any(verdict.bitmap)
        nondeterministic = nondeterministic or verdict.nondeterministic
        if nondeterministic:
            counts["recognized"] += 1
            break
    return counts


@pytest.mark.parametrize("values", [1, 1 << 30], ids=["two values", "noise"])
@pytest.mark.parametrize("peers", [2, 4, 8])
def test_an_operation_that_varies_in_one_call_of_twenty_never_blames_a_rank(peers: int, values: int) -> None:
    total: Counter[str] = Counter()
    for seed in range(40):
        total += simulate(0.05, seed, checks=300, peers=peers, values=values)
    assert total["blamed"] == 0
    assert total["recognized"] == 40
