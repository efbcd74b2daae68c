"""The layouts' jobs themselves, without SCOUT: they train what the whole model trains, replicas keep equal bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.layouts import CASES, SMALL, LayoutCase
from tests.distributed.layouts.job import next_batch, replica_data
from tests.distributed.layouts.model import LENGTH
from tests.distributed.layouts.wiring import whole_pass
from tests.distributed.pool import RankPool

STEPS = 3
SHORTER = LENGTH - 2
ODD = 1


def train(name: str, seed: int) -> dict[str, Any]:
    """State after each step and the losses this rank saw."""
    job = CASES[name].build(seed)
    states, losses = [], []
    for _ in range(STEPS):
        job.step()
        states.append(job.owned_state())
        losses.append(job.loss)
    return {"states": states, "losses": losses}


def whole_losses(case: LayoutCase, seed: int) -> list[float]:
    """Losses of the unsplit model on all replicas' batches at once, in this process."""
    torch.manual_seed(seed)
    model = case.whole()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = [replica_data(seed, replica) for replica in range(case.replicas)]
    compute, losses = whole_pass(model), []
    for _ in range(STEPS):
        losses.append(float(compute(torch.cat([next_batch(source) for source in data])).detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def same_states(one: list[dict[str, torch.Tensor]], other: list[dict[str, torch.Tensor]]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all(a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in pairs)


def judge(pool: RankPool, name: str) -> list[dict[str, Any]]:
    case = CASES[name]
    answers: list[dict[str, Any]] = pool.run(train, name, 3, timeout=120)
    if "dp_replicate" in dict(case.dims):
        for rank, answer in enumerate(answers):
            for peer in case.expected_peers(rank):
                assert same_states(answer["states"], answers[peer]["states"]), f"ranks {rank} and {peer} differ"
    seen = [answer["losses"] for answer in answers if answer["losses"][0] is not None]
    mean = torch.tensor(seen, dtype=torch.float64).mean(0)
    torch.testing.assert_close(mean, torch.tensor(whole_losses(case, 3), dtype=torch.float64), rtol=1e-4, atol=0)
    return answers


def pool_of(name: str, request: pytest.FixtureRequest) -> RankPool:
    pool: RankPool = request.getfixturevalue(f"ranks{CASES[name].ranks}")
    return pool


@pytest.mark.parametrize("name", SMALL)
def test_a_layout_trains_the_whole_model(name: str, request: pytest.FixtureRequest) -> None:
    judge(pool_of(name, request), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_runs_give_equal_bits(name: str, request: pytest.FixtureRequest) -> None:
    pool = pool_of(name, request)
    first, second = judge(pool, name), judge(pool, name)
    for one, other in zip(first, second, strict=True):
        assert one["losses"] == other["losses"] and same_states(one["states"], other["states"])


def uneven(name: str) -> list[dict[str, torch.Tensor]]:
    """States of a job in which one replica's batches are shorter."""
    case = CASES[name]
    job, states = case.build(2), []
    for _ in range(STEPS):
        job.step(length=SHORTER if case.replica(dist.get_rank()) == ODD else LENGTH)
        states.append(job.owned_state())
    return states


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SMALL if CASES[name].lengths_vary])
def test_replicas_of_unequal_lengths_train_on(name: str, request: pytest.FixtureRequest) -> None:
    answers = pool_of(name, request).run(uneven, name, timeout=120)
    if "dp_replicate" in dict(CASES[name].dims):
        for rank, states in enumerate(answers):
            assert all(same_states(states, answers[peer]) for peer in CASES[name].expected_peers(rank))


def unseen(name: str) -> list[Any]:
    """How often hooks that pass for SCOUT's fire in a step that hides them on one rank, and in the next."""
    fired = [0]

    def hook(*_: Any) -> None:
        fired[0] += 1

    hook.__module__ = "scout_core.anything"
    plain, watched = (CASES[name].build(2) for _ in range(2))
    for module in (watched.model, *map(watched.block, watched.layers)):
        module.register_forward_pre_hook(hook)
        module.register_forward_hook(hook)
    counts = []
    for job in (plain, watched):
        for step in range(2):
            job.step(unseen=step == 0 and dist.get_rank() == ODD)
            counts.append(fired[0])
    return [counts[2:], same_states([plain.owned_state()], [watched.owned_state()])]


@pytest.mark.parametrize("name", ["fsdp2"])
def test_a_step_can_pass_by_the_hooks_of_one_rank(name: str, request: pytest.FixtureRequest) -> None:
    for rank, (counts, same) in enumerate(pool_of(name, request).run(unseen, name)):
        assert same and counts == ([0, 10] if rank == ODD else [10, 20])


EXPECTED = {
    "ddp": {2: ((0, 1, 2, 3), (2,))},
    "fsdp2": {1: ((0, 1, 2, 3), (1,))},
    "hsdp": {0: ((0, 2, 4, 6), (0, 1)), 5: ((1, 3, 5, 7), (4, 5))},
    "tp": {3: ((1, 3, 5, 7), (2, 3))},
    "sp": {4: ((0, 2, 4, 6), (4, 5))},
    "tp_by_hand": {7: ((1, 3, 5, 7), (6, 7))},
    "cp": {2: ((0, 2, 4, 6), (2, 3))},
    "pp_gpipe": {1: ((0, 1, 2, 3), (1,)), 6: ((4, 5, 6, 7), (6,))},
    "pp_1f1b": {4: ((4, 5, 6, 7), (4,))},
    "ep": {5: ((1, 3, 5, 7), (4, 5))},
    "fsdp2_tp": {0: ((0, 2, 4, 6), (0, 1))},
    "pp_dp_tp": {3: ((1, 3, 5), (2, 3)), 10: ((6, 8, 10), (10, 11))},
    "hsdp_tp": {0: ((0, 4, 8), (0, 1, 2, 3)), 7: ((3, 7, 11), (4, 5, 6, 7))},
}


@pytest.mark.parametrize("name", CASES)
def test_who_stands_where(name: str) -> None:
    for rank, groups in EXPECTED[name].items():
        assert (CASES[name].expected_peers(rank), CASES[name].expected_lockstep(rank)) == groups
