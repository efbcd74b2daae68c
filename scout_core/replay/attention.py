"""Deterministic attention where torch's deterministic mode as a whole cannot be had.

On CUDA, torch refuses every matrix product under strict determinism unless CUBLAS_WORKSPACE_CONFIG was set before the
first one in the process, and under the mode that only warns its fused attention kernels stay nondeterministic in
backward. So strictness is switched on for attention alone: around the call in forward, and in backward between two
identity functions that enclose the kernel's own node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def _strict() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


class _BackwardBegins(torch.autograd.Function):
    """Identity on attention's output: its backward runs right before the kernel's."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        torch.use_deterministic_algorithms(True)
        return gradient


class _BackwardEnds(torch.autograd.Function):
    """Identity on attention's inputs: its backward runs right after the kernel's."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.use_deterministic_algorithms(True, warn_only=True)
        return gradients


_QKV = ("query", "key", "value")


class DeterministicAttention(TorchFunctionMode):
    """Makes `scaled_dot_product_attention` within the block repeat itself bit for bit, forward and backward.

    The backward must run before the surrounding deterministic mode is left. Autograd runs ready nodes last-made first,
    so nothing comes between the enclosed three. Attention that falls back to plain matrix products is left alone: it
    repeats itself, and strictness would refuse it.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is not torch.nn.functional.scaled_dot_product_attention or not torch.is_grad_enabled():
            return func(*args, **options)
        remaining = iter(args)
        query, key, value = (next(remaining) if n < len(args) else options.pop(_QKV[n]) for n in range(3))
        rest = list(remaining)
        enclosed = _BackwardEnds.apply(query, key, value)  # type: ignore[no-untyped-call]
        try:
            with _strict():
                output = func(*enclosed, *rest, **options)
        except RuntimeError as refused:
            if "deterministic" not in str(refused):
                raise
            return func(query, key, value, *rest, **options)
        return _BackwardBegins.apply(output)  # type: ignore[no-untyped-call]
