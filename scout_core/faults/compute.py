"""Faults of computation: a module that computes wrongly, slowly, or differently each time.

All act inside the module's forward or backward, so training and replay both see them. Elements and bits are taken
modulo what the tensor at hand has, since sizes and, under autocast, dtypes change from call to call.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from scout_core.faults.bits import bit_width, flip_bit, own_copy
from scout_core.faults.fault import Fault, Forward, ForwardFault, Schedule
from scout_core.replay.trees import map_tensors, tensor_leaves


def corrupt_output(module: nn.Module, element: int, bit: int, *, every: int = 1, times: int | None = None) -> Fault:
    """Flip one bit of the first floating-point tensor that `module` returns, in every `every`-th call, `times` times.

    Raises `TypeError` from the module's call when it returns no floating-point tensor.
    """

    def act(forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return _change_first(forward(*args, **kwargs), lambda out: _flip_forward(out, element, bit))

    return ForwardFault(module, act, Schedule(every, times))


def corrupt_input_gradient(
    module: nn.Module, element: int, bit: int, *, every: int = 1, times: int | None = None
) -> Fault:
    """Flip one bit of the gradient that `module` passes to the first of its inputs that needs one."""

    def act(forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        needing = [leaf for leaf in tensor_leaves((args, dict(kwargs))) if leaf.requires_grad]
        if not needing or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        flipped = _flip_backward(needing[0], element, bit)
        new_args, new_kwargs = map_tensors(
            lambda leaf: flipped if leaf is needing[0] else leaf, (tuple(args), dict(kwargs))
        )
        return forward(*new_args, **new_kwargs)

    return ForwardFault(module, act, Schedule(every, times))


def corrupt_parameter_gradient(
    module: nn.Module, parameter: str, element: int, bit: int, *, every: int = 1, times: int | None = None
) -> Fault:
    """Flip one bit of the gradient that each backward of `module` gives to its parameter of this dotted name.

    The flip happens inside backward, before gradients are accumulated or reduced. Raises `AttributeError` when there
    is no such parameter.
    """
    module.get_parameter(parameter)
    path, _, name = parameter.rpartition(".")
    owner = module.get_submodule(path)

    def act(forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        slots: dict[str, Any] = owner._parameters
        whole = slots[name]
        if whole is None or not whole.requires_grad or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # a tensor in the parameter's place for this call, the way torch.func.functional_call substitutes them
        slots[name] = _flip_backward(whole, element, bit)
        try:
            return forward(*args, **kwargs)
        finally:
            slots[name] = whole

    return ForwardFault(module, act, Schedule(every, times))


def nondeterministic_kernel(module: nn.Module, *, every: int = 1, times: int | None = None) -> Fault:
    """Make the first floating-point tensor that `module` returns differ in its last bits from call to call.

    The same spread as that of a summation whose order changes: each element moves by at most one unit in its last
    place. Randomness comes from the operating system, so no seed repeats it and no generator of the job is advanced.
    """

    def act(forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        return _change_first(forward(*args, **kwargs), _jitter)

    return ForwardFault(module, act, Schedule(every, times))


def slow_module(
    module: nn.Module, seconds: float, *, on_host: bool = False, every: int = 1, times: int | None = None
) -> Fault:
    """Make each forward of `module` take `seconds` longer on its device: busy, not asleep.

    On the CPU, and `on_host`, the calling thread spins for `seconds` of its own CPU time, so a crowded host does not
    shorten the fault. On a GPU a spinning kernel is queued on the current stream; where processes share the GPU that
    slows them all, as they take turns.
    """
    if not seconds > 0:
        raise ValueError(f"seconds={seconds} must be above 0")

    def act(forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        result = forward(*args, **kwargs)
        leaves = tensor_leaves(result) or tensor_leaves((args, dict(kwargs)))
        if leaves and leaves[0].is_cuda and not on_host:
            _spin(round(seconds * _cycles_per_second(leaves[0].device)))
        else:
            end = time.thread_time() + seconds
            while time.thread_time() < end:
                pass
        return result

    return ForwardFault(module, act, Schedule(every, times))


class _FlipForward(torch.autograd.Function):
    """One bit flipped on the way forward; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, element: int, bit: int) -> torch.Tensor:
        return _flipped(tensor, element, bit)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None, None


class _FlipBackward(torch.autograd.Function):
    """Unchanged on the way forward; one bit of the gradient flipped on the way back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, element: int, bit: int) -> torch.Tensor:
        ctx.place = (element, bit)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _flipped(gradients[0], *ctx.place), None, None


def _flip_forward(tensor: torch.Tensor, element: int, bit: int) -> torch.Tensor:
    flipped: torch.Tensor = _FlipForward.apply(tensor, element, bit)  # type: ignore[no-untyped-call]
    return flipped


def _flip_backward(tensor: torch.Tensor, element: int, bit: int) -> torch.Tensor:
    same: torch.Tensor = _FlipBackward.apply(tensor, element, bit)  # type: ignore[no-untyped-call]
    return same


def _flipped(tensor: torch.Tensor, element: int, bit: int) -> torch.Tensor:
    """A copy with one bit flipped on this rank; element and bit modulo what the tensor has here."""
    copy, own = own_copy(tensor)
    if own.numel():
        flip_bit(own, element % own.numel(), bit % bit_width(own))
    return copy


def _jitter(tensor: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator(device=tensor.device)
    generator.manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)
    steps = torch.randint(-1, 2, tensor.shape, generator=generator, device=tensor.device)
    return tensor * (1 + steps.to(tensor.dtype) * torch.finfo(tensor.dtype).eps)


def _change_first(result: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`result` with its first floating-point tensor changed."""
    first = next((leaf for leaf in tensor_leaves(result) if leaf.is_floating_point()), None)
    if first is None:
        raise TypeError("the module to be made faulty returns no floating-point tensor; name another module")
    changed = change(first)
    return map_tensors(lambda leaf: changed if leaf is first else leaf, result)


def _spin(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


@functools.cache
def _cycles_per_second(device: torch.device) -> float:
    """Rate of the counter that `torch.cuda._sleep` counts in, measured once with events around 20 million cycles."""
    cycles = 20_000_000
    with torch.cuda.device(device):
        _spin(cycles)  # brings the clock up
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        _spin(cycles)
        stop.record()
        stop.synchronize()
        return cycles / (float(start.elapsed_time(stop)) / 1e3)
