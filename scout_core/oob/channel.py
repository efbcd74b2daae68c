"""Shared-memory segments with an owner: made by a live publisher, read by its observer, reclaimed only from the dead.

A segment belongs to the process whose id and start time stand in its header and that holds a lock on it. The name is
opaque and scoped to run, restart generation, process, peer group and rank. Linux; local to one host.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from scout_core.oob.layout import HEADER, MAGIC, SIZE, VERSION

FOLDER = Path("/dev/shm")
PREFIX = "scout-oob-"


class ChannelBusy(RuntimeError):
    """The segment belongs to a live owner, or to another user."""


@dataclass(frozen=True, kw_only=True)
class Scope:
    """What a channel's name stands for."""

    run: str
    attempt: int
    pid: int
    peers: tuple[int, ...]
    rank: int
    ordinal: int = 0

    def name(self) -> str:
        """The opaque name: equal scopes, equal names."""
        text = f"{self.run}|{self.attempt}|{self.pid}|{self.peers}|{self.rank}|{self.ordinal}"
        return PREFIX + hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Who a segment belongs to, from its header."""

    uid: int
    pid: int
    start_ticks: int
    token: bytes
    rank: int

    @property
    def alive(self) -> bool:
        """Whether this very process still runs (a process of the same id that started later does not count)."""
        return start_ticks(self.pid) == self.start_ticks


class Channel:
    """One mapped segment. `create` is the publisher's way in, `open` the observer's."""

    def __init__(self, name: str, memory: mmap.mmap, token: bytes, descriptor: int | None) -> None:
        self.name = name
        self.memory = memory
        self.token = token
        self._descriptor = descriptor

    @classmethod
    def create(cls, scope: Scope, *, world: int, folder: Path = FOLDER) -> Channel:
        """A fresh segment owned by this process; a dead owner's segment of the same name is removed first.

        Raises `ChannelBusy` when a live owner or another user holds the name, `OSError` when there is no room.
        """
        name = scope.name()
        path = folder / name
        # It gets its name only when it is locked and has its header: nobody may take it for a dead owner's before.
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        with ExitStack() as failing:
            failing.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(descriptor, 0, SIZE)
            memory = mmap.mmap(descriptor, SIZE)
            token = secrets.token_bytes(16)
            own = start_ticks(os.getpid()) or 0
            HEADER.pack_into(
                memory, 0, MAGIC, VERSION, os.getuid(), os.getpid(), scope.rank, own, token, world, scope.attempt, 0
            )
            try:
                _name(descriptor, path)
            except FileExistsError:
                if not reclaim(path):
                    raise ChannelBusy(f"{name} belongs to a live process; it is left alone") from None
                _name(descriptor, path)
            failing.pop_all()
        return cls(name, memory, token, descriptor)

    @classmethod
    def open(cls, name: str, token: bytes, folder: Path = FOLDER) -> Channel:
        """An existing segment, for reading. Raises `ChannelBusy` if it is not the one with this token."""
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(descriptor, SIZE, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        channel = cls(name, memory, token, None)
        owner = read_owner(memory)
        if owner is None or owner.token != token:
            raise ChannelBusy(f"{name} carries another owner's token")
        return channel

    def close(self, *, unlink: bool, folder: Path = FOLDER) -> None:
        """Unmap; with `unlink` remove the name, if it still is this segment. A second call does nothing."""
        if unlink and not self.memory.closed:
            remove_owned(folder / self.name, self.token)
        if not self.memory.closed:
            self.memory.close()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _name(descriptor: int, path: Path) -> None:
    """Give an unnamed file its name at once. Raises `FileExistsError`."""
    # With a directory given Python calls linkat(2), which follows the link in /proc; the directory itself is not used.
    os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)


def remove_owned(path: Path, token: bytes) -> None:
    """Remove the segment at `path` if it carries this token."""
    owner = _peek(path)
    if owner is not None and owner.token == token:
        path.unlink(missing_ok=True)


def reclaim(path: Path) -> bool:
    """Remove a segment of this user whose owner is dead; whether it was removed (or had gone by itself)."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except PermissionError:
        return False
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held by a live owner in any PID namespace
        except BlockingIOError:
            return False
        owner = _peek(path)
        if owner is not None and owner.alive:
            return False
        if path.stat().st_ino == os.fstat(descriptor).st_ino:  # not a successor's of the same name
            path.unlink()
        return True
    except FileNotFoundError:
        return True
    finally:
        os.close(descriptor)


def sweep(folder: Path = FOLDER) -> tuple[str, ...]:
    """Remove every segment of this user whose owner is dead; the names removed."""
    removed = []
    for path in sorted(folder.glob(f"{PREFIX}*")):
        with suppress(OSError):
            if path.exists() and reclaim(path):
                removed.append(path.name)
    return tuple(removed)


def leftovers(names: Sequence[str] | None = None, folder: Path = FOLDER) -> tuple[str, ...]:
    """Names of the segments there are (of `names` only, if given)."""
    present = tuple(path.name for path in sorted(folder.glob(f"{PREFIX}*")))
    return present if names is None else tuple(name for name in present if name in names)


def read_owner(memory: mmap.mmap | bytes) -> Owner | None:
    """The owner in a header, or None if it is no header of ours."""
    if len(memory) < HEADER.size:
        return None
    magic, version, uid, pid, rank, ticks, token, _, _, _ = HEADER.unpack_from(memory, 0)
    if magic != MAGIC or version != VERSION:
        return None
    return Owner(uid=uid, pid=pid, start_ticks=ticks, token=token, rank=rank)


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it is gone or only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _peek(path: Path) -> Owner | None:
    try:
        with open(path, "rb") as file:
            return read_owner(file.read(HEADER.size))
    except (FileNotFoundError, PermissionError):
        return None
