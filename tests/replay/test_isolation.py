"""Random state, kernels, autocast and compilation are the job's own again after a replay, and time is told honestly."""

from __future__ import annotations

import random
import time
import warnings
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from scout_core.replay.isolation import (
    AutocastState,
    Elapsed,
    Stopwatch,
    deterministic_kernels,
    is_compiled,
    preserved_state,
    seed_everything,
    uncompiled,
)


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def seeded(seed: int) -> list[float]:
    with preserved_state():
        seed_everything(seed)
        return draw()


def test_the_job_goes_on_drawing_as_if_nothing_had_been_drawn() -> None:
    with preserved_state():
        seed_everything(1)
        expected = [draw(), draw()]
        seed_everything(1)
        seen = [draw()]
        with suppress(ZeroDivisionError), preserved_state():
            draw()
            seed_everything(2)
            raise ZeroDivisionError
        assert [*seen, draw()] == expected


@settings(deadline=None)
@given(st.integers(-(1 << 63), (1 << 64) - 1))
def test_any_64_bit_seed_draws_the_same_again(seed: int) -> None:
    assert seeded(seed) == seeded(seed) != seeded(seed ^ 1)


def test_the_states_that_a_seed_gives_can_be_compared() -> None:
    with preserved_state():
        one, same, other = seed_everything(3)[0], seed_everything(3)[0], seed_everything(4)[0]
    assert torch.equal(one, same) and not torch.equal(one, other)


def modes() -> tuple[object, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        list(warnings.filters),
    )


@pytest.mark.parametrize("job", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("strict", [True, False])
def test_determinism_lasts_for_the_block_and_the_jobs_settings_return(job: tuple[bool, bool], strict: bool) -> None:
    own = modes()
    torch.use_deterministic_algorithms(job[0], warn_only=job[1])
    try:
        before = modes()
        with suppress(KeyError), deterministic_kernels(enabled=True, strict=strict):
            assert torch.are_deterministic_algorithms_enabled()
            assert torch.is_deterministic_algorithms_warn_only_enabled() is not strict
            assert not torch.utils.deterministic.fill_uninitialized_memory
            raise KeyError
        assert modes() == before
    finally:
        torch.use_deterministic_algorithms(own[0], warn_only=own[1])


def test_switched_off_it_changes_nothing() -> None:
    before = modes()
    with deterministic_kernels(enabled=False, strict=True):
        assert modes() == before


def no_deterministic_kernel() -> None:
    torch.zeros(4).put_(torch.zeros(2, dtype=torch.int64), torch.ones(2))


def test_strict_refuses_an_operation_without_a_deterministic_kernel_and_lenient_runs_it_in_silence() -> None:
    with pytest.raises(RuntimeError, match="deterministic"), deterministic_kernels(enabled=True, strict=True):
        no_deterministic_kernel()
    with warnings.catch_warnings(record=True) as told, deterministic_kernels(enabled=True, strict=False):
        no_deterministic_kernel()
    assert told == []


def test_autocast_is_entered_as_it_was_and_left_behind() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        on = AutocastState.current()
    off = AutocastState.current()
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with on.enter():
        assert layer(x).dtype is torch.bfloat16 and not torch.is_autocast_cache_enabled()
        with off.enter():
            assert layer(x).dtype is torch.float32
    assert AutocastState.current() == off and torch.is_autocast_cache_enabled()
    assert on.describe() != off.describe()


def test_a_dtype_counts_only_where_autocast_is_on() -> None:
    off = AutocastState.current()
    half = AutocastState(devices=tuple((device, enabled, torch.float16) for device, enabled, _ in off.devices))
    assert half.devices != off.devices and half.describe() == off.describe()


class Doubled(nn.Linear):
    """A class of its own: torch.compile does not trace into torch's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def test_compiled_parts_are_seen_and_run_eagerly_within() -> None:
    runs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        def run(*args: torch.Tensor) -> object:
            runs.append(1)
            return graph.forward(*args)

        return run

    layer = nn.Sequential(Doubled(2, 2))
    assert not is_compiled(layer)
    layer[0].compile(backend=backend)
    x = torch.ones(1, 2)
    try:
        assert is_compiled(layer) and is_compiled(nn.Sequential(torch.compile(nn.Linear(2, 2), backend=backend)))
        compiled = layer(x)
        assert runs == [1]
        with uncompiled(layer):
            assert torch.equal(layer(x), compiled)
        assert runs == [1]
        layer(x)
        assert runs == [1, 1]
    finally:
        torch.compiler.reset()


def test_a_stopwatch_tells_work_and_never_more_waiting_than_there_was() -> None:
    with Stopwatch(torch.device("cpu")) as watch:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
    elapsed = watch.read()
    assert elapsed.wall_us >= 20_000 and elapsed.busy_us >= 19_000
    assert 0 <= elapsed.wait_us <= elapsed.wall_us


@settings(deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_busy_time_is_never_negative(wall: int, wait: int) -> None:
    assert Elapsed(wall_us=wall, wait_us=wait).busy_us == max(wall - wait, 0)
