"""SIGKILL of real ranks inside save, commit, rename, replicate and flush: a verified state is always there after it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.pool import RankPool
from tests.trust.campaign import RANKS, campaign, healthy, lines

pytestmark = pytest.mark.distributed


def judge(run_dir: Path, kills: int) -> None:
    """Every start after a kill had state to load, and every digest is that of the undisturbed run at its step."""
    starts = campaign(run_dir, kills, seed=kills)
    assert len(starts) == kills - 1 and all(step > 0 for _, step in starts), starts
    told = [lines(run_dir, rank) for rank in range(RANKS)]
    last = max(step for rank in told for _, step, _ in rank)
    with RankPool(RANKS) as pool:
        expected = pool.run(healthy, last, timeout=600.0)
    for rank in range(RANKS):
        wrong = [one for one in told[rank] if one[1] and one[2] != expected[rank][one[1] - 1]]
        assert not wrong, (rank, wrong[:3])


def test_kills_inside_each_phase_leave_a_verified_state_on_real_ranks(tmp_path: Path) -> None:
    judge(tmp_path, 6)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_200_kills_inside_the_phases_leave_a_verified_state_on_real_ranks(tmp_path: Path) -> None:
    judge(tmp_path, 200)
