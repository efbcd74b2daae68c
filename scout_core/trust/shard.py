"""One rank's training state on node-local disk: a safetensors file and the sealed record that vouches for it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from scout_core.trust.files import UntrustedFile, file_digest, read_record, sync_folder, write_record
from scout_core.trust.memory import Copy
from scout_core.trust.states import TrustState, retained
from scout_core.trust.transfer import views
from scout_core.trust.tree import rebuild

_DATA = "state.safetensors"
_RECORD = "state.json"
Judge = Callable[[int, int], TrustState | None]
"""What became of a capture after it was written, by step and attempt; None: what its record says."""


class ShardRecord(BaseModel):
    """What vouches for one rank's part of one step. `structure` is how the tensors make up the state."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    schema_version: Literal[1] = 1
    type: Literal["GeminiShard"] = "GeminiShard"
    run_id: str
    attempt: int = Field(ge=0)
    step: int = Field(ge=0)
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    topology_digest: str
    state: Literal["LATEST_GEMINI", "CANDIDATE", "RECOVERY_VERIFIED"]
    bytes: int = Field(ge=0)
    digest: str
    structure: Any


class Shards:
    """The shards in one node-local folder, of one run. Several ranks of a host may share the folder."""

    def __init__(self, folder: Path, *, run_id: str, topology_digest: str, world_size: int) -> None:
        self.folder = folder
        self._run_id = run_id
        self._topology = topology_digest
        self._world_size = world_size

    def write(self, copy: Copy, attempt: int, holder: int) -> Path:
        """Put a sealed copy on disk, whole or not at all. Raises `OSError`.

        The record is the last thing written: without it the data does not count.
        """
        assert copy.digest is not None, "an incomplete copy is never written"
        place = self._place(copy.owner, copy.step, holder)
        data = place / _DATA
        present = self._present(place, copy)
        if present is not None and (present.attempt, present.state) == (attempt, copy.state.value):
            return place
        if present is None:
            if place.exists():
                shutil.rmtree(place)  # an earlier attempt's, or a torn one
            place.mkdir(parents=True)
            try:
                _write_data(data, copy)
            except OSError:
                shutil.rmtree(place, ignore_errors=True)  # on a full disk every byte counts
                raise
        record = ShardRecord(
            run_id=self._run_id,
            attempt=attempt,
            step=copy.step,
            rank=copy.owner,
            world_size=self._world_size,
            topology_digest=self._topology,
            state=copy.state.value,  # type: ignore[arg-type]
            bytes=data.stat().st_size,
            digest=copy.digest,
            structure=copy.structure,
        )
        write_record(place / _RECORD, record)
        sync_folder(place.parent)
        return place

    def prune(self, owner: int, holder: int, judge: Judge = lambda step, attempt: None) -> None:
        """Keep what `retained` says of a rank's shards held by `holder`."""
        places = {}
        states = {}
        for place in self._places(owner, holder):
            try:
                record = read_record(place / _RECORD, ShardRecord)
            except UntrustedFile:
                shutil.rmtree(place, ignore_errors=True)
                continue
            if record.run_id != self._run_id:
                continue  # whoever runs there prunes there
            key = (record.step, record.attempt)
            places[key] = place
            states[key] = judge(*key) or TrustState(record.state)
        for key in places.keys() - retained(states):
            shutil.rmtree(places[key], ignore_errors=True)

    def find(self, owner: int) -> tuple[dict[Path, ShardRecord], list[UntrustedFile]]:
        """Shards of a rank that may be loaded (their data not yet verified), and what was refused."""
        good: dict[Path, ShardRecord] = {}
        bad: list[UntrustedFile] = []
        for place in self._places(owner, None):
            try:
                good[place] = self._checked(place, owner)
            except UntrustedFile as error:
                bad.append(error)
        return good, bad

    def read(self, place: Path, owner: int) -> Copy:
        """One shard, verified to the last byte. Raises `UntrustedFile`."""
        record = self._checked(place, owner)
        verify_data(place, record)
        data = place / _DATA
        # own reader: the library's would hand out tensors of a mapped file that may change
        raw = data.read_bytes()
        length = 8 + int.from_bytes(raw[:8], "little")
        content = (
            torch.frombuffer(bytearray(raw[length:]), dtype=torch.uint8)
            if len(raw) > length
            else torch.empty(0, dtype=torch.uint8)
        )
        copy = Copy(
            step=record.step,
            owner=owner,
            state=TrustState(record.state),
            structure=record.structure,
            header=raw[:length],
            data=content,
            digest=record.digest,
        )
        try:
            rebuild(copy.structure, views(copy.header, copy.data))
        except (ValueError, KeyError, TypeError, RuntimeError, RecursionError) as error:
            raise UntrustedFile(data, f"does not hold the state its record describes: {error}") from None
        return copy

    def _present(self, place: Path, copy: Copy) -> ShardRecord | None:
        """The record of this very content if it is on disk already: the only good one must not be rewritten.

        Its attempt may be an earlier one, in which a step had the same bits.
        """
        try:
            record = self._checked(place, copy.owner)
            verify_data(place, record)
        except UntrustedFile:
            return None
        return record if record.digest == copy.digest else None

    def _checked(self, place: Path, owner: int) -> ShardRecord:
        path = place / _RECORD
        record = read_record(path, ShardRecord)
        if record.run_id != self._run_id:
            raise UntrustedFile(path, f"belongs to run {record.run_id}, not to {self._run_id}")
        if record.topology_digest != self._topology or record.world_size != self._world_size:
            raise UntrustedFile(path, "was written under another topology")
        if record.rank != owner:
            raise UntrustedFile(path, f"is of rank {record.rank}, not of rank {owner}")
        if self._step_of(place) != record.step:
            raise UntrustedFile(path, f"is of step {record.step} and stands in the place of another")
        return record

    def _place(self, owner: int, step: int, holder: int) -> Path:
        kind = "own" if holder == owner else f"held-by-{holder:05d}"
        return self.folder / f"rank-{owner:05d}" / f"step-{step:09d}-{kind}"

    def _places(self, owner: int, holder: int | None) -> Iterator[Path]:
        kind = "*" if holder is None else "own" if holder == owner else f"held-by-{holder:05d}"
        return iter(sorted((self.folder / f"rank-{owner:05d}").glob(f"step-*-{kind}")))

    @staticmethod
    def _step_of(place: Path) -> int | None:
        digits = place.name.split("-")[1]
        return int(digits) if digits.isdecimal() else None


def _write_data(path: Path, copy: Copy) -> None:
    with path.open("wb") as file:
        file.write(copy.header)
        file.write(copy.data.numpy().data)
        file.flush()
        os.fsync(file.fileno())


def verify_data(place: Path, record: ShardRecord) -> None:
    """Raise `UntrustedFile` unless the data file is byte for byte what the record vouches for."""
    data = place / _DATA
    try:
        size = data.stat().st_size
        if size != record.bytes:
            raise UntrustedFile(data, f"has {size} bytes instead of {record.bytes} (rank {record.rank})")
        if file_digest(data) != record.digest:
            raise UntrustedFile(data, f"its content was changed: the digest does not fit (rank {record.rank})")
    except OSError as error:
        raise UntrustedFile(data, f"cannot be read: {error.strerror}") from None
