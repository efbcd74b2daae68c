"""Invocations of modules: recorded in the live step, or recomputed from the model's last input.

In the live step hooks stand on the due modules for that one step only. A forward pre-hook copies the first
grad-enabled call (so that a later in-place operation cannot change it), a forward hook asks autograd for the output
gradient, held by reference. Under activation checkpointing this takes the real forward (non-reentrant) or the
recomputation (reentrant, whose first forward runs without gradients), each once. Peers that are not the source keep
sizes and a finiteness flag, no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from scout_core.consensus.structure import structure_signature
from scout_core.replay.isolation import AutocastState, uncompiled
from scout_core.replay.trees import hollow, opaque_type, skeleton, tensor_leaves


@dataclass(frozen=True, kw_only=True)
class TensorMeta:
    """What a peer must know of a tensor to receive it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        return cls(
            shape=tuple(tensor.shape), dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad
        )


@dataclass(kw_only=True)
class Invocation:
    """One call of one module: its arguments, output gradients, autocast state, and the buffers the call changes.

    `arguments` is `(args, kwargs)` with hollow tensors; `inputs` holds the real ones, None on peers that are not the
    source. `gradients[i]` belongs to the i-th tensor of the output; a recomputed invocation has none, its output
    gradients are drawn from the seed instead. `problem` says why the call cannot be replayed.
    """

    step: int
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    input_metas: list[TensorMeta]
    inputs: list[torch.Tensor] | None
    autocast: AutocastState
    training: bool
    recomputed: bool = False
    gradient_metas: dict[int, TensorMeta] = field(default_factory=dict)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    changed_buffers: tuple[str, ...] = ()
    finite: list[torch.Tensor] = field(default_factory=list)
    problem: str | None = None

    def metas(self) -> list[TensorMeta]:
        """Metadata of inputs, then of output gradients: the order in which they travel."""
        return [*self.input_metas, *(self.gradient_metas[i] for i in sorted(self.gradient_metas))]

    def structure(self) -> int:
        """64-bit signature of everything two peers must share to replay one call, tensor sizes left out."""
        plain = [(str(m.dtype), len(m.shape), m.requires_grad, m.device.type) for m in self.metas()]
        return structure_signature(
            (
                skeleton(self.arguments),
                plain,
                sorted(self.gradient_metas),
                self.autocast.describe(),
                self.training,
                self.changed_buffers,
                self.recomputed,
            )
        )

    def shape(self) -> int:
        """64-bit signature of the tensor sizes."""
        return structure_signature([m.shape for m in self.metas()])


class ModuleCapture:
    """Hooks on one module for one call. `keep` is True on the source, whose tensors the peers will receive."""

    def __init__(self, module: nn.Module, *, step: int, keep: bool, recomputed: bool = False) -> None:
        self.invocation: Invocation | None = None
        self._step = step
        self._keep = keep
        self._recomputed = recomputed
        self._versions: list[int] | None = None
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after),
        ]

    def remove(self) -> None:
        """Take the hooks off again; the invocation stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.invocation is None and torch.is_grad_enabled():
            self.invocation = self._record(module, args, kwargs)
            self._versions = [buffer._version for buffer in module.buffers()]

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Invocation:
        leaves = tensor_leaves((args, kwargs))
        opaque = opaque_type((args, kwargs))
        return Invocation(
            step=self._step,
            arguments=hollow((args, kwargs)),
            input_metas=[TensorMeta.of(leaf) for leaf in leaves],
            inputs=[leaf.detach().clone() for leaf in leaves] if self._keep else None,
            autocast=AutocastState.current(),
            training=module.training,
            recomputed=self._recomputed,
            finite=all_finite(leaves),
            problem=None if opaque is None else f"an argument of type {opaque} cannot be carried to another rank",
        )

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._versions is None or self.invocation is None or not torch.is_grad_enabled():
            return
        named = zip(module.named_buffers(), self._versions, strict=True)
        self.invocation.changed_buffers = tuple(name for (name, buffer), old in named if buffer._version != old)
        self._versions = None
        if self._recomputed:
            return
        for index, tensor in enumerate(tensor_leaves(output)):
            if tensor.requires_grad:
                tensor.register_hook(  # type: ignore[no-untyped-call]
                    _GradientTap(self.invocation, index, self._keep)
                )


class _GradientTap:
    """Receives the gradient of one output tensor. Holds the invocation, so it must go with the step's graph."""

    def __init__(self, invocation: Invocation, index: int, keep: bool) -> None:
        self._invocation = invocation
        self._index = index
        self._keep = keep

    def __call__(self, gradient: torch.Tensor) -> None:
        if self._index in self._invocation.gradient_metas:
            return
        self._invocation.gradient_metas[self._index] = TensorMeta.of(gradient)
        self._invocation.finite += all_finite([gradient])
        if self._keep:
            self._invocation.gradients[self._index] = gradient.detach()


class RootInput:
    """The model's last training input, by reference: what a check off schedule recomputes the invocations from.

    One forward pre-hook on the outermost module; it stores two references and the autocast state, nothing else.
    """

    def __init__(self, root: nn.Module) -> None:
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.autocast: AutocastState | None = None
        self._handle = root.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            self.call = (args, kwargs)
            self.autocast = AutocastState.current()

    def remove(self) -> None:
        """Take the hook off and drop the references."""
        self._handle.remove()
        self.call = None


def recompute(
    plain_root: nn.Module, source: RootInput, modules: Sequence[nn.Module], *, step: int, keep: bool
) -> list[Invocation | None]:
    """Run the model forward once, isolated and eager, and record the call of each of `modules`.

    Called by every peer at a boundary; runs whatever collectives the model's own forward runs. None for a module the
    forward did not call. The caller preserves random state; parameters are only read, buffers are copies. The graph
    that arises is dropped, never run backward.
    """
    if source.call is None or source.autocast is None:
        return [None] * len(modules)
    args, kwargs = source.call
    buffers = {name: buffer.detach().clone() for name, buffer in plain_root.named_buffers()}
    captures = [ModuleCapture(module, step=step, keep=keep, recomputed=True) for module in modules]
    try:
        with torch.enable_grad(), source.autocast.enter(), uncompiled(plain_root):
            torch.func.functional_call(plain_root, buffers, args, kwargs)
    finally:
        for capture in captures:
            capture.remove()
    return [capture.invocation for capture in captures]


def all_finite(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Bool scalars that are all True if the floating-point tensors hold neither NaN nor infinity.

    On their devices, without waiting for them; each tensor is read once, on a GPU in few launches for the whole list.
    """
    floating = [t.detach() for t in tensors if t is not None and t.is_floating_point() and t.numel()]
    wide = [t.float() if t.element_size() == 1 else t for t in floating]  # nothing reduces 8-bit floats
    cuda = [t for t in wide if t.is_cuda]
    flags = [torch.isfinite(torch.stack(torch.aminmax(t))).all() for t in wide if not t.is_cuda]
    return flags + ([torch.isfinite(torch.nn.utils.get_total_norm(cuda, float("inf")))] if cuda else [])
