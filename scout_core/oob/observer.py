"""The observer: one process beside each rank. Started as `python -m scout_core.oob.observer <seat as JSON>`.

It reads its rank's progress from shared memory and says nothing to anybody while there is any. When progress stops
for longer than the phase allows, or the training process ends, it asks the other observers, judges, collects evidence
and reports. It ends within two seconds of its training process, however that one ended, and has no CUDA context.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from scout_core.oob.channel import FOLDER, Channel, start_ticks
from scout_core.oob.mesh import Mesh, connect, file_store, listen
from scout_core.oob.seat import Seat
from scout_core.oob.watcher import Watcher

_PR_SET_PDEATHSIG = 1
_LAST_S = 1.8


def main(argument: str) -> int:
    """Run until the training process ends or hangs up."""
    seat = Seat.model_validate_json(argument)
    _on_parent_death(signal.SIGKILL)
    with suppress(OSError):
        os.setpgid(0, 0)  # a Ctrl-C at the terminal is the training's; and a stopped orphan is woken by the kernel
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        parent = os.pidfd_open(seat.pid)
    except ProcessLookupError:
        return 1
    if start_ticks(seat.pid) != seat.start_ticks:
        return 1
    threading.Thread(target=_end_with, args=(parent,), daemon=True, name="scout-parent").start()
    channel = Channel.open(seat.channel, bytes.fromhex(seat.token))
    link = Link()
    wake_out, wake_in = os.pipe()
    os.set_blocking(wake_in, False)

    def wake() -> None:
        with suppress(BlockingIOError):
            os.write(wake_in, b"x")

    mesh = _join(seat, link, wake) if len(seat.present) > 1 else None
    # From here on the parent's death shows on the pidfd; a stopped observer is woken to see it.
    _on_parent_death(signal.SIGCONT)
    watcher = Watcher(seat, channel, mesh, link, parent, wake_out, host=socket.gethostname())
    link.say({"ready": True})
    watcher.run()
    if watcher.parent_gone:
        channel.close(unlink=True)
    sys.stdout.flush()
    os._exit(0)  # threads of Gloo may be inside a receive


class Link:
    """The two pipes to the training process: a JSON record a line."""

    def __init__(self) -> None:
        self.descriptor = sys.stdin.fileno()
        self._buffer = b""
        self.closed = False
        os.set_blocking(self.descriptor, False)

    def say(self, record: dict[str, Any]) -> None:
        """One line to the training process; nothing if it hung up."""
        with suppress(OSError):
            os.write(1, json.dumps(record).encode() + b"\n")

    def hear(self) -> list[dict[str, Any]]:
        """The lines that have come."""
        with suppress(BlockingIOError):
            while True:
                data = os.read(self.descriptor, 1 << 16)
                if not data:
                    self.closed = True
                    break
                self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        return [json.loads(line) for line in lines if line.strip()]

    def wait(self, timeout_s: float) -> dict[str, Any]:
        """The next line. Raises `TimeoutError`."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self.descriptor, select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            poll.poll(left * 1000)
            found = self.hear()
            if found:
                return found[0]
            if self.closed:
                break
        raise TimeoutError("the training process said nothing")


def _join(seat: Seat, link: Link, wake: Any) -> Mesh:
    timeout = seat.config.oob_ready_timeout_s
    store: Any
    if seat.file is not None:
        store = file_store(str(seat.file), len(seat.present))
    elif seat.port is not None:
        store, note = listen(seat.port, timeout)
        link.say({"listening": store.port, "note": note})
    else:
        told = link.wait(timeout)
        store = connect(told["address"], told["port"], timeout)
    return Mesh(seat.present, seat.rank, store, timeout, wake)


def _end_with(parent: int) -> None:
    """The hard end: whatever the main thread is in, the process is gone two seconds after its parent."""
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.poll()
    time.sleep(_LAST_S)
    with suppress(IndexError, ValueError):
        seat = Seat.model_validate_json(sys.argv[1])
        with suppress(OSError):
            (FOLDER / seat.channel).unlink(missing_ok=True)
    os._exit(1)


def _on_parent_death(number: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
