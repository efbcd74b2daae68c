"""Whose callbacks write durable checkpoints: the caller's, else the adapter's, else a refusal at attach; and what those
of the manifest writer may not do.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed import barrier, new_group

import scout_core
from scout_core.pytorch import PyTorchAdapter
from scout_core.trust.channel import JobChannel
from scout_core.trust.durable import (
    CallbackContractError,
    CheckpointContext,
    DistributedCheckpointCallbacks,
    DurableCallbacks,
    DurableCheckpointConfig,
    GuardedCallbacks,
    TorchSaveCallbacks,
)
from scout_core.trust.saver import DurableTier, Lineage
from scout_core.trust.states import TrustState


class FrameworkAdapter(PyTorchAdapter):
    """An adapter whose framework has checkpoints of its own."""

    def durable_callbacks(self) -> DurableCallbacks:
        return TorchSaveCallbacks()


def attach(tmp_path: Path, kind: type[PyTorchAdapter]) -> scout_core.Scout:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = scout_core.ScoutConfig.build(run_dir=tmp_path, oob_enabled=False)
    adapter = kind(model, optimizer, settings.replay)
    durable = DurableCheckpointConfig(folder=tmp_path / "durable")
    return scout_core.attach(model, optimizer, settings, adapter=adapter, durable=durable)


def test_the_adapters_own_are_used_when_the_caller_gives_none(tmp_path: Path) -> None:
    with attach(tmp_path, FrameworkAdapter) as scout:
        assert scout.active


def test_without_any_attach_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(scout_core.ConfigError, match="callbacks=TorchSaveCallbacks"):
        attach(tmp_path, PyTorchAdapter)


@pytest.fixture
def job_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _world() -> Any:
    return dist.distributed_c10d._get_default_group()


COLLECTIVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": lambda t: dist.all_reduce(t),
    "barrier imported by name": lambda t: barrier(),
    "all_gather_coalesced": lambda t: dist.all_gather_coalesced([[t.clone()]], [t]),
    "functional": lambda t: functional.all_reduce(t, "sum", _world()),
    "of a group": lambda t: _world().allreduce([t]).wait(),
    "objects": lambda t: dist.broadcast_object_list([1], 0),
    "monitored_barrier": lambda t: dist.monitored_barrier(),
    "isend": lambda t: dist.isend(t, 0),
    "irecv": lambda t: dist.irecv(t),
    "new_group imported by name": lambda t: new_group([0]),
    "new_subgroups": lambda t: dist.new_subgroups(1),
}


class Asking(TorchSaveCallbacks):
    """Does something in both callbacks of the manifest writer."""

    def __init__(self, do: Callable[[], Any]) -> None:
        self.do = do

    def commit_candidate(self, context: CheckpointContext) -> None:
        self.do()

    def quarantine_candidate(self, context: CheckpointContext) -> None:
        self.do()


def both(tmp_path: Path, do: Callable[[], Any]) -> list[Callable[[], None]]:
    guarded = GuardedCallbacks(Asking(do), rank=0, writer=0)
    context = CheckpointContext(checkpoint_id="c", step=1, folder=tmp_path, rank=0, world_size=1)
    return [lambda: guarded.commit(context), lambda: guarded.quarantine(context)]


@pytest.mark.parametrize("how", list(COLLECTIVES))
def test_the_writers_callbacks_are_refused_collectives(job_of_one: None, tmp_path: Path, how: str) -> None:
    tensor = torch.ones(2)
    for call in both(tmp_path, lambda: COLLECTIVES[how](tensor)):
        with pytest.raises(CallbackContractError, match="it runs on one rank"):
            call()
    dist.all_reduce(tensor)  # outside them everything is as it was
    new_group([0])
    assert tensor.tolist() == [1, 1]


def test_the_writers_callbacks_may_work_on_tensors_and_other_threads_may_talk(job_of_one: None, tmp_path: Path) -> None:
    done = []

    def talk() -> None:
        dist.all_reduce(torch.ones(1))
        done.append(new_group([0]))

    def work() -> None:
        torch.save(torch.ones(3) * 2, tmp_path / "w.pt")
        other = threading.Thread(target=talk)
        other.start()
        other.join(20)

    for call in both(tmp_path, work):
        call()
    assert len(done) == 2 and torch.load(tmp_path / "w.pt", weights_only=True).tolist() == [2, 2, 2]


class Nested(TorchSaveCallbacks):
    """As a framework may write: without a word to the disk, in folders of its own."""

    def save_candidate(self, context: CheckpointContext, state: Any) -> Sequence[Path]:
        path = context.folder / "model" / "part.bin"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x" * 100)
        return [Path("model") / "part.bin"]


@pytest.mark.parametrize("callbacks", [TorchSaveCallbacks(), DistributedCheckpointCallbacks(), Nested()])
def test_files_and_folders_are_on_stable_storage_before_a_manifest_says_so(
    tmp_path: Path, callbacks: DurableCallbacks
) -> None:
    synced: list[Path] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    config = DurableCheckpointConfig(callbacks=callbacks, folder=tmp_path / "durable")
    lineage = Lineage(run_id="run", attempt=0, topology_digest="t", environment={})
    durable = DurableTier(config, tmp_path / "manifests", JobChannel(10, "test"), lineage)
    with patch.object(os, "fsync", note):
        state = {"step": 5, "state": {"w": torch.ones(9)}}
        assert durable.save(5, TrustState.RECOVERY_VERIFIED, lambda: state) == []
    [manifest] = durable.store.all()[0]
    before = synced[: next(i for i, path in enumerate(synced) if path.is_relative_to(tmp_path / "manifests"))]
    folder = Path(manifest.folder)
    files = [folder / file.path for file in manifest.files]
    assert files and {*files, *(path.parent for path in files), folder, folder.parent} <= set(before)
