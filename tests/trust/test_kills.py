"""SIGKILL of real ranks inside save, commit, rename, replicate and flush: a verified state is always there after it.

The long campaign is cut by `SCOUT_KILLS=N` (200) and `SCOUT_KILL_SHARES=N` (1) jobs of 4 ranks side by side, each with
a run folder and random moments of its own.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.distributed.pool import RankPool
from tests.trust.campaign import RANKS, campaign, healthy, lines

pytestmark = pytest.mark.distributed


def judge(run_dir: Path, kills: int, seed: int) -> int:
    """Every start after a kill had state to load, and every digest is that of the undisturbed run at its step.

    Returns how many starts after a kill were seen.
    """
    run_dir.mkdir(exist_ok=True)
    starts = campaign(run_dir, kills, seed)
    assert len(starts) == kills and all(step > 0 for _, step in starts), starts
    told = [lines(run_dir, rank) for rank in range(RANKS)]
    last = max(step for rank in told for _, step, _ in rank)
    with RankPool(RANKS) as pool:
        expected = pool.run(healthy, last, timeout=600.0)
    for rank in range(RANKS):
        wrong = [one for one in told[rank] if one[1] and one[2] != expected[rank][one[1] - 1]]
        assert not wrong, (rank, wrong[:3])
    return len(starts)


def test_kills_inside_each_phase_leave_a_verified_state_on_real_ranks(tmp_path: Path) -> None:
    judge(tmp_path, 5, seed=6)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_200_kills_inside_the_phases_leave_a_verified_state_on_real_ranks(tmp_path: Path) -> None:
    kills, shares = int(os.environ.get("SCOUT_KILLS", "200")), int(os.environ.get("SCOUT_KILL_SHARES", "1"))
    sizes = [kills // shares + (share < kills % shares) for share in range(shares)]
    with ProcessPoolExecutor(shares, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(judge, tmp_path / str(share), size, share) for share, size in enumerate(sizes) if size]
        assert sum(job.result() for job in jobs) == kills
