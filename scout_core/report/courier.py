"""Handing reports and decisions to the manager without the training thread ever waiting for it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("scout")
_BOUND = 256


class Courier:
    """Calls hooks one after the other, in order, on a thread of its own.

    A hook that raises is logged; one that is slow delays only those behind it; when `bound` calls wait, the newest is
    dropped and counted. The thread starts with the first call and is a daemon: it never keeps a process alive.
    """

    def __init__(self, bound: int = _BOUND) -> None:
        self._queue: queue.Queue[tuple[str, Callable[[Any], Any], Any] | None] = queue.Queue(bound)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self.dropped = 0

    def send(self, name: str, hook: Callable[[Any], Any] | None, value: Any) -> None:
        """Queue one call. Never blocks, never raises."""
        if hook is None:
            return
        with self._lock:
            if self._stopped:
                return
            try:
                self._queue.put_nowait((name, hook, value))
            except queue.Full:
                self.dropped += 1
                logger.error("SCOUT: the manager's %s is too slow; %d deliveries dropped", name, self.dropped)
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="scout-courier", daemon=True)
                self._thread.start()

    def drain(self, deadline_s: float) -> bool:
        """Wait until everything queued was delivered, at most `deadline_s`; whether it was."""
        with self._queue.all_tasks_done:
            return self._queue.all_tasks_done.wait_for(lambda: not self._queue.unfinished_tasks, deadline_s)

    def close(self, deadline_s: float = 1.0) -> None:
        """Deliver what is queued within `deadline_s`, then let the thread end; what is sent later is dropped."""
        with self._lock:
            self._stopped = True
        if self.drain(deadline_s):
            self._queue.put_nowait(None)  # it is empty, so there is room

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            name, hook, value = call
            try:
                hook(value)
            except Exception:  # the boundary that keeps training alive: the manager's code may raise anything
                logger.exception("SCOUT: the manager's %s raised; training goes on", name)
            finally:
                self._queue.task_done()
