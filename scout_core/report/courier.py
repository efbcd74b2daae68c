"""Handing reports and decisions to the manager without the training thread ever waiting for it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("scout")
_BOUND = 256


@dataclass(frozen=True, kw_only=True)
class _Call:
    name: str
    hook: Callable[[Any], Any]
    value: Any
    kept: bool


class Courier:
    """Calls hooks one after the other, in order, on a thread of its own.

    A hook that raises is logged; one that is slow delays only those behind it. When `bound` calls wait, the newest is
    dropped and counted; only one that is to be `kept` takes the place of the newest that is not, or of the oldest when
    all are. The thread starts with the first call and is a daemon: it never keeps a process alive.
    """

    def __init__(self, bound: int = _BOUND) -> None:
        self._bound = bound
        self._calls: deque[_Call] = deque()
        self._changed = threading.Condition()
        self._calling = False
        self._thread: threading.Thread | None = None
        self._stopped = False
        self.dropped = 0

    def send(self, name: str, hook: Callable[[Any], Any] | None, value: Any, *, kept: bool = False) -> None:
        """Queue one call. Never blocks, never raises."""
        if hook is None:
            return
        with self._changed:
            if self._stopped:
                return
            if len(self._calls) >= self._bound:
                dropped = self._make_room() if kept else name
                self.dropped += 1
                logger.error("SCOUT: the manager's hooks are too slow; %d dropped, now of %s", self.dropped, dropped)
                if not kept:
                    return
            self._calls.append(_Call(name=name, hook=hook, value=value, kept=kept))
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="scout-courier", daemon=True)
                self._thread.start()

    def drain(self, deadline_s: float) -> bool:
        """Wait until everything queued was delivered, at most `deadline_s`; whether it was."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._calls and not self._calling, deadline_s)

    def close(self, deadline_s: float = 1.0) -> None:
        """Deliver what is queued within `deadline_s`, then let the thread end; what is sent later is dropped."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self.drain(deadline_s)

    def _make_room(self) -> str:
        """Drop one call for one that is to be kept; the name of its hook."""
        place = next((i for i in reversed(range(len(self._calls))) if not self._calls[i].kept), 0)
        name = self._calls[place].name
        del self._calls[place]
        return name

    def _run(self) -> None:
        while (call := self._next()) is not None:
            try:
                call.hook(call.value)
            # the boundary that keeps training alive: the manager's code may raise anything, and `sys.exit()` in it
            # would end nothing but this thread
            except BaseException:
                logger.exception("SCOUT: the manager's %s raised; training goes on", call.name)

    def _next(self) -> _Call | None:
        """The call to make next, waited for; None: there will be no more."""
        with self._changed:
            self._calling = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._calls or self._stopped)
            self._calling = bool(self._calls)
            return self._calls.popleft() if self._calls else None
