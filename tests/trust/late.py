"""A shared folder whose files this process sees late, as clients of a network file system do."""

from __future__ import annotations

import builtins
import errno
import io
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def seen_late(hidden: Callable[[str], bool], delay_s: float) -> Iterator[None]:
    """Files whose name is `hidden` are not there for `delay_s` after they were written, or after the block began."""
    began = time.time()
    stat, opened = os.stat, open

    def look(path: Any) -> None:
        name = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
        if isinstance(name, str) and hidden(name) and time.time() < max(began, stat(name).st_mtime) + delay_s:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)

    def late_stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        look(path)
        return stat(path, *args, **kwargs)

    def late_open(path: Any, *args: Any, **kwargs: Any) -> Any:
        look(path)
        return opened(path, *args, **kwargs)

    with (
        patch.object(os, "stat", late_stat),
        patch.object(io, "open", late_open),
        patch.object(builtins, "open", late_open),
    ):
        yield
