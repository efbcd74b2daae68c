"""Segments and their owners; what a publisher writes and a reader sees; the patches of torch.distributed."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from scout_core.oob.channel import Channel, ChannelBusy, Scope, reclaim, sweep
from scout_core.oob.collectives import CollectiveWatch
from scout_core.oob.fingerprints import describe, digest_of
from scout_core.oob.layout import GROUPS, RING, SIZE, Activity, CallState, Farewell, Phase
from scout_core.oob.reader import read_farewell, read_groups, read_progress, read_workers
from scout_core.oob.writer import Publisher

SCOPE = Scope(run="test", attempt=0, pid=1, peers=(0, 1), rank=0)
_OWNER = """
import sys, time
from pathlib import Path
from scout_core.oob.channel import Channel, Scope
c = Channel.create(Scope(run="test", attempt=0, pid=1, peers=(0, 1), rank=0), world=2, folder=Path(sys.argv[1]))
print("made", flush=True)
time.sleep(60)
"""


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Channel]:
    made = Channel.create(SCOPE, world=2, folder=tmp_path)
    yield made
    made.close(unlink=True, folder=tmp_path)


def test_a_live_owner_keeps_its_segment_and_a_dead_ones_is_reclaimed(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", _OWNER, str(tmp_path)], stdout=subprocess.PIPE)
    assert owner.stdout is not None and owner.stdout.readline() == b"made\n"
    with pytest.raises(ChannelBusy):
        Channel.create(SCOPE, world=2, folder=tmp_path)
    assert not reclaim(tmp_path / SCOPE.name()) and sweep(tmp_path) == ()
    owner.kill()
    owner.wait()
    Channel.create(SCOPE, world=2, folder=tmp_path).close(unlink=False)
    assert (tmp_path / SCOPE.name()).exists()


def test_sweep_removes_only_segments_of_the_dead(tmp_path: Path, channel: Channel) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER.replace("rank=0", "rank=1"), str(tmp_path)], stdout=subprocess.PIPE
    )
    assert owner.stdout is not None and owner.stdout.readline() == b"made\n"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    dead = Scope(run="test", attempt=0, pid=1, peers=(0, 1), rank=1).name()
    assert sweep(tmp_path) == (dead,)
    assert [path.name for path in tmp_path.iterdir()] == [channel.name]


def test_a_reader_with_another_token_is_refused(tmp_path: Path, channel: Channel) -> None:
    with pytest.raises(ChannelBusy):
        Channel.open(channel.name, b"x" * 16, folder=tmp_path)
    Channel.open(channel.name, channel.token, folder=tmp_path).close(unlink=False)


def test_closing_never_removes_a_successors_segment(tmp_path: Path, channel: Channel) -> None:
    (tmp_path / channel.name).unlink()
    successor = Channel.create(SCOPE, world=2, folder=tmp_path)
    channel.close(unlink=True, folder=tmp_path)
    assert (tmp_path / successor.name).exists()
    successor.close(unlink=True, folder=tmp_path)


def test_what_is_published_is_read(channel: Channel) -> None:
    p = Publisher(channel.memory, (0, 1))
    p.boundary(3)
    p.begin_pass()
    p.layer(2)
    p.enter(Activity.DATALOADER, "train", 5)
    p.workers([11, 12])
    p.farewell(Farewell.EXCEPTION, "why")
    seen = read_progress(channel.memory)
    assert (seen.step, seen.micro, seen.stage, seen.phase) == (3, 1, 2, Phase.TRAIN)
    assert (seen.activity, seen.name, seen.usual_ns) == (Activity.DATALOADER, "train", 5)
    assert read_workers(channel.memory) == (11, 12) and read_farewell(channel.memory) == (Farewell.EXCEPTION, "why")
    p.leave()
    assert read_progress(channel.memory).activity is Activity.NONE


def test_a_collectives_error_that_training_survived_is_no_farewell(channel: Channel) -> None:
    p = Publisher(channel.memory, (0, 1))
    p.farewell(Farewell.COLLECTIVE_FAILED, "all_reduce: timed out")
    assert read_farewell(channel.memory) == (Farewell.COLLECTIVE_FAILED, "all_reduce: timed out")
    p.boundary(11)
    assert read_farewell(channel.memory) == (Farewell.NONE, "")
    p.farewell(Farewell.EXCEPTION, "why")
    p.boundary(12)
    assert read_farewell(channel.memory) == (Farewell.EXCEPTION, "why")


def test_rings_keep_the_newest_calls_of_each_group(channel: Channel) -> None:
    p = Publisher(channel.memory, (0, 1))
    for i in range(RING + 10):
        slot, sequence = p.begin_call((0, 1), describe("all_reduce", (i % 3,), "a.py:1"))
        p.end_call(slot, sequence, CallState.RETURNED)
    p.begin_call((1, 3, 4), describe("barrier", (), "a.py:2"))
    whole, part = read_groups(channel.memory).values()
    assert whole.issued == RING + 10 and [c.sequence for c in whole.calls] == list(range(11, RING + 11))
    assert whole.calls[-1].text == f"all_reduce({(RING + 9) % 3}) at a.py:1" and whole.calls[-1].state == "returned"
    assert part.members == (1, 3, 4) and part.calls[0].state == "inside"


def test_more_groups_than_slots_and_more_texts_than_room_stay_bounded(channel: Channel) -> None:
    p = Publisher(channel.memory, (0, 1))
    for i in range(3 * GROUPS):
        p.end_call(*p.begin_call((0, i + 1), describe("barrier", (i,), "a.py")), CallState.RETURNED)
    for i in range(2000):
        p.end_call(*p.begin_call((0, 1), describe("all_reduce", (i,), "a.py")), CallState.RETURNED)
    assert len(read_groups(channel.memory)) == GROUPS and len(channel.memory) == SIZE


def test_a_group_counts_on_when_others_took_its_slot(channel: Channel) -> None:
    """Its other members may be in fewer groups: their numbers are not to part, and a wait is to show its own group."""
    p = Publisher(channel.memory, (0, 1))
    groups = [(0, other) for other in range(1, GROUPS + 3)]
    what = describe("barrier", (), "a.py")
    for _ in range(3):
        started = [p.begin_call(members, what) for members in groups]
        for call in started:
            p.end_call(*call, CallState.RETURNED)
    seen = read_groups(channel.memory)
    assert [(group.issued, group.calls[-1].sequence) for group in seen.values()] == [(3, 3)] * GROUPS
    assert [group.calls[-1].state for group in seen.values()] == ["returned"] * GROUPS
    lost = next(call for call in started if call[0] not in {group.members for group in seen.values()})
    p.wait_for(*lost)
    now = read_progress(channel.memory)
    assert (read_groups(channel.memory)[now.slot].members, now.sequence) == lost


def test_a_reader_never_sees_half_a_record(channel: Channel) -> None:
    """Every field of one write carries the same number."""
    p = Publisher(channel.memory)
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            p._micro = p._stage = p._sequence = p._step = (p._step + 1) % 1_000_000
            p.publish()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3000):
            seen = read_progress(channel.memory)
            assert seen.step == seen.micro == seen.stage == seen.sequence
    finally:
        done.set()
        writer.join()


def test_the_digest_depends_on_calls_and_their_order() -> None:
    a, b = describe("all_reduce", (1,), "x").fingerprint, describe("all_reduce", (2,), "x").fingerprint
    world = (0, 1)
    assert digest_of(digest_of(0, world, a), world, b) != digest_of(digest_of(0, world, b), world, a)
    assert describe("all_reduce", (1,), "x").fingerprint == describe("all_reduce", (1,), "y").fingerprint


@pytest.fixture
def alone() -> Iterator[None]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_patches_see_public_collectives_and_come_off(channel: Channel, alone: None) -> None:
    before = {name: getattr(dist, name) for name in ("all_reduce", "barrier", "all_gather_object")}
    wait = dist.Work.wait
    p = Publisher(channel.memory, (0,))
    watch = CollectiveWatch(p)
    dist.all_reduce(torch.ones(3), op=dist.ReduceOp.MAX)
    work = dist.all_reduce(torch.ones(2), async_op=True)
    work.wait()
    dist.all_gather_object([None], {"a": 1})
    (group,) = read_groups(channel.memory).values()
    texts = [call.text.partition(" at ")[0] for call in group.calls]
    assert texts == ["all_reduce(float32[3], MAX)", "all_reduce(float32[2], SUM)", "all_gather_object()"]
    assert "test_channel.py" in group.calls[0].text, "the call site"
    with pytest.raises((RuntimeError, ValueError, TypeError)):
        dist.all_reduce("no tensor")
    watch.close()
    assert {name: getattr(dist, name) for name in before} == before and dist.Work.wait is wait


def test_a_destroyed_group_is_let_go(channel: Channel, alone: None) -> None:
    watch = CollectiveWatch(Publisher(channel.memory, (0,)))
    group = dist.new_group([0])
    dist.barrier(group=group)
    assert [seen.members for seen in read_groups(channel.memory).values()] == [(0,)]
    kept = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert kept() is None
    watch.close()


def test_a_forked_child_writes_nowhere(channel: Channel) -> None:
    p = Publisher(channel.memory)
    pid = os.fork()
    if pid == 0:
        p.detach()
        p.boundary(99)
        os._exit(0)
    os.waitpid(pid, 0)
    assert read_progress(channel.memory).step == 0


def _create_and_close(folder: str, rank: int, times: int) -> None:
    for ordinal in range(times):
        scope = Scope(run="r", attempt=0, pid=os.getpid(), peers=(0, 1), rank=rank, ordinal=ordinal)
        channel = Channel.create(scope, world=2, folder=Path(folder))
        assert Path(folder, channel.name).exists(), "a sweep took a live owner's segment"
        channel.close(unlink=True, folder=Path(folder))


def test_sweeps_of_others_never_take_a_segment_that_is_being_made(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    makers = [context.Process(target=_create_and_close, args=(str(tmp_path), rank, 300)) for rank in range(2)]
    for maker in makers:
        maker.start()
    while any(maker.is_alive() for maker in makers):
        sweep(tmp_path)
    assert [maker.exitcode for maker in makers] == [0, 0]
