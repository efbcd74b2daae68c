"""Two hosts: copies go to the other one, and what a lost host held comes back from there, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from scout_core.trust.available import outlives, still_on_disk, worst_loss
from scout_core.trust.channel import partners
from scout_core.trust.states import TrustState
from tests.distributed.pool import RankPool
from tests.trust.ranks import ask_on_hosts, forget_memory, lose_host, train, train_on_hosts
from tests.trust.test_loop import same

pytestmark = pytest.mark.distributed

HOSTS = ["a", "a", "b", "b"]
ONE = ["a"] * 4
SCRATCH = ("RESTART_FROM_SCRATCH", "none", None)


@pytest.fixture(scope="module")
def healthy(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return pool.run(train, tmp_path_factory.mktemp("healthy"), 8, gemini=False)


@pytest.mark.parametrize("survivors", ["memory", "disk"])
@pytest.mark.parametrize("lost", ["a", "b"])
def test_what_a_lost_host_held_comes_back_from_the_other(
    pool: RankPool, healthy: list[dict[str, Any]], tmp_path: Path, lost: str, survivors: str
) -> None:
    pool.run(train_on_hosts, tmp_path, 5, HOSTS, flush_interval=1)
    disks = tmp_path / "disks"
    held = {path.name.split("-held-by-")[1]: path.parent.name for path in disks.rglob("step-000000004-held-by-*")}
    for holder, owner in held.items():
        assert HOSTS[int(holder)] != HOSTS[int(owner.removeprefix("rank-"))]
    assert len(held) == 4
    pool.run(lose_host, HOSTS, lost)
    shutil.rmtree(disks / lost)
    if survivors == "memory":
        shutil.rmtree(disks)
    else:
        pool.run(forget_memory)
    ended = pool.run(train_on_hosts, tmp_path, 8, HOSTS, flush_interval=1)
    pool.run(forget_memory)
    assert [one["start"] for one in ended] == [4] * 4, ended[0]["reports"]
    assert same(ended, healthy)


@pytest.mark.parametrize(
    ("hosts", "more", "unreachable", "excluded"),
    [
        (HOSTS, {"flush_interval": 1}, ("RECOVERY_VERIFIED", "gemini", 6), ("RECOVERY_VERIFIED", "gemini", 6)),
        (HOSTS, {"flush_interval": 0}, SCRATCH, SCRATCH),  # in memory only: nobody can promise it
        (HOSTS, {"flush_interval": 1, "replicate": False}, SCRATCH, SCRATCH),
        (ONE, {"flush_interval": 1}, ("RECOVERY_VERIFIED", "gemini", 6), SCRATCH),  # the one host is to be left out
    ],
)
def test_without_asking_a_rank_counts_on_what_all_had_on_disk_and_the_loss_leaves(
    pool: RankPool, tmp_path: Path, hosts: list[str], more: Any, unreachable: Any, excluded: Any
) -> None:
    ended = pool.run(ask_on_hosts, tmp_path, 8, hosts, ["a"], **more)
    assert ended == [[unreachable, excluded]] * 4


def test_placement_and_loss() -> None:
    assert [partners(HOSTS, rank)[0] for rank in range(4)] == [2, 3, 0, 1]
    assert outlives(HOSTS, 2, ["a"]) and not outlives(HOSTS, 1, ["a"]) and not outlives(HOSTS, 0, ["b"])
    assert not outlives(HOSTS, 2, ["a", "b"]) and outlives(HOSTS, 0, [])
    assert worst_loss(HOSTS, 0, 2) and not worst_loss(HOSTS, 0, 1) and worst_loss(["a"] * 4, 0, 0)


def test_what_is_known_to_be_on_disk_is_what_pruning_leaves() -> None:
    verified, latest, candidate = TrustState.RECOVERY_VERIFIED, TrustState.LATEST_GEMINI, TrustState.CANDIDATE
    states = {4: verified, 8: candidate, 10: latest, 12: latest, 14: latest}
    known: tuple[int, ...] = ()
    for step in states:
        known = still_on_disk(known, step, states)
    assert known == (4, 8, 12, 14)
    assert still_on_disk(known, None, {**states, 8: TrustState.REJECTED}) == (4, 12, 14)
