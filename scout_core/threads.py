"""Which thread's doings are training's."""

from __future__ import annotations

import threading


class TrainingThread:
    """The thread that makes it, and those of C++, in which autograd runs backward: these are dummies to Python.

    Every other thread, such as an asynchronous checkpoint's writer, goes on beside training.
    """

    def __init__(self) -> None:
        self._thread = threading.current_thread()

    def here(self) -> bool:
        """Whether the calling thread is one of these."""
        thread = threading.current_thread()
        return thread is self._thread or isinstance(thread, threading._DummyThread)
