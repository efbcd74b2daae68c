"""Live steps: a rank that becomes slower in itself is watched, then proposed for exclusion; everything else is not."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scout_core.timing import PaceJudge, PaceThresholds
from tests.timing.pace_jobs import Job, run

SEEDS = range(4)
QUICK = PaceThresholds(warm_up=0, baseline=16, windows=(8,), persistent=40)


def random_work(rng: random.Random, step: int, rank: int) -> float:
    return 1000.0 * rng.lognormvariate(0, 0.15)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_b01_a_lasting_five_percent_is_watched_and_then_proposed_for_exclusion(ranks: int, seed: int) -> None:
    victim = (seed + 1) % ranks
    told = run(Job(ranks=ranks, seed=seed, factor=lambda step, rank: 1.05 if rank == victim and step >= 200 else 1.0))
    assert told.named == {("compute_straggler", victim)}
    first_step, first = told.findings[0]
    assert first.decision == "observe"
    assert 205 <= first_step <= 230
    assert 195 <= first.onset_step <= 202
    last_step, last = told.findings[-1]
    assert (last_step, last.decision, last.onset_step) == (399, "exclude_at_next_restart", first.onset_step)
    assert 0.035 < last.excess < 0.065
    assert not any(finding.decision != "observe" for step, finding in told.findings if step < 300)


@pytest.mark.parametrize("seed", SEEDS)
def test_b07_random_work_of_equal_means_is_no_finding(seed: int) -> None:
    assert run(Job(seed=seed, tokens=random_work)).named == set()
    unknown = run(Job(seed=seed, noise=0.15))
    assert unknown.named == set(), "the same scatter where nobody knows the tokens"


@pytest.mark.parametrize("seed", SEEDS)
def test_b07_a_rank_that_always_gets_the_longest_samples_is_an_imbalance_of_data(seed: int) -> None:
    told = run(Job(seed=seed, tokens=lambda *at: random_work(*at) * (1.46 if at[2] == 3 else 1.0)))
    assert told.named == {("data_imbalance", 3)}
    assert told.excluded == set()
    assert told.findings[0][1].onset_step <= 10, "from the start"
    assert 0.3 < told.findings[-1][1].excess < 0.6
    later = run(Job(seed=seed, tokens=lambda *at: random_work(*at) * (1.46 if at[2] == 3 and at[1] >= 200 else 1.0)))
    assert later.named == {("data_imbalance", 3)}
    assert 180 <= later.findings[0][1].onset_step <= 215


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_device_is_found_under_random_work_and_not_taken_for_its_tokens(seed: int) -> None:
    job = Job(seed=seed, tokens=random_work, factor=lambda step, rank: 1.3 if rank == 1 and step >= 200 else 1.0)
    told = run(job)
    assert told.named == {("compute_straggler", 1)}
    assert told.excluded == {1}


def test_fewer_tokens_do_not_make_a_rank_slow_although_each_takes_longer() -> None:
    def fewer(rng: random.Random, step: int, rank: int) -> float:
        return 500.0 if rank == 1 and step >= 200 else 1000.0

    told = run(Job(tokens=fewer, extra_ms=lambda step, rank: 30.0))
    assert told.named == set()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("loader_known", [True, False])
def test_b11_pauses_of_all_ranks_blame_nobody_and_are_noted(loader_known: bool, seed: int) -> None:
    def pauses(step: int, rank: int) -> float:
        return 300.0 if step % 4 == 0 else 1.0

    told = run(Job(seed=seed, loader_ms=pauses) if loader_known else Job(seed=seed, extra_ms=pauses))
    assert told.named == set()
    assert {note for _, note in told.notes} == {"input_bound" if loader_known else "pauses"}
    assert told.notes[-1][0] == 399


@pytest.mark.parametrize("seed", SEEDS)
def test_b13_a_burst_is_watched_and_only_its_recurrence_leads_to_a_proposal(seed: int) -> None:
    def bursts(step: int, rank: int) -> float:
        return 2.0 if rank == 2 and (100 <= step < 120 or 300 <= step < 320) else 1.0

    told = run(Job(seed=seed, factor=bursts))
    assert told.named == {("compute_straggler", 2)}
    first = [finding for step, finding in told.findings if step < 200]
    second = [finding for step, finding in told.findings if step >= 200]
    assert {(f.decision, f.episodes) for f in first} == {("observe", 1)}
    assert {(f.decision, f.episodes) for f in second} == {("exclude_at_next_restart", 2)}
    assert all(99 <= f.onset_step <= 101 for f in first)
    assert all(299 <= f.onset_step <= 301 for f in second)
    assert told.findings[-1][0] < 335, "it ends when the slowness does"


@pytest.mark.parametrize("seed", SEEDS)
def test_b14_a_role_is_no_fault_and_a_change_of_it_is(seed: int) -> None:
    def role(step: int, rank: int) -> float:
        return 1.1 if rank in (0, 3) else 1.0

    def logging_ms(step: int, rank: int) -> float:
        return 30.0 if rank == 0 else 0.0

    assert run(Job(seed=seed, factor=role, extra_ms=logging_ms)).named == set()
    changed = run(
        Job(
            seed=seed,
            extra_ms=logging_ms,
            factor=lambda step, rank: role(step, rank) * (1.1 if rank == 0 and step >= 200 else 1.0),
        )
    )
    assert changed.named == {("compute_straggler", 0)}


@pytest.mark.parametrize(("length", "period"), [(5, 5), (7, 20), (20, 20), (20, 60), (30, 90)])
def test_bursts_that_move_between_ranks_are_never_proposed_for_exclusion(length: int, period: int) -> None:
    def moving(step: int, rank: int) -> float:
        slow = step >= 80 and step % period < length and step // period % 4 == rank
        return 2.0 if slow else 1.0

    told = run(Job(steps=800, factor=moving))
    assert told.excluded == set()
    assert len({position for _, position in told.named}) <= 1, "after the first one it is known to move"
    if length < 10:
        assert told.named == set()


def test_b08_a_slow_loader_is_told_apart_from_a_slow_device() -> None:
    told = run(Job(loader_ms=lambda step, rank: 100.0 if rank == 1 and step >= 200 else 1.0))
    assert told.named == {("dataloader_stall", 1)}
    assert 198 <= told.findings[0][1].onset_step <= 201
    assert told.notes == [], "one loader is not the job's"
    device = run(Job(loader_ms=lambda step, rank: 5.0, factor=lambda s, rank: 1.2 if rank == 1 and s >= 200 else 1.0))
    assert device.named == {("compute_straggler", 1)}


def test_a_job_that_becomes_slower_as_a_whole_blames_nobody() -> None:
    told = run(Job(factor=lambda step, rank: 1.5 if step >= 200 else 1.0))
    assert told.named == set()
    assert {note for _, note in told.notes} == {"slow_as_a_whole"}
    half = run(Job(factor=lambda step, rank: 1.5 if step >= 200 and rank < 2 else 1.0))
    assert half.named == set(), "half of the ranks are no minority"


def test_two_slow_ranks_of_eight_are_both_found() -> None:
    told = run(Job(ranks=8, factor=lambda s, rank: 1.2 if (rank == 2 and s > 150) or (rank == 5 and s > 250) else 1.0))
    assert told.named == {("compute_straggler", 2), ("compute_straggler", 5)}
    assert told.excluded == {2, 5}


def test_a_slow_drift_is_found_although_no_step_shows_it() -> None:
    told = run(Job(steps=900, factor=lambda step, rank: 1.0 + 0.0001 * step if rank == 1 else 1.0))
    assert told.named == {("compute_straggler", 1)}


def test_slowness_that_ends_is_forgotten_and_one_that_wavers_is_one_episode() -> None:
    def wavering(step: int, rank: int) -> float:
        return 1.2 if rank == 1 and (100 <= step < 130 or 140 <= step < 170) else 1.0

    told = run(Job(factor=wavering))
    assert {f.episodes for _, f in told.findings} == {1}
    assert told.findings[-1][0] < 190


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("noise", [0.001, 0.01, 0.05, 0.15])
def test_noise_with_hiccups_leads_to_no_finding(noise: float, seed: int) -> None:
    assert run(Job(seed=seed, noise=noise, hiccups=0.02)).findings == []


def test_unknown_values_are_left_out_and_a_resize_starts_anew() -> None:
    judge = PaceJudge(QUICK)
    for step in range(60):
        verdict = judge.observe(step, [100.0, None, 100.0, math.nan, 100.0 if step < 30 else 130.0])
    assert [finding.position for finding in verdict.findings] == [4]
    assert judge.observe(60, [100.0, 100.0, 130.0]).findings == ()
    for step in range(61, 100):
        verdict = judge.observe(step, [100.0, 100.0, 130.0])
    assert verdict.findings == (), "what was normal before is another rank's"
    assert PaceJudge().observe(0, []).findings == ()
    with pytest.raises(ValueError, match="of 2, 1 and 2 ranks"):
        PaceJudge().observe(0, [1.0, 1.0], tokens=[1.0])


rows = st.lists(st.lists(st.one_of(st.none(), st.floats(0, 1e4)), min_size=4, max_size=4), min_size=1, max_size=60)


@settings(max_examples=40, deadline=None)
@given(rows, st.permutations(range(4)))
def test_whoever_numbers_the_ranks_the_same_ones_are_found(times: list[list[float | None]], order: list[int]) -> None:
    one, other = PaceJudge(QUICK), PaceJudge(QUICK)
    for step, row in enumerate(times):
        here = one.observe(step, row)
        there = other.observe(step, [row[position] for position in order])
        assert {f.position for f in here.findings} == {order[f.position] for f in there.findings}
        assert 2 * len(here.findings) < 4 or all(f.kind != "compute_straggler" for f in here.findings)
        assert here.note == there.note


@pytest.mark.parametrize(
    "wrong",
    [
        {"relative": 0.0},
        {"imbalance": math.nan},
        {"errors": -1.0},
        {"absolute_ms": math.inf},
        {"windows": ()},
        {"windows": (3,)},
        {"baseline": 4},
        {"persistent": 10},
    ],
)
def test_thresholds_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        PaceThresholds(**wrong)
