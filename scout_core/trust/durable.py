"""Durable checkpoints: four callbacks of the framework, and what each may do, enforced."""

from __future__ import annotations

import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.utils._python_dispatch import TorchDispatchMode

from scout_core.trust.files import sync_folder
from scout_core.trust.tree import flatten, rebuild


class CallbackContractError(RuntimeError):
    """A callback did what its row of the contract forbids."""


@dataclass(frozen=True, kw_only=True)
class CheckpointContext:
    """What a callback is told. `folder` is the one place where the files of this checkpoint belong."""

    checkpoint_id: str
    step: int
    folder: Path
    rank: int
    world_size: int
    reason: str = ""


class DurableCallbacks(ABC):
    """The framework's side of durable checkpoints.

    | callback | called on | collectives |
    |---|---|---|
    | `save_candidate` | every checkpoint rank | allowed |
    | `load_checkpoint` | every checkpoint rank | allowed |
    | `commit_candidate` | manifest writer only | not allowed: raise `CallbackContractError` |
    | `quarantine_candidate` | manifest writer only | not allowed: raise `CallbackContractError` |

    The bytes must include model, optimizer, scheduler, input position, RNG state and training step.
    """

    @abstractmethod
    def save_candidate(self, context: CheckpointContext, state: Any) -> Sequence[Path]:
        """Write this rank's part under `context.folder`; returns the files, complete when it returns."""

    @abstractmethod
    def load_checkpoint(self, context: CheckpointContext, state: Any) -> Any:
        """This rank's training state. `state` is the present one, for frameworks that load in place."""

    def commit_candidate(self, context: CheckpointContext) -> None:
        """The checkpoint is complete and its manifest published. Nothing by default."""
        return None

    def quarantine_candidate(self, context: CheckpointContext) -> None:
        """The checkpoint must not be used again; `context.reason` says why. Nothing by default."""
        return None


@dataclass(frozen=True, kw_only=True)
class DurableCheckpointConfig:
    """Connects trust to framework-owned checkpoints. `callbacks` None: those of the framework's adapter.

    `interval` counts optimizer steps; a durable checkpoint is written at the first accepted check at or after each
    multiple; under the dynamic rule, at the first that completes a cycle. `manifest_folder` must be as durable as
    `folder`; None: the run's own. `visibility_s` bounds how long a rank waits for other hosts' files to appear,
    `save_timeout_s` how long all wait for the slowest rank to have written or read its own.
    """

    folder: Path
    callbacks: DurableCallbacks | None = None
    interval: int = 1
    manifest_folder: Path | None = None
    visibility_s: float = 30.0
    save_timeout_s: float = 3600.0

    def __post_init__(self) -> None:
        if self.interval < 1:
            raise ValueError(f"interval={self.interval} must be at least 1 optimizer step")
        if self.visibility_s < 0:
            raise ValueError(f"visibility_s={self.visibility_s} must not be negative")
        if self.save_timeout_s <= 0:
            raise ValueError(f"save_timeout_s={self.save_timeout_s} must be above 0")


class TorchSaveCallbacks(DurableCallbacks):
    """One file a rank with `torch.save`, read back with `weights_only=True`: no pickle of foreign classes is run."""

    def save_candidate(self, context: CheckpointContext, state: Any) -> Sequence[Path]:
        context.folder.mkdir(parents=True, exist_ok=True)
        path = context.folder / f"rank-{context.rank:05d}.pt"
        temporary = path.with_suffix(".tmp")
        try:
            torch.save(_plain(state), temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)  # on a full disk every byte counts
        return [path]

    def load_checkpoint(self, context: CheckpointContext, state: Any) -> Any:
        kept = torch.load(context.folder / f"rank-{context.rank:05d}.pt", weights_only=True, map_location="cpu")
        return rebuild(kept["structure"], kept["tensors"])


class DistributedCheckpointCallbacks(DurableCallbacks):
    """`torch.distributed.checkpoint`: every rank's own state under its own key, so that replicas stay comparable."""

    def save_candidate(self, context: CheckpointContext, state: Any) -> Sequence[Path]:
        kept = _plain(state)
        tensors = {f"rank{context.rank}.{i}": tensor for i, tensor in enumerate(kept["tensors"])}
        values: dict[str, Any] = {**tensors, f"rank{context.rank}.structure": _text(kept["structure"])}
        dcp_save(values, checkpoint_id=str(context.folder))
        own = sorted(context.folder.glob(f"__{context.rank}_*.distcp"))
        return [*own, context.folder / ".metadata"] if context.rank == 0 else own

    def load_checkpoint(self, context: CheckpointContext, state: Any) -> Any:
        reader = FileSystemReader(str(context.folder))
        found = reader.read_metadata().state_dict_metadata
        prefix = f"rank{context.rank}."
        values: dict[str, Any] = {
            key: torch.empty(entry.size, dtype=entry.properties.dtype)
            for key, entry in found.items()
            if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
        }
        dcp_load(values, storage_reader=reader)
        structure = _untext(values.pop(f"{prefix}structure"))
        return rebuild(structure, [values[f"{prefix}{i}"] for i in range(len(values))])


def _plain(state: Any) -> dict[str, Any]:
    flat = flatten(state)
    return {"structure": flat.structure, "tensors": [tensor.cpu() for tensor in flat.tensors]}


def _text(structure: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(structure, allow_nan=False).encode()), dtype=torch.uint8)


def _untext(data: torch.Tensor) -> Any:
    return json.loads(bytes(data.tolist()))


class CheckpointIo(Protocol):
    """How the out-of-band path is told that a block reads or writes a checkpoint."""

    def __call__(self, direction: Literal["read", "write"], name: str) -> AbstractContextManager[None]: ...


def unwatched(direction: Literal["read", "write"], name: str) -> AbstractContextManager[None]:
    """Nobody is told."""
    return nullcontext()


class GuardedCallbacks:
    """The callbacks as SCOUT calls them: the wrong rank or a collective where none may be is an error at once.

    `io` lets the out-of-band path know for how long a rank is in one of them.
    """

    def __init__(self, callbacks: DurableCallbacks, rank: int, writer: int, io: CheckpointIo = unwatched) -> None:
        self._io = io
        self._callbacks = callbacks
        self._rank = rank
        self._writer = writer

    def save(self, context: CheckpointContext, state: Any) -> Sequence[Path]:
        """`save_candidate`, and then to stable storage with what it wrote: a manifest must not outlast its files in a
        power cut, whoever wrote them. Every rank calls; collectives allowed. Raises `OSError`.
        """
        with self._io("write", "save_candidate"):
            paths = self._callbacks.save_candidate(context, state)
            _sync(context.folder, paths)
            return paths

    def load(self, context: CheckpointContext, state: Any) -> Any:
        """`load_checkpoint`. Every rank calls; collectives allowed. A stall in it names the shard."""
        with self._io("read", f"load_checkpoint {context.checkpoint_id}, shard of rank {context.rank}"):
            return self._callbacks.load_checkpoint(context, state)

    def commit(self, context: CheckpointContext) -> None:
        """`commit_candidate`. The manifest writer calls; a collective inside raises `CallbackContractError`."""
        self._alone("commit_candidate", lambda: self._callbacks.commit_candidate(context))

    def quarantine(self, context: CheckpointContext) -> None:
        """`quarantine_candidate`. The manifest writer calls; a collective inside raises `CallbackContractError`."""
        self._alone("quarantine_candidate", lambda: self._callbacks.quarantine_candidate(context))

    def _alone(self, name: str, call: Callable[[], None]) -> None:
        if self._rank != self._writer:
            raise CallbackContractError(f"{name} runs on the manifest writer (rank {self._writer}) only")
        with self._io("write", name), no_collectives(name):
            call()


def _sync(folder: Path, paths: Sequence[Path]) -> None:
    """fsync these files and every folder from theirs up to the one that `folder` was made in.

    What is not there, or lies elsewhere, is passed over: it is refused by name when the files are described.
    """
    folder = folder.absolute()
    files = [path for given in paths if (path := folder / given).is_relative_to(folder) and path.is_file()]
    folders = {parent for path in files for parent in path.parents if parent.is_relative_to(folder.parent)}
    for path in files:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    for parent in sorted(folders, reverse=True):
        sync_folder(parent)


class _Refusing(TorchDispatchMode):
    """On the thread that enters it, no operator of a collective runs, whichever Python name it was called by."""

    def __init__(self, refuse: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._refuse = refuse

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        namespace, _, operator = func.name().partition("::")
        if ("c10d" in namespace or namespace == "symm_mem") and not operator.startswith("wait_tensor"):
            self._refuse(operator.rstrip("_"))
        return func(*args, **(kwargs or {}))


@contextmanager
def no_collectives(name: str) -> Iterator[None]:
    """Within it, on this thread, collectives, sends, receives and new groups raise `CallbackContractError`: no other
    rank would come. What calls a backend object itself, past torch's process groups, is not seen.
    """
    thread = threading.get_ident()
    name_of_group = dist.distributed_c10d._process_group_name

    def refuse(word: str) -> None:
        raise CallbackContractError(f"{name} called {word}: it runs on one rank, so collectives cannot meet")

    def refuse_group(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            refuse("new_group")
        return name_of_group(*args, **kwargs)

    # making a group is no operator; each way to make one asks for its name here, by whatever name it was imported
    dist.distributed_c10d._process_group_name = refuse_group
    try:
        with _Refusing(refuse):
            yield
    finally:
        dist.distributed_c10d._process_group_name = name_of_group
