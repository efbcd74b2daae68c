"""Running something inside a training process without leaving a trace in it."""

from __future__ import annotations

import os
import random
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


def cuda_in_use() -> bool:
    """Whether this process has a CUDA context; asking does not make one."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


@dataclass(frozen=True, kw_only=True)
class AutocastState:
    """Autocast as it was when a module was called, per device type."""

    devices: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def current(cls) -> AutocastState:
        """The state now, for the CPU and for the accelerator, if one is in use."""
        types = ["cpu"]
        if cuda_in_use():
            types.append("cuda")
        return cls(
            devices=tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in types)
        )

    def describe(self) -> tuple[tuple[str, bool, str], ...]:
        """Plain values for comparing; the dtype counts only where autocast is on."""
        return tuple((kind, on, str(dtype) if on else "") for kind, on, dtype in self.devices)

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Autocast as recorded; the weight cache is off, since it would hand one replay's casts to training."""
        with ExitStack() as stack:
            for kind, on, dtype in self.devices:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=on, cache_enabled=False))
            yield


def is_compiled(module: nn.Module) -> bool:
    """Whether `module` or any part of it runs through `torch.compile`."""
    return any(part._compiled_call_impl is not None or hasattr(part, "_orig_mod") for part in module.modules())


def uncompiled(module: nn.Module) -> AbstractContextManager[Any]:
    """A context in which compiled parts of `module` run eagerly. Costs nothing, and imports nothing, without any."""
    return torch.compiler.set_stance("force_eager") if is_compiled(module) else nullcontext()


@contextmanager
def preserved_state() -> Iterator[None]:
    """Put back the random state of torch (CPU and current CUDA device), numpy and `random` afterwards."""
    cuda = cuda_in_use()
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    states: tuple[Any, ...] = (torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else None)
    python_state = random.getstate()
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        if cuda:
            torch.cuda.set_rng_state(states[1])
        random.setstate(python_state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)


def seed_everything(seed: int) -> list[torch.Tensor]:
    """Seed every generator from one 64-bit number; returns the resulting torch states for comparing them.

    Call inside `preserved_state`.
    """
    unsigned = seed % (1 << 64)
    torch.default_generator.manual_seed(unsigned)
    random.seed(unsigned)
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    if numpy_random is not None:
        numpy_random.seed(unsigned % (1 << 32))
    states = [torch.get_rng_state()]
    if cuda_in_use():
        torch.cuda.manual_seed(unsigned)
        states.append(torch.cuda.get_rng_state())
    return states


_CUBLAS_DETERMINISTIC = (":4096:8", ":16:8")


def strict_determinism_possible() -> bool:
    """Whether torch accepts matrix products under strict determinism; on CUDA an environment variable decides it.

    Source: `torch.use_deterministic_algorithms`, section on CUBLAS_WORKSPACE_CONFIG.
    """
    return not torch.cuda.is_available() or os.environ.get("CUBLAS_WORKSPACE_CONFIG") in _CUBLAS_DETERMINISTIC


@contextmanager
def deterministic_kernels(*, enabled: bool, strict: bool) -> Iterator[None]:
    """Deterministic kernels within the block, and the job's own settings again afterwards.

    Under `strict` an operation that has no deterministic kernel raises `RuntimeError`; otherwise it runs as it is, and
    whether it repeats itself is measured. Filling fresh memory is switched off: it costs time and hides nothing here.
    """
    if not enabled:
        yield
        return
    mode = (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
    memory = sys.modules["torch.utils.deterministic"]
    fill = memory.fill_uninitialized_memory
    cudnn = (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=not strict)
        memory.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
            memory.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


@dataclass(frozen=True, kw_only=True)
class Elapsed:
    """How long something ran, in microseconds: on the wall, and waiting for a CPU core (0 on a GPU or if unknown).

    `collective_us` is the part of the wall time spent in collectives; `wait_us` then leaves it out.
    """

    wall_us: int
    wait_us: int
    collective_us: int = 0

    @property
    def busy_us(self) -> int:
        """Wall time less the time spent waiting for a core or for other ranks, so that neither a crowded host nor a
        slow partner looks like a slow rank."""
        return max(self.wall_us - self.wait_us - self.collective_us, 0)

    def without(self, collectives: Sequence[Elapsed]) -> Elapsed:
        """The same span with those parts of it set apart."""
        return Elapsed(
            wall_us=self.wall_us,
            wait_us=max(self.wait_us - sum(part.wait_us for part in collectives), 0),
            collective_us=min(sum(part.wall_us for part in collectives), self.wall_us),
        )


NO_TIME = Elapsed(wall_us=0, wait_us=0)


class Stopwatch:
    """Times work on a device: CUDA events where it is a GPU, the monotonic clock and the run-queue delay elsewhere.

    A thread is often taken off its core between two readings, and a wait counted outside the wall time could exceed
    it. So the delay is read on the outside, and never counts for more than the time in which the thread did not run.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._events = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]

    def __enter__(self) -> Stopwatch:
        if self._cuda:
            self._events[0].record()
        else:
            wait = run_queue_delay_ns()
            self._start = (time.perf_counter_ns(), time.thread_time_ns(), wait)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._cuda:
            self._events[1].record()
        else:
            self._stop = (time.perf_counter_ns(), time.thread_time_ns(), run_queue_delay_ns())

    def read(self) -> Elapsed:
        """The result; on a GPU this waits for the work to end."""
        if self._cuda:
            self._events[1].synchronize()
            return Elapsed(wall_us=round(self._events[0].elapsed_time(self._events[1]) * 1e3), wait_us=0)
        wall, ran, wait = (stop - start for start, stop in zip(self._start, self._stop, strict=True))
        return Elapsed(wall_us=wall // 1000, wait_us=max(min(wait, wall - ran), 0) // 1000)


def run_queue_delay_ns() -> int:
    """Nanoseconds this thread has been runnable without a core, from the kernel's schedstat; 0 where it is not kept."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1])
    except (OSError, IndexError, ValueError):
        return 0
