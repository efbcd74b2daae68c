"""Flushing on SIGTERM and SIGINT, also while the main thread is stuck in a collective."""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_INSTALLED: set[FlushOnSignal] = set()
"""Those of this process, for the children that it forks."""


class FlushOnSignal:
    """Runs `flush` once when the process is told to end, then lets the signal do what it did before.

    Python runs handlers on the main thread between bytecodes, which a thread inside a collective never reaches; so a
    watcher thread is woken by the C handler itself. Both only ask another thread to flush and wait for it, at most
    `grace_s`: the handler may have interrupted a thread that holds what the flush needs, and storage may hang.

    Installed from the main thread only; elsewhere nothing happens. Forked children, such as loader workers, inherit all
    of it and give it back at once: what ends them is none of this.
    """

    def __init__(self, flush: Callable[[], None], grace_s: float) -> None:
        self._flush = flush
        self._grace_s = grace_s
        self._before: dict[int, Any] = {}
        # an Event's lock could be held by the very thread that a second signal interrupts
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._flushing = threading.Lock()
        self._flushing.acquire()
        self._reader, self._writer = socket.socketpair()
        self._process = os.getpid()
        self.installed = False

    def install(self) -> None:
        """Take the two signals over. A wake-up descriptor of somebody else stays theirs."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._writer.setblocking(False)
        other = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if other != -1:
            signal.set_wakeup_fd(other)
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        self.installed = True
        _INSTALLED.add(self)
        for work in (self._watch, self._flush_when_asked):
            threading.Thread(target=work, name="scout-flush", daemon=True).start()

    def remove(self) -> None:
        """Give the signals back, unless somebody took them over meanwhile."""
        if not self.installed or threading.current_thread() is not threading.main_thread():
            return
        self.installed = False
        _INSTALLED.discard(self)
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)
        present = signal.set_wakeup_fd(-1)
        if present not in (-1, self._writer.fileno()):
            signal.set_wakeup_fd(present)
        self._writer.close()
        self._asked.put(False)

    def _watch(self) -> None:
        while True:
            try:
                numbers = self._reader.recv(64)
            except OSError:
                return
            if not numbers:
                return
            ending = [number for number in numbers if number in _SIGNALS]
            if ending:
                self._await_flush()
                self._end_if_stuck(ending[0])

    def _flush_when_asked(self) -> None:
        if self._asked.get():
            try:
                self._flush()
            finally:
                self._flushing.release()

    def _await_flush(self) -> None:
        self._asked.put(True)
        if self._flushing.acquire(timeout=self._grace_s):
            self._flushing.release()

    def _end_if_stuck(self, number: int) -> None:
        """A main thread stuck in native code never sees the signal; what would have ended the process still does."""
        if self._before.get(number) is not signal.SIG_DFL:
            return
        ctypes.CDLL(None).signal(number, 0)  # SIG_DFL; Python's own call is for the main thread only
        os.kill(os.getpid(), number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # a handler that took over from this one may call it in a child, or after it was removed
        if self.installed and os.getpid() == self._process:
            self._await_flush()
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
        elif before is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _give_back_in_child() -> None:
    """Without this, ending a child would wake the parent's watcher, whose socket the child's C handler writes to."""
    for flusher in [*_INSTALLED]:
        flusher.remove()


os.register_at_fork(after_in_child=_give_back_in_child)
