"""The layouts' jobs themselves, without SCOUT: they train what the whole model trains, replicas keep equal bits, and a
second run gives the first one's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.layouts import CASES, SMALL, LayoutCase
from tests.distributed.layouts.job import next_batch, replica_data
from tests.distributed.layouts.wiring import whole_pass
from tests.distributed.pool import RankPool

STEPS = 5


def train(name: str, seed: int) -> dict[str, Any]:
    """State after each step and the losses this rank saw."""
    job = CASES[name].build(seed)
    states, losses = [], []
    for _ in range(STEPS):
        job.step()
        states.append(job.owned_state())
        losses.append(job.loss)
    return {"states": states, "losses": losses}


def twice(name: str) -> list[dict[str, Any]]:
    return [train(name, seed=3), train(name, seed=3)]


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
    return all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in zip(one, other, strict=True)
    )


def judge(pool: RankPool, name: str) -> None:
    case = CASES[name]
    answers = pool.run(twice, name, timeout=120)
    for rank, (first, second) in enumerate(answers):
        assert first["losses"] == second["losses"] and same_states(first["states"], second["states"]), rank
        if "dp_replicate" in dict(case.dims):
            for peer in case.expected_peers(rank):
                assert same_states(first["states"], answers[peer][0]["states"]), f"ranks {rank} and {peer} differ"
    seen = [answer[0]["losses"] for answer in answers if answer[0]["losses"][0] is not None]
    mean = torch.tensor(seen, dtype=torch.float64).mean(0)
    torch.testing.assert_close(mean, torch.tensor(whole_losses(case, 3), dtype=torch.float64), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", SMALL)
def test_a_layout_trains_the_whole_model(name: str, request: pytest.FixtureRequest) -> None:
    judge(request.getfixturevalue(f"ranks{CASES[name].ranks}"), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES.keys() - set(SMALL)))
def test_a_product_of_three_trains_the_whole_model(name: str, ranks12: RankPool) -> None:
    judge(ranks12, name)


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
