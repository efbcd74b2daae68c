"""Progress from the model, the loaders, checkpoint I/O and the compiler: the rest of what a rank publishes."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from scout_core.oob.layout import Activity, Phase
from scout_core.oob.writer import Publisher
from scout_core.timing.step_clock import NO_CLOCK, Clock

T = TypeVar("T")
_HISTORY = 64
_NAMES = 64


class ModelWatch:
    """Hooks on the root and the repeated layers that publish the position.

    A compiled model is given no layers: hooks inside it would change its code. That of the root runs before it, and in
    code that is traced from further out none does anything.
    The passes of a model in evaluation mode are the phase `eval`, which has its own grace. Passes of background threads
    are not training's and publish nothing.
    """

    def __init__(self, publisher: Publisher, root: nn.Module, layers: Mapping[int, nn.Module]) -> None:
        self._publisher = publisher
        self._layers = len(layers)
        self._handles: list[Any] = [
            root.register_forward_pre_hook(self._begin)
            if root._compiled_call_impl is None
            else _BeforeCompiled(root, self._begin)
        ]
        for number, layer in layers.items():
            self._handles.append(layer.register_forward_pre_hook(self._at(number + 1)))

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelWatch:
        """A copy of the model, such as an average of its weights, has its hooks: its passes are this rank's too."""
        return self

    def _begin(self, module: nn.Module, args: Any) -> None:
        publisher = self._publisher
        if torch.compiler.is_compiling() or not publisher.training.here():
            return
        phase = publisher._phase
        if phase == Phase.TRAIN and not module.training:
            publisher._phase = int(Phase.EVAL)
        elif phase == Phase.EVAL and module.training:
            publisher._phase = int(Phase.TRAIN)
        publisher.begin_pass()

    def _at(self, stage: int) -> Callable[[nn.Module, Any], None]:
        publish, training = self._publisher.layer, self._publisher.training

        def enter(module: nn.Module, args: Any) -> None:
            if not torch.compiler.is_compiling() and training.here():
                publish(stage)

        return enter


class _BeforeCompiled:
    """Calls `begin` before a module that was compiled in place by `module.compile()`, which compiles hooks as well."""

    def __init__(self, module: nn.Module, begin: Callable[[nn.Module, Any], None]) -> None:
        self._module = module
        original: Any = module._compiled_call_impl
        self._original = original

        def call(*args: Any, **kwargs: Any) -> Any:
            begin(module, args)
            return original(*args, **kwargs)

        self._replacement = module._compiled_call_impl = call

    def remove(self) -> None:
        if self._module._compiled_call_impl is self._replacement:
            self._module._compiled_call_impl = self._original


class CompileWatch:
    """Tells the phase `compile` while torch compiles, from the compiler's own callbacks."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._before = Phase.TRAIN
        self._depth = 0
        self._handler: Any = None

    def look(self) -> None:
        """Subscribe once the compiler has been imported; cheap to call at each step."""
        if self._handler is not None:
            return
        module = sys.modules.get("torch._dynamo.callback")
        if module is not None:
            self._handler = module.callback_handler
            self._handler.register_start_callback(self._start)
            self._handler.register_end_callback(self._end)

    def close(self) -> None:
        """Unsubscribe."""
        if self._handler is not None:
            for remove, callback in (
                (self._handler.remove_start_callback, self._start),
                (self._handler.remove_end_callback, self._end),
            ):
                remove(callback)
            self._handler = None

    def _start(self, *_: Any) -> None:
        if self._depth == 0:
            self._before = self._publisher.phase
            self._publisher.set_phase(Phase.COMPILE)
        self._depth += 1

    def _end(self, *_: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth == 0 and self._publisher.phase is Phase.COMPILE:
            self._publisher.set_phase(self._before)


class Usual:
    """How long something takes as a rule: the median of its newest durations."""

    def __init__(self) -> None:
        self._seen: deque[int] = deque(maxlen=_HISTORY)
        self._median = 0
        self._since = 0

    @property
    def ns(self) -> int:
        """The median in ns, brought up to date every 16 durations; 0 before there are any."""
        return self._median

    def add(self, duration_ns: int) -> None:
        """One more duration."""
        self._seen.append(duration_ns)
        self._since += 1
        if self._since >= 16 or len(self._seen) < 4:
            self._median, self._since = int(statistics.median(self._seen)), 0


class WatchedLoader(Generic[T]):
    """A loader whose `next()` calls are published, but for those of a thread that fetches ahead: training waits for
    that elsewhere. Everything else is the loader's own."""

    def __init__(self, loader: Iterable[T], name: str, publisher: Publisher, clock: Clock = NO_CLOCK) -> None:
        self._loader = loader
        self._name = name
        self._publisher = publisher
        self._clock = clock
        self._usual = Usual()

    def __iter__(self) -> Iterator[T]:
        publisher, usual, name = self._publisher, self._usual, self._name
        seen = publisher.training.here()
        if seen:
            publisher.enter(Activity.DATALOADER, name, 0)
        try:
            iterator = iter(self._loader)
            if seen:
                publisher.workers(_worker_pids(iterator))
        finally:
            if seen:
                publisher.leave()
        known = 0  # the first one waits for workers that are being started: what the others take says nothing of it
        while True:
            seen, started, since = publisher.training.here(), time.monotonic_ns(), self._clock.mark()
            if seen:
                publisher.enter(Activity.DATALOADER, name, known)
            try:
                item = next(iterator)
            except StopIteration:
                return
            finally:
                self._clock.loaded(since)
                if seen:
                    publisher.leave()
            if known or not usual.ns:
                usual.add(time.monotonic_ns() - started)
            known = usual.ns
            yield item

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _worker_pids(iterator: Any) -> list[int]:
    """Process ids of the workers of torch's multi-process iterator (`_workers`, torch 2.x); none for other iterators"""
    workers = getattr(iterator, "_workers", ())
    return [worker.pid for worker in workers if getattr(worker, "pid", None)]


class Checkpoints:
    """Publishes checkpoint reads and writes, each of the names used lately with its own usual duration."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._usual: dict[str, Usual] = {}

    @contextmanager
    def io(self, direction: str, name: str) -> Iterator[None]:
        """The phase `checkpoint` and the activity `read` or `write` for the length of the block."""
        publisher = self._publisher
        usual = self._usual.pop(f"{direction} {name}", None) or Usual()
        self._usual[f"{direction} {name}"] = usual
        if len(self._usual) > _NAMES:  # a name for each step, perhaps
            del self._usual[next(iter(self._usual))]
        activity = Activity.CHECKPOINT_READ if direction == "read" else Activity.CHECKPOINT_WRITE
        before, started = publisher.phase, time.monotonic_ns()
        publisher._phase = int(Phase.CHECKPOINT)
        publisher.enter(activity, name, usual.ns)
        try:
            yield
            usual.add(time.monotonic_ns() - started)
        finally:
            publisher._phase = int(before)
            publisher.leave()


def main_thread_exception(thread: int | None = None) -> str:
    """The traceback of the exception that the training thread is handling right now; empty when it handles none."""
    import traceback

    ident = thread if thread is not None else threading.main_thread().ident
    error: Any = sys._current_exceptions().get(ident or 0)
    if isinstance(error, tuple):  # Python before 3.12
        error = error[1]
    if not isinstance(error, BaseException):
        return ""
    return "".join(traceback.format_exception(error))[-3000:]


def all_stacks() -> str:
    """The Python stacks of every thread of this process, from the thread that calls; at most 8,000 characters."""
    import traceback

    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    ]
    return "\n".join(parts)[:8000]
