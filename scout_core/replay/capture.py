"""Invocations of modules: recorded in the live step, or recomputed from the model's last input.

In the live step hooks stand on the due modules for that one step only. A forward pre-hook copies the first
grad-enabled call of each pass through the model (so that a later in-place operation cannot change it), a forward hook
asks autograd for the output gradient, held by reference; the newest call that got its gradients is replayed, so a pass
that led to no update is none. Under activation checkpointing this takes the real forward (non-reentrant) or the
recomputation (reentrant, whose first forward runs without gradients), each once. Peers that are not the source keep
sizes and a finiteness flag, no tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from scout_core.consensus.signature import tensor_signature
from scout_core.consensus.structure import structure_signature
from scout_core.replay.guard import attempt
from scout_core.replay.isolation import AutocastState, uncompiled
from scout_core.replay.local_tensors import Distribution, distribution, local_part
from scout_core.replay.private_state import preserved_attributes
from scout_core.replay.trees import hollow, opaque_type, skeleton, tensor_leaves


@dataclass(frozen=True, kw_only=True)
class TensorMeta:
    """What a peer must know of a tensor to receive it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    distribution: Distribution | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """Of what lies on this rank: a DTensor's local part."""
        part = local_part(tensor)
        return cls(
            shape=tuple(part.shape),
            dtype=tensor.dtype,
            device=part.device,
            requires_grad=tensor.requires_grad,
            distribution=distribution(tensor),
        )

    def describe(self) -> tuple[object, ...]:
        """What peers must have alike to replay one call, the sizes left out."""
        layout = None if self.distribution is None else self.distribution.describe()
        return str(self.dtype), len(self.shape), self.requires_grad, self.device.type, layout

    def sizes(self) -> tuple[int, ...]:
        """Everything that changes with the size of the input: of a DTensor also what the whole of it has."""
        whole = self.distribution
        return self.shape if whole is None else (*self.shape, *whole.shape, *whole.stride)

    def resized(self, sizes: Sequence[int]) -> TensorMeta:
        """The same tensor with another's `sizes()`."""
        dims, rest = len(self.shape), tuple(sizes)
        if self.distribution is None:
            return replace(self, shape=rest)
        shape, stride = rest[dims : 2 * dims], rest[2 * dims :]
        whole = replace(self.distribution, shape=torch.Size(shape), stride=stride)
        return replace(self, shape=rest[:dims], distribution=whole)

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """The tensor of which `part` lies on this rank."""
        return part if self.distribution is None else self.distribution.wrap(part)


@dataclass(kw_only=True)
class Invocation:
    """One call of one module: its arguments, output gradients, autocast state, and the buffers the call changes.

    `arguments` is `(args, kwargs)` with hollow tensors; `inputs` holds the real ones, None on peers that are not the
    source. `gradients[i]` belongs to the i-th tensor of the output; those in `drawn`, and all of a recomputed
    invocation, are drawn from the seed instead; a frozen module, not `differentiable`, needs none. `problem` says why
    the call cannot be replayed.
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
    drawn: list[int] = field(default_factory=list)
    changed_buffers: tuple[str, ...] = ()
    finite: list[torch.Tensor] = field(default_factory=list)
    differentiable: bool = True
    problem: str | None = None

    @property
    def complete(self) -> bool:
        """Whether everything a replay needs is there: output gradients, unless none can come or they are drawn."""
        return self.recomputed or bool(self.gradient_metas) or bool(self.drawn) or not self.differentiable

    def metas(self) -> list[TensorMeta]:
        """Metadata of inputs, then of output gradients: the order in which they travel."""
        return [*self.input_metas, *(self.gradient_metas[i] for i in sorted(self.gradient_metas))]

    def structure(self) -> int:
        """64-bit signature of everything two peers must share to replay one call, tensor sizes left out."""
        plain = [meta.describe() for meta in self.metas()]
        return structure_signature(
            (
                skeleton(self.arguments),
                plain,
                sorted(self.gradient_metas),
                sorted(self.drawn),
                self.autocast.describe(),
                self.training,
                self.changed_buffers,
                self.recomputed,
            )
        )

    def shape(self) -> int:
        """64-bit signature of the tensor sizes."""
        return structure_signature([m.sizes() for m in self.metas()])


_LARGE_OUTPUT = 4
"""An output gradient of more elements than this multiple of the inputs is drawn by each peer, not held and carried:
that of logits weighs as much as everything else of a check together."""

_MOST_PENDING = 4
"""Calls kept that have no gradients yet: a step may run several forwards before its backward, or one for nothing."""


class ModuleCapture:
    """Hooks on one module for one step. `keep` is True on the source, whose tensors the peers will receive.

    `running` holds, per training mode, the names of buffers that the module's calls change, even if their version does
    not say so. The first capture fills it in by comparing values, which waits for the device.

    Whatever goes wrong inside the hooks is logged and sets `failed`; the user's forward and backward go on.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        step: int,
        keep: bool,
        recomputed: bool = False,
        running: dict[bool, frozenset[str]],
    ) -> None:
        self.failed = False
        self._step = step
        self._keep = keep
        self._recomputed = recomputed
        self._running = running
        self._calls: list[Invocation] = []
        self._waiting = True
        self._open: tuple[Invocation, list[_Buffer]] | None = None
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after),
        ]

    @property
    def invocation(self) -> Invocation | None:
        """The newest complete call; without one the newest call."""
        complete = [call for call in self._calls if call.complete] or self._calls
        return complete[-1] if complete else None

    def next_pass(self) -> None:
        """The model is called anew: record again; keep the newest complete call and the last that may become so."""
        complete = [call for call in self._calls if call.complete][-1:]
        self._calls = complete + [call for call in self._calls if not call.complete][-_MOST_PENDING:]
        self._waiting, self._open = True, None

    def remove(self) -> None:
        """Take the hooks off again; the invocation stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # a reentrant checkpoint runs its forward without gradients, and a recomputed pass has no other
        if self._waiting and (self._recomputed or torch.is_grad_enabled()):
            self._waiting = False
            self._guarded(lambda: self._record(module, args, kwargs))

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves = tensor_leaves((args, kwargs))
        metas = [TensorMeta.of(leaf) for leaf in leaves]
        if not torch.is_grad_enabled():
            metas = [replace(meta, requires_grad=meta.dtype.is_floating_point) for meta in metas]
        opaque = opaque_type((args, kwargs))
        call = Invocation(
            step=self._step,
            arguments=hollow((args, kwargs)),
            input_metas=metas,
            inputs=[local_part(leaf).clone() for leaf in leaves] if self._keep else None,
            autocast=AutocastState.current(),
            training=module.training,
            recomputed=self._recomputed,
            # what needs no gradient may well hold infinities: masks do
            finite=all_finite([leaf for leaf in leaves if leaf.requires_grad]),
            problem=None if opaque is None else f"an argument of type {opaque} cannot be carried to another rank",
        )
        self._calls.append(call)
        self._open = (
            call,
            [
                _Buffer(
                    tensor=buffer,
                    version=buffer._version,
                    signature=tensor_signature(buffer) if module.training not in self._running else None,
                )
                for buffer in module.buffers()
            ],
        )

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._open is not None and (self._recomputed or torch.is_grad_enabled()):
            (call, buffers), self._open = self._open, None
            self._guarded(lambda: self._finish(call, buffers, module, output))

    def _finish(self, call: Invocation, buffers: list[_Buffer], module: nn.Module, output: Any) -> None:
        # a buffer changes in place, or another tensor takes its place
        same = {id(buffer.tensor) for buffer in buffers if buffer.is_unchanged()}
        known = self._running.get(call.training, frozenset())
        call.changed_buffers = tuple(
            name for name, buffer in module.named_buffers() if id(buffer) not in same or name in known
        )
        self._running.setdefault(call.training, frozenset(call.changed_buffers))
        if self._recomputed:
            return
        differentiable = [(i, tensor) for i, tensor in enumerate(tensor_leaves(output)) if tensor.requires_grad]
        call.differentiable = bool(differentiable)
        for index, tensor in differentiable:
            tap = tensor.register_hook(_GradientTap(call, index, self._keep))  # type: ignore[no-untyped-call]
            if tensor.is_leaf:  # a parameter handed out as it is outlives the step
                self._handles.append(tap)

    def _guarded(self, work: Callable[[], None]) -> None:
        self.failed = attempt("recording an invocation", work).failure is not None or self.failed


@dataclass(frozen=True, kw_only=True)
class _Buffer:
    """A buffer before a call. Its version is not to be trusted alone: batch norm's kernels change running statistics
    without raising it (torch 2.10 to 2.13)."""

    tensor: torch.Tensor
    version: int
    signature: int | None

    def is_unchanged(self) -> bool:
        if self.tensor._version != self.version:
            return False
        return self.signature is None or tensor_signature(self.tensor) == self.signature


class _GradientTap:
    """Receives the gradient of one output tensor. Holds the invocation, so it must go with the step's graph."""

    def __init__(self, invocation: Invocation, index: int, keep: bool) -> None:
        self._invocation = invocation
        self._index = index
        self._keep = keep

    def __call__(self, gradient: torch.Tensor) -> None:
        if self._index not in (*self._invocation.gradient_metas, *self._invocation.drawn):
            attempt("recording an output gradient", lambda: self._record(gradient))

    def _record(self, gradient: torch.Tensor) -> None:
        call = self._invocation
        call.finite += all_finite([gradient])
        carried = sum(math.prod(meta.shape) for meta in call.input_metas if meta.dtype.is_floating_point)
        if carried and local_part(gradient).numel() > _LARGE_OUTPUT * carried:
            call.drawn.append(self._index)
            return
        call.gradient_metas[self._index] = TensorMeta.of(gradient)
        if self._keep:
            self._invocation.gradients[self._index] = local_part(gradient)


class RootInput:
    """The model's last training input, by reference: what a check off schedule recomputes the invocations from.

    One forward pre-hook on the outermost module; it stores two references and the autocast state, and calls `on_pass`.
    """

    def __init__(self, root: nn.Module, on_pass: Callable[[], None]) -> None:
        self._on_pass = on_pass
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.autocast: AutocastState | None = None
        self._handle = root.register_forward_pre_hook(self._before, with_kwargs=True)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._on_pass()
        if module.training and torch.is_grad_enabled():
            self.call = (args, kwargs)
            self.autocast = AutocastState.current()

    def remove(self) -> None:
        """Take the hook off and drop the references."""
        self._handle.remove()
        self.call = None


def recompute(
    plain_root: nn.Module,
    source: RootInput,
    modules: Sequence[nn.Module],
    running: Sequence[dict[bool, frozenset[str]]],
    *,
    step: int,
    keep: bool,
    forward_only: AbstractContextManager[None],
) -> list[Invocation | None]:
    """Run the model forward once, isolated and eager, and record the call of each of `modules`.

    Called by every peer at a boundary; runs whatever collectives the model's own forward runs. None for a module the
    forward did not call. The caller preserves random state; parameters are only read, buffers are copies. The graph
    that arises is dropped, never run backward. `forward_only` is the adapter's context for such a pass; when it
    switches gradients off, every floating-point input is taken for one that needs one.
    """
    if source.call is None or source.autocast is None:
        return [None] * len(modules)
    args, kwargs = source.call
    buffers = {name: buffer.detach().clone() for name, buffer in plain_root.named_buffers()}
    with preserved_attributes(plain_root):
        captures = [
            ModuleCapture(module, step=step, keep=keep, recomputed=True, running=known)
            for module, known in zip(modules, running, strict=True)
        ]
        try:
            with forward_only, source.autocast.enter(), uncompiled(plain_root):
                torch.func.functional_call(plain_root, buffers, args, kwargs)
        finally:
            for capture in captures:
                capture.remove()
    return [capture.invocation for capture in captures]


def all_finite(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    """Bool scalars that are all True if the floating-point tensors hold neither NaN nor infinity.

    On their devices, without waiting for them; each tensor is read once, on a GPU in few launches for the whole list.
    """
    floating = [local_part(t) for t in tensors if t is not None and t.is_floating_point()]
    floating = [t for t in floating if t.numel()]
    wide = [t.float() if t.element_size() == 1 else t for t in floating]  # nothing reduces 8-bit floats
    cuda = [t for t in wide if t.is_cuda]
    flags = [torch.isfinite(torch.stack(torch.aminmax(t))).all() for t in wide if not t.is_cuda]
    return flags + ([torch.isfinite(torch.nn.utils.get_total_norm(cuda, float("inf")))] if cuda else [])
