"""One isolated forward and backward of a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from scout_core.replay.capture import Invocation
from scout_core.replay.isolation import Stopwatch, uncompiled
from scout_core.replay.local_tensors import distribution, local_part
from scout_core.replay.private_state import preserved_attributes
from scout_core.replay.trees import refill, tensor_leaves


@dataclass(frozen=True, kw_only=True)
class Received:
    """An invocation as it arrived on a peer: tensors in the order of `Invocation.metas()`, and changed buffers."""

    inputs: list[torch.Tensor]
    gradients: dict[int, torch.Tensor]
    buffers: Mapping[str, torch.Tensor]

    def tensors(self) -> list[torch.Tensor]:
        """Everything that was carried, in a fixed order, for comparing it."""
        return [*self.inputs, *(self.gradients[i] for i in sorted(self.gradients)), *self.buffers.values()]


@dataclass(frozen=True, kw_only=True)
class Execution:
    """What one replay produced. Entries are None where autograd had nothing to say."""

    outputs: list[torch.Tensor | None]
    input_gradients: list[torch.Tensor | None]
    parameter_gradients: list[torch.Tensor | None]
    stopwatch: Stopwatch


class _ForwardBackward(nn.Module):
    """Runs its child forward and backward in one call, so that substituted parameters stay in place for both.

    Checkpointed parts recompute their forward during backward; outside `functional_call` they would find the live
    parameters and write gradients into training.
    """

    def __init__(
        self,
        module: nn.Module,
        invocation: Invocation,
        received: Received,
        seed: int,
        wanted: list[torch.Tensor],
        end_forward: Callable[[], None],
    ) -> None:
        super().__init__()
        self.module = module
        self._invocation = invocation
        self._received = received
        self._seed = seed
        self._wanted = wanted
        self._end_forward = end_forward

    def forward(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        with self._invocation.autocast.enter():
            leaves = tensor_leaves(self.module(*args, **kwargs))
        self._end_forward()
        indices = [index for index, leaf in enumerate(leaves) if leaf.requires_grad]
        drawn = indices if self._invocation.recomputed else self._invocation.drawn
        gradients = {
            index: self._draw(leaves[index]) if index in drawn else self._given(index, leaves[index])
            for index in indices
            if index in drawn or index in self._received.gradients
        }
        if gradients:
            outputs = [leaves[index] for index in gradients]
            # named inputs keep gradients out of parameters that the module borrows from elsewhere; a reentrant
            # checkpoint refuses them
            inputs = None if _has_reentrant_checkpoint(outputs) else self._wanted
            torch.autograd.backward(outputs, list(gradients.values()), inputs=inputs)
        return [local_part(leaf) for leaf in leaves]

    def _given(self, index: int, output: torch.Tensor) -> torch.Tensor:
        """The gradient that was carried. A wrapper that casts outputs does so outside of what is replayed."""
        gradient = self._received.gradients[index]
        return self._invocation.gradient_metas[index].whole(gradient.to(output.dtype))

    def _draw(self, output: torch.Tensor) -> torch.Tensor:
        spread = distribution(output)
        if spread is not None:
            return spread.wrap(self._draw(local_part(output)))
        return draw_gradient(output, self._seed)


def draw_gradient(output: torch.Tensor, seed: int) -> torch.Tensor:
    """An output gradient of the size a mean-reduced loss gives: unit noise over the number of rows. No DTensor."""
    rows = max(output.numel() // max(output.shape[-1], 1), 1) if output.dim() else 1
    generator = torch.Generator(device=output.device).manual_seed(seed % (1 << 63))
    narrow = output.element_size() == 1  # nothing draws 8-bit floats
    noise = torch.empty_like(output, dtype=torch.float32 if narrow else output.dtype)
    return noise.normal_(std=1 / rows, generator=generator).to(output.dtype)


def _dense(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The part that lies here. An `Embedding(sparse=True)` gives sparse ones, whose repeated rows come in any order."""
    if gradient is None:
        return None
    return gradient.to_dense() if gradient.is_sparse else local_part(gradient)


def _has_reentrant_checkpoint(outputs: Sequence[torch.Tensor]) -> bool:
    """Whether the graph behind `outputs` holds a node of `torch.utils.checkpoint` with `use_reentrant=True`."""
    pending = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        if node.name() == "CheckpointFunctionBackward":
            return True
        following = {successor for successor, _ in node.next_functions if successor is not None} - seen
        seen |= following
        pending += following
    return False


def execute(
    module: nn.Module,
    invocation: Invocation,
    received: Received,
    *,
    seed: int,
    end_forward: Callable[[], None] = lambda: None,
) -> Execution:
    """Replay one call of `module` on copies and aliases; live parameters, gradients and buffers are not written.

    Local to the calling rank unless the module communicates itself. The caller has seeded the generators and set
    determinism, and preserves both. `seed` draws output gradients where none was captured. `end_forward` is called
    between forward and backward.
    """
    device = next((t.device for t in (*module.parameters(), *received.inputs)), torch.device("cpu"))
    # the base class's own names: wrappers (activation checkpointing) show shortened ones, which lead to no attribute
    named = nn.Module.named_parameters(module)
    parameters = {name: p.detach().requires_grad_(p.requires_grad) for name, p in named}
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}
    buffers.update({name: tensor.clone() for name, tensor in received.buffers.items()})
    leaves = [
        tensor.detach().requires_grad_(meta.requires_grad)
        for tensor, meta in zip(received.inputs, invocation.input_metas, strict=True)
    ]
    # a copy of each leaf enters the module: it may be changed in place, the leaf and the received tensor may not
    copies = [meta.whole(leaf.clone()) for leaf, meta in zip(leaves, invocation.input_metas, strict=True)]
    args, kwargs = refill(invocation.arguments, copies)
    wanted = [tensor for tensor in (*leaves, *parameters.values()) if tensor.requires_grad]
    shim = _ForwardBackward(module, invocation, received, seed, wanted, end_forward)
    substitutes = {f"module.{name}": tensor for name, tensor in (parameters | buffers).items()}
    isolated = preserved_attributes(module, seed=seed)
    with isolated, torch.enable_grad(), uncompiled(module), Stopwatch(device) as stopwatch:
        outputs = torch.func.functional_call(shim, substitutes, args, kwargs)
    return Execution(
        outputs=list(outputs),
        input_gradients=[
            _dense(leaf.grad) for leaf, meta in zip(leaves, invocation.input_metas, strict=True) if meta.requires_grad
        ],
        parameter_gradients=[_dense(p.grad) for p in parameters.values() if p.requires_grad],
        stopwatch=stopwatch,
    )
