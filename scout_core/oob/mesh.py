"""Messages between observers over Gloo. Nothing is sent unless an observer has something to ask or to tell.

Every message is one tensor of fixed size, sent point to point and received from any source, so that a lost peer
breaks its own pairs only. Nothing here waits for a peer; whoever needs an answer has a deadline of his own.
"""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore

MESSAGE_BYTES = 1 << 16
_FOREVER = timedelta(days=365)
_MAX_ERRORS = 50


class Mesh:
    """The group of all observers of one set of peers. Every observer constructs it once, within `timeout_s`."""

    def __init__(
        self, ranks: Sequence[int], rank: int, store: Store, timeout_s: float, wake: Callable[[], None]
    ) -> None:
        self._ranks = tuple(ranks)
        self._rank = rank
        self._inbox: deque[dict[str, Any]] = deque()
        self._sending: deque[tuple[Any, torch.Tensor]] = deque(maxlen=1024)
        self._wake = wake
        self.bytes_sent = 0
        self.bytes_received = 0
        self.down = False
        self._store = store  # kept alive: others may still be joining
        store.set_timeout(timedelta(seconds=timeout_s))
        dist.init_process_group(
            "gloo", store=store, rank=self._ranks.index(rank), world_size=len(ranks), timeout=_FOREVER
        )
        threading.Thread(target=self._receive, daemon=True, name="scout-mesh").start()

    def send(self, rank: int, message: Mapping[str, Any]) -> bool:
        """Hand a message over for `rank`; False if its observer is known to be gone."""
        data = zlib.compress(json.dumps({**message, "from": self._rank}).encode(), 1)
        if len(data) + 4 > MESSAGE_BYTES:
            raise ValueError(f"a message of {len(data)} bytes does not fit into {MESSAGE_BYTES}")
        buffer = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
        framed = len(data).to_bytes(4, "little") + data
        buffer[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)
        try:
            self._sending.append((dist.isend(buffer, self._ranks.index(rank)), buffer))
        except RuntimeError:
            return False
        self.bytes_sent += MESSAGE_BYTES
        return True

    def take(self) -> list[dict[str, Any]]:
        """The messages that have come since the last call."""
        found = []
        while self._inbox:
            found.append(self._inbox.popleft())
        return found

    def _receive(self) -> None:
        errors = 0
        while errors < _MAX_ERRORS:
            buffer = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8)
            try:
                dist.recv(buffer)
            except RuntimeError:  # all pairs are gone, or one went while it was read
                errors += 1
                time.sleep(0.1)
                continue
            errors = 0
            data = buffer.numpy().tobytes()
            size = int.from_bytes(data[:4], "little")
            self.bytes_received += MESSAGE_BYTES
            self._inbox.append(json.loads(zlib.decompress(data[4 : 4 + size])))
            self._wake()
        self.down = True


def listen(port: int, timeout_s: float) -> tuple[TCPStore, str]:
    """A store on this host, on `port` or, when that is taken, on a free one; and why it moved, if it did.

    Called by the first rank's observer only.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timeout), ""
    except RuntimeError as error:
        reason = f"port {port} cannot be used ({str(error).splitlines()[0][:160]})"
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    return store, f"{reason}; moved to port {store.port}"


def connect(address: str, port: int, timeout_s: float) -> TCPStore:
    """The store of the first rank's observer, from another rank's."""
    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def file_store(path: str, ranks: int) -> FileStore:
    """A store in a file that all hosts see."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return FileStore(path, ranks)
