"""An independent reference for a disputed recipe: the same inputs recomputed on the CPU in double precision.

Local to the calling rank; no collectives. Nothing live is written: a module is copied with its parameters and buffers
already converted, an optimizer slice consists of copies anyway.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from scout_core.adapter import OptimizerSlice, SlicePart
from scout_core.consensus.signature import signatures
from scout_core.replay.capture import Invocation, TensorMeta
from scout_core.replay.evidence import fold
from scout_core.replay.execute import Received, draw_gradient, execute
from scout_core.replay.isolation import AutocastState, deterministic_kernels, preserved_state, seed_everything
from scout_core.replay.local_tensors import is_distributed

FACTOR = 8.0
"""How many times the rounding spread a healthy result may deviate."""

FLOOR_ULPS = 4.0
"""And by how many units in the last place of the largest reference value besides."""

SHAKES = 8
"""Recomputations with every input moved by one rounding error."""

_TF32_EPS = 2.0**-10
_CPU = torch.device("cpu")

Tensors = Sequence[torch.Tensor | None]
Results = Mapping[str, Tensors]
Convert = Callable[[torch.Tensor], torch.Tensor]
Recompute = Callable[[Convert, int, bool], Results]


class Obstacle(enum.IntEnum):
    """Why there is no reference; travels as its number."""

    NONE = 0
    TOO_LARGE = 1
    RANDOM = 2
    RAISED = 3
    NONFINITE = 4
    SHARDED = 5
    NO_LIVE_RESULT = 6


@dataclass(frozen=True, kw_only=True)
class ModuleSubject:
    """A module recipe as every peer received it. `seed` is that of the live replay."""

    module: nn.Module
    invocation: Invocation
    received: Received
    seed: int


@dataclass(frozen=True, kw_only=True)
class SliceSubject:
    """An optimizer recipe: the captured slice and the framework's own update of it."""

    captured: OptimizerSlice
    apply: Callable[[OptimizerSlice], list[torch.Tensor]]


Subject = ModuleSubject | SliceSubject


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A live result against the reference. `signature` is over the reference's bits, equal where CPUs compute alike.

    `ratio` is the largest deviation of any disputed tensor over that tensor's bound: above 1 is outside.
    """

    obstacle: Obstacle = Obstacle.NONE
    signature: int = 0
    ratio: float = 0.0


def measure(subject: Subject, live: Results, surfaces: Sequence[str], budget_bytes: int) -> Measured:
    """Compare `live`, this rank's result by surface, on the disputed `surfaces` with a reference computed here.

    For each tensor the reference R is f(inputs) in float64 on the CPU. An honest result, on any device and in any order
    of summation, is f with rounding errors; how far these carry is measured in two ways:

    - C, the same in the working dtypes on the CPU: |C - R| is one honest deviation, with every intermediate rounded;
    - S_1..S_8, in float64 with every input, parameter and output gradient multiplied by 1 + eps or 1 - eps at random:
      a backward-stable computation is the exact one of inputs moved by about that much (N. J. Higham, Accuracy and
      Stability of Numerical Algorithms, 1.5), so these show cancellation, and values on the edge of a step such as
      ReLU's, where C may have been lucky.

    bound = 8 * max(|C - R|, |S_k - R|) + 4 * eps * max|R|, norms being the largest element of the tensor. eps is the
    spacing at 1 of the coarsest dtype that takes part: inputs, parameters, results, autocast, TF32 where it is allowed.
    An honest result is outside only if all nine deviations, independent of one another, come out eight times smaller
    than its own; the last term is for results whose inputs move nothing.

    Raises what the module raises on the CPU or in float64.
    """
    if _bytes_as_double(subject) > budget_bytes:
        return Measured(obstacle=Obstacle.TOO_LARGE)
    if _sharded(subject):
        return Measured(obstacle=Obstacle.SHARDED)
    recompute = _recompute_module(subject, live) if isinstance(subject, ModuleSubject) else _recompute_slice(subject)
    eps = _coarsest(subject, live)
    with preserved_state(), deterministic_kernels(enabled=True, strict=False):
        working = _chosen(recompute(_to_cpu, 0, True), surfaces)
        again = _chosen(recompute(_to_cpu, 1, True), surfaces)
        if fold(_signed(working)) != fold(_signed(again)):
            return Measured(obstacle=Obstacle.RANDOM)
        exact = _chosen(recompute(_to_double, 0, False), surfaces)
        spreads = [_distance(c, r) for c, r in zip(working, exact, strict=True)]
        for shake in range(SHAKES):
            generator = torch.Generator().manual_seed(shake)
            moved = _chosen(recompute(_shaker(generator, eps), 0, False), surfaces)
            spreads = [max(s, _distance(m, r)) for s, m, r in zip(spreads, moved, exact, strict=True)]
    bounds = [FACTOR * s + FLOOR_ULPS * eps * _largest(r) for s, r in zip(spreads, exact, strict=True)]
    if not all(bound < float("inf") for bound in bounds):
        return Measured(obstacle=Obstacle.NONFINITE)
    ratios = [_over(_distance(t, r), b) for t, r, b in zip(_chosen(live, surfaces), exact, bounds, strict=True)]
    return Measured(signature=fold(_signed(exact)), ratio=max(ratios, default=0.0))


def _recompute_module(subject: ModuleSubject, live: Results) -> Recompute:
    """Output gradients that the live replay drew are drawn again from its outputs' sizes, not from double ones."""
    invocation, received = subject.invocation, subject.received
    gradients = dict(received.gradients)
    for index, output in enumerate(live["output"]):
        drawn = invocation.recomputed or index in invocation.drawn
        if drawn and output is not None and (output.is_floating_point() or output.is_complex()):
            gradients[index] = draw_gradient(output, subject.seed)

    def recompute(convert: Convert, salt: int, working: bool) -> Results:
        plain = replace(
            invocation,
            inputs=None,
            gradient_metas={index: TensorMeta.of(gradient) for index, gradient in gradients.items()},
            drawn=[],
            recomputed=False,
            autocast=_on_cpu(invocation.autocast, subject.module) if working else AutocastState(devices=()),
        )
        given = Received(
            inputs=[convert(tensor) for tensor in received.inputs],
            gradients={index: convert(gradient) for index, gradient in gradients.items()},
            buffers={name: _plain(buffer, working) for name, buffer in received.buffers.items()},
        )
        seed_everything(subject.seed + salt)
        done = execute(_copied(subject.module, convert, working), plain, given, seed=subject.seed + salt)
        return {
            "output": done.outputs,
            "input_gradient": done.input_gradients,
            "parameter_gradient": done.parameter_gradients,
        }

    return recompute


def _copied(module: nn.Module, convert: Convert, working: bool) -> nn.Module:
    """A copy on the CPU whose parameters are `convert`ed on the way, so that nothing is doubled on the device.

    What stands in for `forward` on a single instance is left out: it would call the live module.
    """
    memo: dict[int, object] = {}
    for parameter in nn.Module.parameters(module):
        memo[id(parameter)] = nn.Parameter(convert(parameter.detach()), requires_grad=parameter.requires_grad)
    for part in module.modules():
        held = [*part._buffers.values(), *(v for v in vars(part).values() if isinstance(v, torch.Tensor))]
        for tensor in held:
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = _plain(tensor.detach(), working)
    twin = copy.deepcopy(module, memo)
    for part in twin.modules():
        vars(part).pop("forward", None)
    return twin


def _recompute_slice(subject: SliceSubject) -> Recompute:
    def recompute(convert: Convert, salt: int, working: bool) -> Results:
        parts = tuple(_converted(part, convert, working) for part in subject.captured.parts)
        hyper = [
            {key: _plain(v, working) if isinstance(v, torch.Tensor) else v for key, v in group.items()}
            for group in subject.captured.hyperparameters
        ]
        seed_everything(salt)
        return {"updated_state": subject.apply(replace(subject.captured, parts=parts, hyperparameters=hyper))}

    return recompute


def _converted(part: SlicePart, convert: Convert, working: bool) -> SlicePart:
    """State of the parameter's size is moved with it; a step counter is a number and stays."""
    state = {
        key: (convert(v) if v.numel() == part.parameter.numel() > 1 else _plain(v, working))
        if isinstance(v, torch.Tensor)
        else v
        for key, v in part.state.items()
    }
    return replace(part, parameter=convert(part.parameter), gradient=convert(part.gradient), state=state)


def _to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(_CPU, copy=True)


def _to_double(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_complex():
        return tensor.detach().to(_CPU, torch.complex128, copy=True)
    if tensor.is_floating_point():
        return tensor.detach().to(_CPU, torch.float64, copy=True)
    return _to_cpu(tensor)


def _shaker(generator: torch.Generator, eps: float) -> Convert:
    def shaken(tensor: torch.Tensor) -> torch.Tensor:
        wide = _to_double(tensor)
        if not (wide.is_floating_point() or wide.is_complex()):
            return wide
        signs = torch.randint(0, 2, wide.shape, generator=generator, dtype=torch.int64).mul_(2).sub_(1)
        return wide * (1 + eps * signs.to(torch.float64))

    return shaken


def _plain(tensor: torch.Tensor, working: bool) -> torch.Tensor:
    return _to_cpu(tensor) if working else _to_double(tensor)


def _on_cpu(autocast: AutocastState, module: nn.Module) -> AutocastState:
    """The autocast of the module's own device, on the CPU."""
    kind = next((p.device.type for p in module.parameters()), "cpu")
    return AutocastState(devices=tuple(("cpu", on, dtype) for name, on, dtype in autocast.devices if name == kind))


def _inputs(subject: Subject) -> list[torch.Tensor]:
    if isinstance(subject, ModuleSubject):
        module = subject.module
        return [*nn.Module.parameters(module), *module.buffers(), *subject.received.tensors()]
    parts = subject.captured.parts
    states = [v for part in parts for v in part.state.values() if isinstance(v, torch.Tensor)]
    return [*(p.parameter for p in parts), *(p.gradient for p in parts), *states]


def _sharded(subject: Subject) -> bool:
    metas = subject.invocation.metas() if isinstance(subject, ModuleSubject) else []
    return any(is_distributed(t) for t in _inputs(subject)) or any(m.distribution is not None for m in metas)


def _bytes_as_double(subject: Subject) -> int:
    return sum(tensor.numel() * (16 if tensor.is_complex() else 8) for tensor in _inputs(subject))


def _coarsest(subject: Subject, live: Results) -> float:
    tensors = [*_inputs(subject), *(t for results in live.values() for t in results if t is not None)]
    dtypes = {t.dtype for t in tensors if t.is_floating_point() or t.is_complex()}
    if isinstance(subject, ModuleSubject):
        dtypes |= {dtype for _, on, dtype in subject.invocation.autocast.devices if on}
    found = [torch.finfo(dtype).eps for dtype in dtypes]
    cuda = any(t.is_cuda for t in tensors)
    if cuda and (torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32):
        found.append(_TF32_EPS)
    return max(found, default=0.0)


def _chosen(results: Results, surfaces: Iterable[str]) -> list[torch.Tensor | None]:
    return [tensor for surface in surfaces for tensor in results[surface]]


def _signed(tensors: Tensors) -> list[int | None]:
    present = [t.detach().contiguous() for t in tensors if t is not None]
    words = iter(signatures(present).tolist() if present else [])
    return [None if t is None else next(words) for t in tensors]


def _distance(tensor: torch.Tensor | None, exact: torch.Tensor | None) -> float:
    """The largest absolute difference; infinite where only one is a number, or there is only one tensor."""
    if tensor is None or exact is None:
        return 0.0 if tensor is exact else float("inf")
    a, b = _to_double(tensor), _to_double(exact)
    if not (a.is_floating_point() or a.is_complex()):
        a, b = a.to(torch.float64), b.to(torch.float64)
    if a.numel() == 0:
        return 0.0
    apart = torch.where(a == b, torch.zeros((), dtype=torch.float64), (a - b).abs())
    return float(apart.nan_to_num(nan=float("inf"), posinf=float("inf")).max())


def _largest(exact: torch.Tensor | None) -> float:
    if exact is None or not (exact.is_floating_point() or exact.is_complex()) or exact.numel() == 0:
        return 0.0
    size = exact.abs()
    if bool(size.isnan().any()):
        return float("inf")
    return float(torch.where(size.isinf(), torch.zeros_like(size), size).max())


def _over(distance: float, bound: float) -> float:
    if distance <= 0.0:
        return 0.0
    return distance / bound if bound > 0.0 else float("inf")
