"""Folders of observers under the temporary folder: each says whose it is, and those of the dead are removed."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from scout_core.oob.channel import PREFIX, start_ticks

_NAME = re.compile(rf"{PREFIX}(\d+)-(\d+)-.+")


def make_scratch() -> tuple[Path, Callable[[], None]]:
    """A folder of this process, and what removes it. Raises `OSError` when there is no room.

    A lock on it says that its owner lives where process ids say nothing: in another container with the same folder.
    """
    pid = os.getpid()
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{pid}-{start_ticks(pid) or 0}-"))
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return folder, partial(_remove, folder, descriptor)


def sweep_scratch() -> tuple[str, ...]:
    """Remove every folder of this user whose owner is dead; the paths removed."""
    removed = []
    with suppress(OSError):
        for path in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
            with suppress(OSError):
                if _left(path):
                    shutil.rmtree(path)
                    removed.append(str(path))
    return tuple(removed)


def _left(path: Path) -> bool:
    """Whether it belonged to a process of this user that has ended."""
    owner = _NAME.fullmatch(path.name)
    if owner is None or path.lstat().st_uid != os.getuid() or start_ticks(int(owner[1])) == int(owner[2]):
        return False
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _remove(folder: Path, descriptor: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)
