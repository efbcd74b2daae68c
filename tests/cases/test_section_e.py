"""Checkpoint cases from public reports (section E, C02, F18, F19). Others of the section: tests/trust, by their ids."""

from __future__ import annotations

import json
import os
import random
import signal
import time
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
from tests.oob.jobs import first_report, running, wait_until
from tests.trust.ranks import forget_memory, train_late, train_with
from tests.trust.slow_storage import SlowLoads, SlowStorage, WriterProcess, train_on

VERIFIED = TrustState.RECOVERY_VERIFIED


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


def test_c02_a_state_that_is_nan_on_every_rank_blames_the_checkpoint(ranks4: RankPool, tmp_path: Path) -> None:
    ranks4.run(train_with, tmp_path, 5, "save", gemini=False)
    ended = ranks4.run(train_with, tmp_path, 7, "save", gemini=False, fault="nan", at=5)
    for one in ended:
        kinds = {report[0] for report in one["reports"]}
        assert "checkpoint_bad" in kinds and "sdc" not in kinds
        assert one["decision"]["exclude_ranks"] == [] and one["decision"]["step"] == 4
    manifests: list[Manifest] = ManifestStore(tmp_path / "manifests").all()[0]
    assert next(m for m in manifests if m.step == 4).failures == 1


def test_e02_e18_a_candidate_is_committed_only_after_its_files_are_whole(ranks4: RankPool, tmp_path: Path) -> None:
    ended = ranks4.run(train_with, tmp_path, 4, "fine", gemini=False)
    assert ended[0]["calls"] == [("save", 2), ("commit", 2), ("save", 4), ("commit", 4)]
    assert ended[3]["calls"] == [("save", 2), ("save", 4)]


def bad(one: dict[str, Any]) -> list[tuple[str, list[int], str]]:
    return [report for report in one["reports"] if report[0] == "checkpoint_bad"]


def test_e06_a_full_disk_on_one_rank_is_told_and_training_goes_on(ranks4: RankPool, tmp_path: Path) -> None:
    ended = ranks4.run(train_with, tmp_path, 7, "save", fault="full", at=3)
    for one in ended:
        assert one["active"] and [report[1] for report in bad(one)] == [[2]] * 3  # two saves and a flush
        assert sum("flushing" in report[2] for report in bad(one)) == 1
    states = {m.step: m.state for m in ManifestStore(tmp_path / "manifests").all()[0]}
    assert states == {2: "RECOVERY_VERIFIED", 4: "REJECTED", 6: "REJECTED"}
    ranks4.run(forget_memory)
    again = ranks4.run(train_with, tmp_path, 8, "save")
    assert [one["start"] for one in again] == [6] * 4  # rank 2's part is in its peer's flush


def test_e15_a_save_that_hangs_on_one_rank_is_its_stall_and_a_slow_one_is_none(tmp_path: Path) -> None:
    with running(train_on, tmp_path, SlowStorage, 4):
        wait_until((tmp_path / "saving-4").exists)
        assert records(tmp_path, "SCOUTFaultReport") == []  # the slow one went by
        report = first_report(tmp_path)
        assert (report["kind"], report["ranks"], report["phase"]) == ("checkpoint_io_stall", [0], "checkpoint")
        assert "save_candidate" in report["message"]
        (tmp_path / "go-4").touch()
        wait_until(lambda: all((tmp_path / f"done-{rank}").exists() for rank in range(4)))
    assert [one["kind"] for one in records(tmp_path, "SCOUTFaultReport")] == ["checkpoint_io_stall"]
    states = {m.step: m.state for m in ManifestStore(tmp_path / "manifests").all()[0]}
    assert states == {2: "RECOVERY_VERIFIED", 4: "RECOVERY_VERIFIED"}


def test_e03_a_writer_that_stops_after_the_header_is_a_stall_and_certifies_nothing(tmp_path: Path) -> None:
    with running(train_on, tmp_path, WriterProcess, 2):
        try:
            report = first_report(tmp_path)
            assert (report["kind"], report["ranks"], report["phase"]) == ("checkpoint_io_stall", [1], "checkpoint")
            pid = int(wait_until((tmp_path / "writer.pid").read_text))
            assert f"child process {pid} is stopped" in report["message"] and report["surface"] == "save_candidate"
            assert report["evidence"]["workers"][str(pid)] == "T"
            assert ManifestStore(tmp_path / "manifests").all()[0] == []
            assert any(path.stat().st_size == 64 for path in (tmp_path / "durable").rglob("rank-00001.pt"))
        finally:
            pid = wait_until(lambda: (tmp_path / "writer.pid").exists() and (tmp_path / "writer.pid").read_text())
            os.kill(int(pid), signal.SIGCONT)  # it goes on, and so does the job
        wait_until(lambda: all((tmp_path / f"done-{rank}").exists() for rank in range(4)))
    assert [m.state for m in ManifestStore(tmp_path / "manifests").all()[0]] == ["RECOVERY_VERIFIED"]


def test_e16_a_load_that_hangs_on_one_rank_is_its_stall_and_the_job_goes_on_from_it(tmp_path: Path) -> None:
    with running(train_on, tmp_path, SlowLoads, 2):
        wait_until(lambda: all((tmp_path / f"done-{rank}").exists() for rank in range(4)))
        assert records(tmp_path, "SCOUTFaultReport") == []
    with running(train_on, tmp_path, SlowLoads, 4):
        report = first_report(tmp_path)
        assert (report["kind"], report["ranks"], report["phase"]) == ("checkpoint_io_stall", [3], "checkpoint")
        assert "read 'load_checkpoint step-000000002-attempt-0, shard of rank 3'" in report["message"]
        (tmp_path / "go-load").touch()
        wait_until(lambda: all((tmp_path / f"start-{rank}-2").exists() for rank in range(4)))
    assert [one["kind"] for one in records(tmp_path, "SCOUTFaultReport")] == ["checkpoint_io_stall"]


def records(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    path = run_dir / "events.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [record for record in found if record["type"] == kind]


def test_e08_files_that_are_seen_late_delay_promotion_and_raise_no_alarm(ranks4: RankPool, tmp_path: Path) -> None:
    ended = ranks4.run(train_late, tmp_path, 4, viewer=0, writer=3, delay_s=0.4)
    assert all(one["active"] and bad(one) == [] for one in ended)
    states = {m.step: m.state for m in ManifestStore(tmp_path / "manifests").all()[0]}
    assert states == {2: "RECOVERY_VERIFIED", 4: "RECOVERY_VERIFIED"}
    again = ranks4.run(train_late, tmp_path, 5, viewer=3, writer=0, delay_s=0.4)  # and late for those who load
    assert all(one["start"] == 4 and bad(one) == [] for one in again)


def test_e08_files_that_are_never_seen_leave_a_candidate_and_name_their_rank(ranks4: RankPool, tmp_path: Path) -> None:
    ended = ranks4.run(train_late, tmp_path, 2, viewer=0, writer=3, delay_s=600)
    for one in ended:
        assert one["active"] and [report[1] for report in bad(one)] == [[3]] and "not visible" in bad(one)[0][2]
    assert [m.state for m in ManifestStore(tmp_path / "manifests").all()[0]] == ["CANDIDATE"]


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
