"""Who is slow: one round, its confirmation, its persistence, and what noise must not be taken for it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.timing.stragglers import (
    StragglerHistory,
    StragglerJudge,
    StragglerThresholds,
    StragglerVerdict,
    candidates,
    confirm,
)

NAN, INF = math.nan, math.inf
DEFAULT = StragglerThresholds()
ONE_ROUND = StragglerThresholds(confirmations=0)
Clock = Callable[[int, int], float]
"""One measurement in ms, given the number of the check and the peer."""

times = st.one_of(st.none(), st.floats(0, 1e4), st.sampled_from([10.0, 14.0, 20.0, -1.0, NAN, INF]))
peer_times = st.lists(times, min_size=1, max_size=9)


def slow(bitmap: Sequence[bool]) -> list[int]:
    return [peer for peer, is_slow in enumerate(bitmap) if is_slow]


def check(judge: StragglerJudge, clock: Clock, number: int, peers: int, recipe: str = "hidden") -> StragglerVerdict:
    """One check as rank code runs it: confirmation rounds only when the first round names somebody."""
    rounds = [[clock(number, peer) for peer in range(peers)]]
    if any(judge.candidates(recipe, rounds[0])):
        for _ in range(judge.thresholds.confirmations):
            rounds.append([clock(number, peer) for peer in range(peers)])
    return judge.judge(recipe, rounds)


def run(judge: StragglerJudge, clock: Clock, checks: int, peers: int = 4) -> list[tuple[int, list[int]]]:
    """The reports of a run: (check, peers reported)."""
    verdicts = [check(judge, clock, number, peers) for number in range(checks)]
    return [(number, slow(verdict.bitmap)) for number, verdict in enumerate(verdicts) if any(verdict.bitmap)]


@pytest.mark.parametrize(
    ("times_ms", "expected"),
    [
        ([10.0, 10.0, 10.0, 16.0], [3]),
        ([16.0, 10.0, 10.0], [0]),
        ([10.0, 10.0, 10.0, 12.9], []),  # not the relative threshold
        ([1.0, 1.0, 1.0, 2.9], []),  # not the absolute one
        ([1.0, 1.0, 1.0, 3.1], [3]),
        ([10.0, 10.0, 10.0, 1.0], []),  # fast is not slow
        ([10.0, 10.0, 20.0, 20.0], []),  # half of them
        ([10.0, 10.0, 10.0, 20.0, 20.0], [3, 4]),
        ([10.0, 20.0], []),
        ([10.0, 20.0, None], []),
        ([20.0], []),
        ([], []),
        ([20.0, 20.0, 20.0, 20.0], []),
        ([10.0, None, 10.0, 16.0], [3]),
        ([10.0, NAN, 10.0, INF, -5.0, 16.0], [5]),
        ([NAN, INF, -1.0, None], []),
        ([10.0, 16.0, 10.0, -5.0, -5.0], [1]),
        ([0.0, 0.0, 0.0, 5.0], [3]),
    ],
)
def test_candidates_among_peers(times_ms: list[float | None], expected: list[int]) -> None:
    assert slow(candidates(times_ms, DEFAULT)) == expected


def test_own_history_clears_a_peer_at_its_usual_pace() -> None:
    times_ms = [10.0, 10.0, 10.0, 16.0]
    assert slow(candidates(times_ms, DEFAULT, [10.0, 10.0, 10.0, 10.0])) == [3]
    assert slow(candidates(times_ms, DEFAULT, [10.0, 10.0, 10.0, 15.5])) == []
    assert slow(candidates(times_ms, DEFAULT, [10.0, 10.0, 10.0, 13.0])) == [3]  # half the threshold is enough
    assert slow(candidates(times_ms, DEFAULT, [None, None, None, None])) == [3]
    assert slow(candidates([1.0, 1.0, 4.0], DEFAULT, [1.0, 1.0, 2.9])) == [2]  # half of the absolute threshold, too
    assert slow(candidates([1.0, 1.0, 4.0], DEFAULT, [1.0, 1.0, 3.1])) == []
    with pytest.raises(ValueError, match="history has 1"):
        candidates(times_ms, DEFAULT, [10.0])


@pytest.mark.parametrize(
    ("times_ms", "own", "expected"),
    [
        ([10.0, 16.0], [10.0, 10.0], [1]),
        ([16.0, 10.0], [10.0, 10.0], [0]),
        ([16.0, 16.0], [10.0, 10.0], []),  # both slow: the work grew
        ([13.1, 12.9], [10.0, 10.0], []),  # the witness is nearly as slow
        ([10.0, 16.0], [10.0, None], []),
        ([10.0, 16.0], [None, 10.0], []),
        ([16.0, 30.0], [16.0, 30.0], []),  # unequal, as ever
        ([16.0, 25.0], [10.0, 25.0], [0]),  # the faster of the two, and yet the one that became slow
        ([None, 10.0, None, 16.0], [None, 10.0, None, 10.0], [3]),
    ],
)
def test_two_peers_are_told_apart_only_by_their_own_history(
    times_ms: list[float | None], own: list[float | None], expected: list[int]
) -> None:
    assert slow(candidates(times_ms, DEFAULT, own)) == expected


def test_confirmation_needs_every_round() -> None:
    bad, good, other = [10.0, 10.0, 16.0], [10.0, 10.0, 10.0], [16.0, 10.0, 10.0]
    assert slow(confirm([bad, bad, bad], DEFAULT)) == [2]
    for rounds in ([bad, good, bad], [bad, bad, other], [good, bad, bad], [bad, bad, good], [bad, bad], [bad]):
        assert slow(confirm(rounds, DEFAULT)) == []
    assert slow(confirm([bad], ONE_ROUND)) == [2]
    with pytest.raises(ValueError, match="first round"):
        confirm([], DEFAULT)
    with pytest.raises(ValueError, match="same peers"):
        confirm([bad, [10.0]], DEFAULT)


@given(peer_times, st.randoms(use_true_random=False))
def test_permuting_peers_permutes_candidates(times_ms: list[float | None], rng: random.Random) -> None:
    order = rng.sample(range(len(times_ms)), len(times_ms))
    own = [time if peer % 2 else None for peer, time in enumerate(times_ms)]
    before = candidates(times_ms, DEFAULT, own)
    after = candidates([times_ms[peer] for peer in order], DEFAULT, [own[peer] for peer in order])
    assert after == tuple(before[peer] for peer in order)


@given(peer_times, peer_times)
def test_candidates_are_a_strict_minority_and_slower_than_a_majority(
    times_ms: list[float | None], history: list[float | None]
) -> None:
    own = (history * len(times_ms))[: len(times_ms)]
    named = slow(candidates(times_ms, DEFAULT, own))
    usable = [time for time in times_ms if time is not None and math.isfinite(time) and time >= 0]
    assert not named or 2 * len(named) < len(usable) or len(usable) == 2
    for peer in named:
        time = times_ms[peer]
        assert time is not None
        assert math.isfinite(time)
        assert len(usable) == 2 or 2 * sum(other < time for other in usable) >= len(usable) - 1


@given(st.floats(0, 1e6), st.integers(1, 9))
def test_a_uniformly_slow_check_blames_nobody(time_ms: float, peers: int) -> None:
    own = [1.0] * peers
    assert not any(candidates([time_ms] * peers, DEFAULT, own))


@given(st.lists(peer_times.filter(lambda row: len(row) >= 4).map(lambda row: row[:4]), min_size=1, max_size=30))
def test_the_same_times_give_every_rank_the_same_verdicts(checks: list[list[float | None]]) -> None:
    here, there = StragglerJudge(ONE_ROUND), StragglerJudge(ONE_ROUND)
    for times_ms in checks:
        there.candidates("hidden", times_ms)  # asking leaves no trace
        there.candidates("hidden", times_ms[::-1])
        assert here.judge("hidden", [times_ms]) == there.judge("hidden", [times_ms])


def test_noise_and_hiccups_blame_nobody() -> None:
    rng = random.Random(20)

    def noisy(number: int, peer: int) -> float:
        return 10.0 * rng.lognormvariate(0, 0.15) * (3.0 if rng.random() < 0.02 else 1.0)

    assert run(StragglerJudge(), noisy, checks=10_000) == []


def test_two_noisy_peers_blame_nobody() -> None:
    rng = random.Random(21)

    def noisy(number: int, peer: int) -> float:
        return (10.0, 14.0)[peer] * rng.lognormvariate(0, 0.1) * (3.0 if rng.random() < 0.02 else 1.0)

    assert run(StragglerJudge(), noisy, checks=3_000, peers=2) == []


@pytest.mark.parametrize("peers", [3, 4, 8])
@pytest.mark.parametrize("onset", [0, 100])
@pytest.mark.parametrize("seed", range(5))
def test_a_persistent_straggler_is_found_soon_and_alone(peers: int, onset: int, seed: int) -> None:
    rng, victim = random.Random(seed), seed % peers

    def straggling(number: int, peer: int) -> float:
        return 10.0 * rng.lognormvariate(0, 0.1) * (1.6 if peer == victim and number >= onset else 1.0)

    reports = run(StragglerJudge(), straggling, checks=onset + 200, peers=peers)
    assert reports
    assert onset + 1 <= reports[0][0] <= onset + 8
    assert all(named == [victim] for _, named in reports)
    assert len(reports) > 100, "a peer that stays slow stays reported, also when its clean history has aged"


def test_one_of_two_peers_that_becomes_slow_stays_reported() -> None:
    def second_slows(number: int, peer: int) -> float:
        return 16.0 if peer == 1 and number >= 20 else 10.0

    reports = run(StragglerJudge(), second_slows, checks=120, peers=2)
    assert reports == [(number, [1]) for number in range(21, 120)]


def test_of_two_peers_slow_from_the_first_check_on_nobody_is_blamed() -> None:
    judge = StragglerJudge()
    assert check(judge, lambda _, peer: (10.0, 16.0)[peer], 0, peers=2).reason == "no_history"
    assert run(judge, lambda _, peer: (10.0, 16.0)[peer], checks=50, peers=2) == []


def test_a_slow_drift_is_found_though_its_own_baseline_goes_along() -> None:
    def drifting(number: int, peer: int) -> float:
        return 10.0 * (1.0 + 0.005 * min(number, 80)) if peer == 2 else 10.0  # ends at 1.4 times the peers

    reports = run(StragglerJudge(), drifting, checks=160)
    assert reports
    assert reports[0][0] < 120
    assert {tuple(named) for _, named in reports} == {(2,)}


@pytest.mark.parametrize("period", [1, 3, 10])
def test_bursts_that_move_between_ranks_blame_nobody(period: int) -> None:
    def moving(number: int, peer: int) -> float:
        return 30.0 if number % period == 0 and number // period % 4 == peer else 10.0

    assert run(StragglerJudge(), moving, checks=400) == []


def test_bursts_between_two_of_many_ranks_blame_nobody() -> None:
    assert run(StragglerJudge(), lambda number, peer: 30.0 if peer == number % 2 else 10.0, checks=100, peers=8) == []


def test_one_slow_check_blames_nobody_and_rare_ones_neither() -> None:
    assert run(StragglerJudge(), lambda number, peer: 30.0 if (number, peer) == (40, 1) else 10.0, checks=80) == []
    assert run(StragglerJudge(), lambda number, peer: 30.0 if number % 8 == peer == 1 else 10.0, checks=400) == []


def test_a_peer_slow_in_every_other_check_is_reported() -> None:
    reports = run(StragglerJudge(), lambda number, peer: 30.0 if peer == 1 and number % 2 else 10.0, checks=40)
    assert reports[0] == (3, [1])


def test_two_stragglers_of_eight_are_both_reported() -> None:
    reports = run(StragglerJudge(), lambda number, peer: 20.0 if peer in (2, 5) else 10.0, checks=10, peers=8)
    assert reports == [(number, [2, 5]) for number in range(1, 10)]


def test_persistence_is_counted_for_each_recipe_alone_and_within_the_window() -> None:
    bad, good = [10.0, 10.0, 16.0], [10.0, 10.0, 10.0]
    judge = StragglerJudge(StragglerThresholds(confirmations=0, persistence=3, window=4))
    assert [slow(judge.judge(recipe, [bad]).bitmap) for recipe in "abaaba"] == [[], [], [], [2], [], [2]]
    assert [slow(judge.judge("c", [row]).bitmap) for row in (bad, bad, good, bad)] == [[], [], [], [2]]
    assert [slow(judge.judge("d", [row]).bitmap) for row in (bad, good, bad, good, bad)] == [[], [], [], [], []]
    default = StragglerJudge(ONE_ROUND)
    verdicts = [default.judge("a", [row]) for row in (bad, bad, good, bad)]
    assert [slow(verdict.bitmap) for verdict in verdicts] == [[], [2], [], [2]], "a clean check reports nobody"
    always = StragglerJudge(StragglerThresholds(confirmations=0, persistence=1))
    assert slow(always.judge("a", [bad]).bitmap) == [2]


def test_a_verdict_says_what_it_rests_on() -> None:
    judge = StragglerJudge()
    bad, worse, good = [10.0, 10.0, None, 16.0], [10.0, 10.0, None, 20.0], [10.0, 10.0, None, 10.0]
    verdict = judge.judge("a", [bad, worse, worse])
    assert verdict.reason == "not_persistent"
    assert not any(verdict.bitmap)
    assert slow(verdict.candidate_bitmap) == slow(verdict.confirmed_bitmap) == [3]
    assert verdict.baseline_ms == (13.0, 13.0, None, 10.0)
    assert verdict.ratio == (10 / 15, 10 / 15, None, 1.6)
    assert judge.judge("a", [bad, good, bad]).reason == "not_confirmed"
    assert judge.judge("a", [bad, bad, bad]).reason == "reported"
    assert judge.judge("a", [good]).reason == "clean"
    assert judge.judge("a", [[10.0, 10.0, 20.0, 20.0]]).reason == "no_majority"
    assert judge.judge("a", [[10.0, None, None, None]]).reason == "too_few_times"
    assert judge.judge("b", [[10.0, None, 20.0, None]]).reason == "no_history"


def test_two_peers_are_compared_with_their_own_baselines() -> None:
    judge = StragglerJudge(ONE_ROUND)
    for _ in range(8):
        assert judge.judge("a", [[10.0, 20.0]]).ratio in ((None, None), (1.0, 1.0))
    verdict = judge.judge("a", [[18.0, 20.0]])
    assert (verdict.baseline_ms, verdict.ratio) == ((10.0, 20.0), (1.8, 1.0))
    assert (slow(verdict.candidate_bitmap), verdict.reason) == ([0], "not_persistent")


def test_history_is_the_median_of_at_least_eight_clean_times_in_the_window() -> None:
    history = StragglerHistory(window=10)
    clean, one_flagged = (False, False, False), (False, True, False)
    for number in range(7):
        history.observe("a", [float(number), 5.0, 5.0], clean)
    assert history.baselines_ms("a", 3) == (None, None, None)
    history.observe("a", [7.0, 99.0, NAN], one_flagged)
    assert history.baselines_ms("a", 3) == (3.5, None, None)
    history.observe("a", [8.0, 5.0, 5.0], clean)
    assert history.baselines_ms("a", 3) == (4.0, 5.0, 5.0)
    for _ in range(3):  # two checks leave the window, and the flagged peer has blanks for them
        history.observe("a", [8.0, 99.0, 5.0], one_flagged)
    assert history.baselines_ms("a", 3) == (6.5, None, 5.0)
    assert history.baselines_ms("a", 4) == (None,) * 4, "after a resize, a position is another rank"
    with pytest.raises(ValueError, match="flagged has 1"):
        history.observe("a", [1.0, 2.0], [False])


def test_history_is_bounded_and_forgets_the_recipe_observed_longest_ago() -> None:
    history = StragglerHistory(window=8, max_samples=8 * 2 * 3)
    for recipe in ("a", "b", "a", "c", "d"):
        for _ in range(8):
            history.observe(recipe, [1.0, 1.0], [False, False])
    assert [history.baselines_ms(recipe, 2)[0] for recipe in "abcd"] == [1.0, None, 1.0, 1.0]
    for number in range(1000):
        history.observe(number, [1.0] * (1 + number % 5), [False] * (1 + number % 5))
        assert len(history) <= 6
    history.observe("wide", [1.0] * 100, [False] * 100)
    assert len(history) == 1, "one recipe is kept even where it alone exceeds the bound"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("relative", 1.0),
        ("relative", NAN),
        ("relative", INF),
        ("absolute_ms", -0.1),
        ("absolute_ms", NAN),
        ("confirmations", -1),
        ("window", 0),
        ("persistence", 0),
        ("persistence", 33),
    ],
)
def test_thresholds_are_checked(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        StragglerThresholds(**{field: value})  # type: ignore[arg-type]


def test_bounds_are_checked() -> None:
    with pytest.raises(ValueError, match="max_samples"):
        StragglerHistory(max_samples=0)
    with pytest.raises(ValueError, match="first round"):
        StragglerJudge().judge("a", [])
