"""Small strict records on disk: published whole or not at all, sealed against change, refused with a reason."""

from __future__ import annotations

import _thread
import errno
import json
import os
import queue
from pathlib import Path
from typing import Any, TypeVar

import xxhash
from pydantic import BaseModel, ValidationError

_CHUNK = 1 << 22
STALLED_READ_S = 60.0
"""After so long without a byte a file counts as one that cannot be read, so that an older checkpoint can be."""
MAX_RECORD_BYTES = 64 << 20
Record = TypeVar("Record", bound=BaseModel)


class UntrustedFile(ValueError):
    """A file that must not be used; the message names it and says why."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = path
        self.why = why


def file_digest(path: Path) -> str:
    """128-bit xxh3 of a file's bytes: finds damage, not malice. Raises `OSError`, also when a read hangs.

    Reads happen on a thread that is left behind then: nothing ends a read that storage does not answer.
    """
    told: queue.SimpleQueue[str | OSError | None] = queue.SimpleQueue()

    def read() -> None:
        digest = xxhash.xxh3_128()
        try:
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
                    told.put(None)
            told.put(digest.hexdigest())
        except OSError as error:
            told.put(error)

    # not threading.Thread, whose start takes a lock that a signal may have interrupted: the last flush reads, too
    _thread.start_new_thread(read, ())
    while True:
        try:
            word = told.get(timeout=STALLED_READ_S)
        except queue.Empty:
            raise OSError(errno.ETIMEDOUT, f"no byte of it came within {STALLED_READ_S:g} s", str(path)) from None
        if isinstance(word, OSError):
            raise word
        if word is not None:
            return word


def bytes_digest(data: Any) -> str:
    """128-bit xxh3 of anything with a buffer."""
    return xxhash.xxh3_128_hexdigest(data)


def publish(path: Path, data: bytes) -> None:
    """Put a file in place whole: write a temporary one, fsync, rename, fsync the folder. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_record(path: Path, record: BaseModel) -> None:
    """Publish a record with a seal over its canonical JSON."""
    publish(path, sealed(record))


def sealed(record: BaseModel) -> bytes:
    """A record as sealed JSON bytes."""
    body = record.model_dump(mode="json")
    return json.dumps({"seal": _seal(body), "record": body}, allow_nan=False, separators=(",", ":")).encode()


def read_record(path: Path, kind: type[Record]) -> Record:
    """A record that is whole, unchanged and of this kind. Raises `UntrustedFile` for everything else."""
    try:
        if path.stat().st_size > MAX_RECORD_BYTES:
            raise UntrustedFile(path, f"larger than {MAX_RECORD_BYTES} bytes, which no record is")
        data = path.read_bytes()
    except OSError as error:
        raise UntrustedFile(path, f"cannot be read: {error.strerror}") from None
    return unseal(data, kind, path)


def unseal(data: bytes, kind: type[Record], path: Path) -> Record:
    """The record in sealed JSON bytes; `path` names them in errors. Raises `UntrustedFile`."""
    try:
        # RecursionError: nesting deeper than any record's
        outer = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise UntrustedFile(path, f"is not strict JSON: {error}") from None
    if not isinstance(outer, dict) or set(outer) != {"seal", "record"} or not isinstance(outer["record"], dict):
        raise UntrustedFile(path, "is not a sealed record")
    try:
        if outer["seal"] != _seal(outer["record"]):
            raise UntrustedFile(path, "was changed after it was written: its seal does not fit")
        return kind.model_validate_json(json.dumps(outer["record"]))
    except ValidationError as error:
        first = error.errors()[0]
        raise UntrustedFile(path, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, UntrustedFile):
            raise
        raise UntrustedFile(path, f"is not a {kind.__name__}: {error}") from None


def _seal(body: dict[str, Any]) -> str:
    return bytes_digest(json.dumps(body, sort_keys=True, allow_nan=False, separators=(",", ":")).encode())


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
