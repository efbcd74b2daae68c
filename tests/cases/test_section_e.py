"""Checkpoint cases from public reports (section E, C02, F18, F19). Others of the section: tests/trust, by their ids."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from scout_core.trust.channel import JobChannel
from scout_core.trust.durable import DurableCheckpointConfig, TorchSaveCallbacks
from scout_core.trust.manifest import Manifest, ManifestStore, verify
from scout_core.trust.memory import HostMemory
from scout_core.trust.saver import DurableTier, Lineage
from scout_core.trust.selection import Available, Failure, select_recovery
from scout_core.trust.shard import Shards
from scout_core.trust.states import TrustState
from tests.distributed.pool import RankPool
from tests.trust.ranks import train_with

VERIFIED = TrustState.RECOVERY_VERIFIED


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


def tier(folder: Path, run_id: str = "run", topology: str = "t") -> DurableTier:
    """Durable checkpoints of a job of one rank, in this process."""
    config = DurableCheckpointConfig(callbacks=TorchSaveCallbacks(), folder=folder / "durable", visibility_s=0.5)
    lineage = Lineage(run_id=run_id, attempt=0, topology_digest=topology, environment={})
    return DurableTier(config, folder / "manifests", JobChannel(10, "test"), lineage)


def save(durable: DurableTier, step: int, state: TrustState = VERIFIED) -> None:
    assert durable.save(step, state, lambda: {"step": step, "state": {"w": torch.full((512,), float(step))}}) == []


def choose(durable: DurableTier, step: int = 100, **more: Any) -> Any:
    found = [
        Available(
            source="durable",
            step=m.step,
            state=TrustState(m.state),
            run_id=m.run_id,
            topology_digest=m.topology_digest,
            complete=not verify(m),
            checkpoint_id=m.checkpoint_id,
            load_failures=m.failures,
        )
        for m in durable.store.all()[0]
    ]
    return select_recovery(Failure(kind="sdc", step=step, **{"run_id": "run", "topology_digest": "t", **more}), found)


def test_e01_a_kill_inside_save_leaves_the_older_one(tmp_path: Path) -> None:
    durable = tier(tmp_path)
    save(durable, 10)

    class Killed(TorchSaveCallbacks):
        def save_candidate(self, context: Any, state: Any) -> Any:
            path = context.folder / "rank-00000.pt"
            context.folder.mkdir(parents=True)
            path.write_bytes(b"PK\x03\x04" + bytes(100))
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        config = DurableCheckpointConfig(callbacks=Killed(), folder=tmp_path / "durable")
        lineage = Lineage(run_id="run", attempt=0, topology_digest="t", environment={})
        DurableTier(config, tmp_path / "manifests", JobChannel(10, "test"), lineage).save(20, VERIFIED, dict)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    assert (tmp_path / "durable" / "step-000000020-attempt-0").exists()
    assert choose(durable).step == 10


def test_e07_a_higher_step_of_another_run_is_never_taken(tmp_path: Path) -> None:
    save(tier(tmp_path, run_id="old"), 5000)
    durable = tier(tmp_path)
    save(durable, 400)
    assert choose(durable, step=6000).step == 400


def test_e11_another_world_size_or_topology_is_refused(tmp_path: Path) -> None:
    durable = tier(tmp_path)
    save(durable, 10)
    decision = choose(durable, topology_digest="of two ranks")
    assert decision.mode == "RESTART_FROM_SCRATCH" and "topology" in decision.reason


def test_e12_a_flipped_bit_is_found_before_the_load(tmp_path: Path) -> None:
    durable = tier(tmp_path)
    save(durable, 10)
    save(durable, 20)
    manifest = durable.store.all()[0][0]
    path = Path(manifest.folder) / manifest.files[0].path
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    state, problems = durable.load(manifest.checkpoint_id, None)
    assert state is None and "rank 0" in problems[0] and str(path) in problems[0]
    assert choose(durable).step == 10


def test_e14_c02_a_checkpoint_that_fails_twice_is_quarantined_and_the_older_one_taken(tmp_path: Path) -> None:
    durable = tier(tmp_path)
    save(durable, 10)
    save(durable, 20)
    for _ in range(2):  # each attempt dies in or soon after the load: it never gets to a clean check
        chosen = choose(durable)
        assert chosen.step == 20
        durable.begin_load(chosen.checkpoint_id)
    problems = durable.quarantine_failed()
    assert [p.step for p in problems] == [20] and "not the hardware" in problems[0].message
    assert choose(durable).step == 10
    assert {m.step: m.state for m in durable.store.all()[0]} == {10: "RECOVERY_VERIFIED", 20: "QUARANTINED"}


def test_a_proven_load_does_not_count(tmp_path: Path) -> None:
    durable = tier(tmp_path)
    save(durable, 20)
    for _ in range(3):
        chosen = choose(durable)
        durable.begin_load(chosen.checkpoint_id)
        durable.proven(chosen.checkpoint_id)
    assert durable.quarantine_failed() == [] and choose(durable).step == 20


def test_c02_a_state_that_is_nan_on_every_rank_blames_the_checkpoint(pool: RankPool, tmp_path: Path) -> None:
    pool.run(train_with, tmp_path, 5, "save", gemini=False)
    ended = pool.run(train_with, tmp_path, 7, "save", gemini=False, fault="nan", at=5)
    for one in ended:
        kinds = {report[0] for report in one["reports"]}
        assert "checkpoint_bad" in kinds and "sdc" not in kinds
        assert one["decision"]["exclude_ranks"] == [] and one["decision"]["step"] == 4
    manifests: list[Manifest] = ManifestStore(tmp_path / "manifests").all()[0]
    assert next(m for m in manifests if m.step == 4).failures == 1


def test_e02_e18_a_candidate_is_committed_only_after_its_files_are_whole(pool: RankPool, tmp_path: Path) -> None:
    ended = pool.run(train_with, tmp_path, 4, "fine", gemini=False)
    assert ended[0]["calls"] == [("save", 2), ("commit", 2), ("save", 4), ("commit", 4)]
    assert ended[3]["calls"] == [("save", 2), ("save", 4)]


def test_a_dynamic_candidate_is_promoted_on_disk_and_rejected_with_its_cycle(tmp_path: Path) -> None:
    durable = tier(tmp_path)
    save(durable, 10, TrustState.CANDIDATE)
    save(durable, 20, TrustState.CANDIDATE)
    durable.settle(VERIFIED, (10,), "")
    durable.settle(TrustState.REJECTED, (20,), "corruption found at step 30")
    assert choose(durable).step == 10
    assert {m.step: m.state for m in durable.store.all()[0]} == {10: "RECOVERY_VERIFIED", 20: "REJECTED"}


def _save_for_ever(folder: Path) -> None:
    durable = tier(folder)
    shards = Shards(folder / "gemini", run_id="run", topology_digest="t", world_size=1)
    memory = HostMemory(owner=0)
    known = [m.step for m in durable.store.all()[0]]
    for step in range(max(known, default=0) + 1, 1 << 30):
        save(durable, step)
        state = {"step": step, "w": torch.full((4096,), float(step))}
        shards.write(memory.begin(step, VERIFIED, state).finish(), attempt=0, holder=0)
        shards.prune(0, 0)


def _after_a_kill(folder: Path) -> None:
    """A verified checkpoint loads from both tiers, whole, of one step and of this run."""
    durable = tier(folder)
    chosen = choose(durable, step=1 << 30)
    assert chosen.available
    state, problems = durable.load(chosen.checkpoint_id, None)
    assert problems == [] and state["step"] == chosen.step
    assert torch.equal(state["state"]["w"], torch.full((512,), float(chosen.step)))
    shards = Shards(folder / "gemini", run_id="run", topology_digest="t", world_size=1)
    good, _ = shards.find(0)
    newest = max(good, key=lambda place: good[place].step)
    copy = shards.read(newest, 0).load()
    assert torch.equal(copy["w"], torch.full((4096,), float(copy["step"])))


def _campaign(folder: Path, kills: int) -> None:
    draw = random.Random(3)
    child_folder = folder
    for index in range(kills):
        before = len(list((folder / "gemini").glob("rank-*/step-*/state.json")))
        child = os.fork()
        if child == 0:
            _save_for_ever(child_folder)
        deadline = time.monotonic() + 30
        while before == 0 and time.monotonic() < deadline:  # the first child gets to have one
            before = len(list((folder / "gemini").glob("rank-*/step-*/state.json")))
        moment = time.monotonic() + draw.random() * 0.08
        while time.monotonic() < moment:
            pass
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        _after_a_kill(folder)
        assert index < kills


def test_kills_at_random_moments_leave_a_verified_checkpoint(tmp_path: Path) -> None:
    _campaign(tmp_path, 15)


@pytest.mark.slow
def test_200_kills_at_random_moments_leave_a_verified_checkpoint(tmp_path: Path) -> None:
    _campaign(tmp_path, 200)
