"""The faults themselves, without SCOUT: what they reach is changed on their rank, and training goes on."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.layouts import CASES, SMALL
from tests.distributed.layouts.faults import KINDS, LayoutFault, inject, kinds_on, layer_on
from tests.distributed.pool import RankPool

BEFORE, AFTER = 1, 3


def train(name: str, rank: int, kind: str | None) -> tuple[list[dict[str, torch.Tensor]], bool, int]:
    """States after each step, finiteness, and how often the fault acted."""
    job = CASES[name].build(1)
    job.train(BEFORE)
    fault = None
    if kind is not None:
        fault = inject(LayoutFault(kind=kind, rank=rank, layer=layer_on(CASES[name], rank)), job)
    states = []
    for _ in range(AFTER):
        job.step()
        states.append(job.owned_state())
    if fault is not None:
        fault.remove()
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in states[-1].values())
    return states, finite, fault.fired if fault is not None else 0


def effects(name: str, rank: int) -> dict[str, tuple[bool, bool, int]]:
    """Per kind: whether this rank's state ends otherwise than without the fault, finiteness, and firings."""
    healthy = train(name, rank, None)[0]
    found = {}
    for kind in kinds_on(CASES[name], rank):
        states, finite, fired = train(name, rank, kind)
        changed = any(
            not torch.equal(was[key], now[key]) for was, now in zip(healthy, states, strict=True) for key in was
        )
        found[kind] = (changed, finite, fired)
    return found


def judge(pool: RankPool, name: str, rank: int) -> None:
    answers = pool.run(effects, name, rank, timeout=120)
    for kind in kinds_on(CASES[name], rank):
        assert all(answer[kind][1] for answer in answers), f"{kind} must not end in NaN"
        assert answers[rank][kind][0], f"{kind} must reach the rank's own state"
        assert [bool(answer[kind][2]) for answer in answers] == [r == rank for r in range(pool.world_size)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_each_fault_acts_on_its_rank(name: str, request: pytest.FixtureRequest) -> None:
    pool = request.getfixturevalue(f"ranks{CASES[name].ranks}")
    for rank in (1, pool.world_size - 1):
        judge(pool, name, rank)


def test_each_fault_acts_on_its_rank_among_experts(ranks8: RankPool) -> None:
    judge(ranks8, "ep", 1)


def test_which_faults_a_rank_can_have() -> None:
    assert kinds_on(CASES["tp"], 5) == KINDS
    assert set(KINDS) - set(kinds_on(CASES["ddp"], 0)) == {"before"}
    assert set(KINDS) - set(kinds_on(CASES["pp_dp_tp"], 5)) == {"head"}
    assert set(KINDS) - set(kinds_on(CASES["pp_dp_tp"], 6)) == {"embedding"}
    assert [layer_on(CASES["pp_gpipe"], rank) for rank in (0, 3, 4, 7)] == [1, 1, 3, 3]
