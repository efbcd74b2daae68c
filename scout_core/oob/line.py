"""An observer's wires: to its training process, which may die, and to the other observers."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

from scout_core.oob.mesh import Mesh

Handler = Callable[[dict[str, Any]], None]


class Line:
    """Waits and dispatches for one observer, single-threaded. Every wait has a deadline and ends with the parent.

    `hear` gets the lines of the training process, `answer` the messages of other observers, `died` is called when the
    training process has ended.
    """

    def __init__(self, rank: int, peers: Sequence[int], mesh: Mesh | None, link: Any, parent: int, wake: int) -> None:
        self.rank, self.peers = rank, tuple(peers)
        self.mesh, self.link = mesh, link
        self.parent_gone = False
        self._parent, self._wake = parent, wake
        self._link_open = True
        self._poll = select.poll()
        for descriptor in (parent, wake, link.descriptor):
            self._poll.register(descriptor, select.POLLIN)
        self.hear: Handler = lambda line: None
        self.answer: Handler = lambda message: None
        self.died: Callable[[], None] = lambda: None
        self.hung_up: Callable[[], None] = lambda: None

    def pump(self, deadline: float, done: Callable[[], bool]) -> None:
        """Dispatch until `done`, the deadline on the monotonic clock, or the parent's death."""
        while not done():
            left = deadline - time.monotonic()
            if left <= 0:
                return
            for descriptor, _ in self._poll.poll(left * 1000):
                if descriptor == self._parent and not self.parent_gone:
                    self.parent_gone = True
                    self._poll.unregister(self._parent)
                    self.died()
                    return
                if descriptor == self._wake:
                    os.read(self._wake, 4096)
                if descriptor == self.link.descriptor:
                    self._listen()
            for message in self.mesh.take() if self.mesh is not None else ():
                self.answer(message)

    def _listen(self) -> None:
        for line in self.link.hear():
            self.hear(line)
        if self.link.closed and self._link_open:
            self._link_open = False
            self._poll.unregister(self.link.descriptor)
            self.hung_up()

    def send(self, rank: int, message: dict[str, Any]) -> bool:
        """Hand a message over for another rank's observer; False if that is known to be gone."""
        return self.mesh is not None and self.mesh.send(rank, message)

    def tell_all(self, message: dict[str, Any]) -> None:
        """The same message to every other observer."""
        for rank in self.peers:
            if rank != self.rank:
                self.send(rank, message)

    def say(self, record: dict[str, Any]) -> None:
        """One line to the training process, if it lives."""
        if not self.parent_gone:
            self.link.say(record)
