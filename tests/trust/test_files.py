"""Damaged and foreign records: always refused with the file's name, never loaded, never another exception."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from scout_core.trust.decision import RecoveryDecision
from scout_core.trust.durable import CallbackContractError, CheckpointContext, GuardedCallbacks, TorchSaveCallbacks
from scout_core.trust.files import UntrustedFile, file_digest, read_record, sealed, write_record
from scout_core.trust.manifest import Manifest, ManifestFile, ManifestStore, await_visible, describe, verify
from scout_core.trust.run_record import RunFolder, RunRecord
from scout_core.trust.shard import ShardRecord
from tests.trust.test_gemini import shards, written

FUZZED = 10_000


def checkpoint(folder: Path, step: int = 20, state: Any = "RECOVERY_VERIFIED", **change: Any) -> Manifest:
    place = folder / f"step-{step}"
    place.mkdir(parents=True, exist_ok=True)
    files = []
    for rank in range(4):
        path = place / f"rank-{rank}.pt"
        path.write_bytes(bytes([rank]) * 8192)
        files += describe(rank, place, [path])
    values = {
        "checkpoint_id": f"step-{step}",
        "run_id": "run",
        "attempt": 0,
        "step": step,
        "world_size": 4,
        "topology_digest": "t",
        "environment": {"torch": "2.13"},
        "folder": str(place),
        "state": state,
        "files": tuple(files),
    }
    return Manifest.model_validate({**values, **change})


def decision(**change: Any) -> RecoveryDecision:
    values: dict[str, Any] = {
        "mode": "RECOVERY_VERIFIED",
        "source": "gemini",
        "step": 20,
        "available": True,
        "reason": "r",
        "failure_kind": "sdc",
        "run_id": "run",
    }
    return RecoveryDecision(**{**values, **change})


def mutate(data: bytes, draw: random.Random) -> bytes:
    """One of the ways files go wrong: bits, holes, cuts, repeats, foreign bytes, edited values."""
    raw = bytearray(data)
    kind = draw.randrange(7)
    at = draw.randrange(len(raw))
    if kind == 0:
        raw[at] ^= 1 << draw.randrange(8)
    elif kind == 1:
        raw[at : at + draw.randrange(1, 64)] = bytes(draw.randrange(1, 64))
    elif kind == 2:
        del raw[at:]
    elif kind == 3:
        raw[at:at] = raw[: draw.randrange(1, 80)]
    elif kind == 4:
        raw = bytearray(draw.randbytes(draw.randrange(200)))
    elif kind == 5:
        raw = bytearray(b"[" * draw.randrange(1, 4000))
    else:
        outer = json.loads(data)
        body = outer["record"]
        body[draw.choice(sorted(body))] = draw.choice([None, -1, 1 << 70, "x", [], {}, True, 1.5])
        raw = bytearray(json.dumps(outer).encode())
    return bytes(raw)


def attempted(path: Path, kind: Any) -> tuple[Any, str]:
    """What `read_record` gave, or why not; other exceptions pass."""
    try:
        return read_record(path, kind), ""
    except UntrustedFile as error:
        return None, str(error)


def test_fuzzed_records_are_refused_by_name(tmp_path: Path) -> None:
    draw = random.Random(0)
    place = written(tmp_path / "shards", state={"w": torch.ones(3), "lr": [1e-3, (1, None)]})  # one of every kind
    records = [
        (sealed(checkpoint(tmp_path)), Manifest),
        (sealed(decision()), RecoveryDecision),
        ((place / "state.json").read_bytes(), ShardRecord),
        (sealed(RunRecord(run_id="run", attempt=1, judged={"3@0": "REJECTED"})), RunRecord),
    ]
    path = tmp_path / "record.json"
    tried = 0
    while tried < FUZZED:
        data, kind = records[tried % 4]
        changed = mutate(data, draw)
        if changed == data:
            continue
        tried += 1
        path.write_bytes(changed)
        found, why = attempted(path, kind)
        # JSON has many spellings of one value; a value that is accepted must be the one that was sealed
        assert str(path) in why if found is None else sealed(found) == data


def test_fuzzed_shard_data_is_refused_by_name(tmp_path: Path) -> None:
    draw = random.Random(1)
    place = written(tmp_path)
    data = place / "state.safetensors"
    good = data.read_bytes()
    for _ in range(500):
        raw = bytearray(good)
        kind = draw.randrange(3)
        at = draw.randrange(len(raw))
        if kind == 0:
            raw[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del raw[at:]
        else:
            raw += b"x"
        data.write_bytes(raw)
        with pytest.raises(UntrustedFile, match=r"state\.safetensors"):
            shards(tmp_path).read(place, 2)


def test_a_manifest_under_another_name_is_refused(tmp_path: Path) -> None:
    store = ManifestStore(tmp_path)
    store.write(checkpoint(tmp_path))
    store.path("step-20").rename(store.path("step-30"))
    good, bad = store.all()
    assert not good and "step-30" in str(bad[0])


@pytest.mark.parametrize("damage", ["flip", "short", "missing", "empty"])
def test_e01_e12_e16_a_damaged_checkpoint_names_the_shard(tmp_path: Path, damage: str) -> None:
    manifest = checkpoint(tmp_path)
    path = Path(manifest.folder) / "rank-1.pt"
    raw = bytearray(path.read_bytes())
    if damage == "flip":
        raw[4000] ^= 4
    elif damage == "short":
        raw = raw[:100]
    elif damage == "empty":
        raw = bytearray()
    path.write_bytes(raw)
    if damage == "missing":
        path.unlink()
    problems = verify(manifest)
    assert len(problems) == 1 and "rank-1.pt" in problems[0] and "rank 1" in problems[0]


def test_e10_a_missing_shard_is_named(tmp_path: Path) -> None:
    whole = checkpoint(tmp_path)
    short = whole.model_copy(update={"files": tuple(f for f in whole.files if f.rank != 2)})
    assert verify(short) == ["the shard of rank 2 is missing"]


def test_e08_files_that_appear_late_are_waited_for_up_to_a_bound(tmp_path: Path) -> None:
    manifest = checkpoint(tmp_path)
    path = Path(manifest.folder) / "rank-0.pt"
    hidden = path.with_suffix(".hidden")
    path.rename(hidden)
    waits: list[float] = []

    def appear(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            hidden.rename(path)

    assert await_visible(Path(manifest.folder), manifest.files, 60.0, sleep=appear) == []
    path.rename(hidden)
    late = await_visible(Path(manifest.folder), manifest.files, 0.0)
    assert len(late) == 1 and "rank-0.pt" in late[0]


def test_e02_the_last_verified_checkpoint_may_not_be_pruned(tmp_path: Path) -> None:
    store = ManifestStore(tmp_path / "manifests")
    for step, state in ((10, "RECOVERY_VERIFIED"), (20, "RECOVERY_VERIFIED"), (30, "CANDIDATE"), (40, "REJECTED")):
        store.write(checkpoint(tmp_path, step, state))
    assert [store.may_prune(f"step-{step}") for step in (10, 20, 30, 40)] == [True, False, False, True]


def test_a_record_that_is_no_file_of_this_run_begins_a_new_lineage(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    first, known, _ = folder.begin()
    again, known_again, _ = folder.begin()
    assert not known and known_again and again.run_id == first.run_id and again.attempt == 1
    folder.decide(decision(run_id="foreign"))
    taken, _, (problem,) = folder.read_decisions(first.run_id)
    assert taken is None and problem is not None and "foreign" in problem
    folder.run_path.write_bytes(b"{}")
    other, known, problem = folder.begin()
    assert other.run_id != first.run_id and not known and problem is not None


def test_a_decision_serves_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.decide(decision())
    folder.decide(decision(), rank=2)
    assert folder.read_decisions("run") == (decision(), [decision()], [])
    folder.take_decisions()
    assert folder.read_decisions("run") == (None, [], [])


def test_a_kill_in_a_write_leaves_the_old_record_or_the_new(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_record(path, decision(step=1))
    draw = random.Random(2)
    for _ in range(40):
        child = os.fork()
        if child == 0:
            for step in range(1, 1 << 20):
                write_record(path, decision(step=step, reason="x" * draw.randrange(20000)))
        deadline = time.monotonic() + draw.random() * 0.03
        while time.monotonic() < deadline:
            assert read_record(path, RecoveryDecision).step is not None
        os.kill(child, 9)
        os.waitpid(child, 0)
        assert read_record(path, RecoveryDecision).step is not None


def test_the_writers_callbacks_refuse_other_ranks(tmp_path: Path) -> None:
    guarded = GuardedCallbacks(TorchSaveCallbacks(), rank=1, writer=0)
    context = CheckpointContext(checkpoint_id="c", step=1, folder=tmp_path, rank=1, world_size=4)
    for call in (guarded.commit, guarded.quarantine):
        with pytest.raises(CallbackContractError, match="manifest writer"):
            call(context)


def test_file_digests_see_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"a" * 100)
    before = file_digest(path)
    path.write_bytes(b"a" * 99 + b"b")
    assert file_digest(path) != before
    assert ManifestFile(rank=0, path="f", bytes=100, digest=before).digest == before
