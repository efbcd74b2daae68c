"""A bounded slice of a `torch.optim` update: copied before the step, recomputed on the copies."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from scout_core.adapter import OptimizerSlice, SlicePart
from scout_core.consensus.structure import structure_signature
from scout_core.replay.local_tensors import is_distributed, local_part, part_like

_ELEMENTWISE = (
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
"""Optimizers of `torch.optim` that update each element from its own gradient and state alone, so any run of elements
can be updated by itself. Others are replayed in whole parameters."""


class SliceableOptimizer:
    """Reads slices of one optimizer and replays them. Local to the rank; no collectives."""

    def __init__(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        self._optimizer = optimizer
        self._names = names
        kind = type(optimizer)
        self.elementwise = kind.__module__.startswith("torch.optim") and kind.__name__ in _ELEMENTWISE

    def name(self, parameter: torch.Tensor) -> str:
        """The parameter's name in the model, or `unnamed`."""
        return self._names.get(id(parameter), "unnamed")

    def capture(self, cursor: int, budget: int, *, step: int, draw_missing: bool = False) -> OptimizerSlice | str:
        """Copies of up to `budget` elements from flat element `cursor` on, or why there are none."""
        if _needs_closure(self._optimizer):
            return f"{type(self._optimizer).__name__}.step(closure) computes its gradients inside the step"
        owned = [
            (g, i, p) for g, group in enumerate(self._optimizer.param_groups) for i, p in enumerate(group["params"])
        ]
        with_gradient = [(g, i, p) for g, i, p in owned if p.grad is not None or (draw_missing and p.requires_grad)]
        if not with_gradient:
            return "no parameter has a gradient"
        if any(p.grad is not None and p.grad.is_sparse for _, _, p in with_gradient):
            return "sparse gradients have no slice that could be replayed"
        if not self.elementwise and any(is_distributed(p) for _, _, p in with_gradient):
            return f"{type(self._optimizer).__name__} updates whole parameters, and these are distributed over ranks"
        if any(p.grad is not None and part_like(p.grad, p) is None for _, _, p in with_gradient):
            return "gradients of distributed parameters are not summed yet when the optimizer steps"
        runs = list(self._runs([local_part(p).numel() for _, _, p in with_gradient], cursor, budget))
        parts = tuple(self._part(*with_gradient[index], start, stop, step) for index, start, stop in runs)
        hyperparameters = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]
        identity = structure_signature([(p.name, p.start, p.stop, p.group, sorted(p.state)) for p in parts])
        return OptimizerSlice(parts=parts, hyperparameters=hyperparameters, identity=identity, step=step)

    def _runs(self, sizes: list[int], cursor: int, budget: int) -> Iterator[tuple[int, int, int]]:
        """`(parameter, start, stop)` runs over `budget` elements, cyclically from `cursor`, no element twice."""
        total = sum(sizes)
        position, remaining = cursor % max(total, 1), min(budget, total)
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        index = max((i for i, offset in enumerate(offsets) if offset <= position and sizes[i]), default=0)
        start = position - offsets[index]
        visited = 0
        while remaining > 0 and visited <= len(sizes):
            if not self.elementwise:
                if sizes[index]:
                    yield index, 0, sizes[index]
                remaining -= sizes[index]
            elif start < sizes[index]:
                stop = min(sizes[index], start + remaining)
                yield index, start, stop
                remaining -= stop - start
            index, start, visited = (index + 1) % len(sizes), 0, visited + 1

    def _part(self, group: int, place: int, parameter: torch.Tensor, start: int, stop: int, step: int) -> SlicePart:
        own_shape = local_part(parameter).shape

        def cut(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return copy.deepcopy(value)
            part = part_like(value, parameter)
            assert part is not None, "capture() refuses gradients that are not summed yet"
            if not self.elementwise or part.shape != own_shape:
                return part.clone()
            return part.reshape(-1)[start:stop].clone()

        gradient = parameter.grad if parameter.grad is not None else _drawn_gradient(parameter, step)
        state = self._optimizer.state.get(parameter, {})
        return SlicePart(
            name=self.name(parameter),
            start=start,
            stop=stop,
            parameter=cut(parameter),
            gradient=cut(gradient),
            state={key: cut(value) for key, value in state.items()},
            group=group,
            index=place,
        )

    def apply(self, captured: OptimizerSlice) -> list[torch.Tensor]:
        """Updated parameters, then updated state, of a slice: by the optimizer's own `step`, on further copies.

        Every call starts from the captured values, so calling twice gives the same bits if the kernel repeats itself.
        """
        replica = self._empty_replica()
        replica.param_groups = [{**copy.deepcopy(dict(h)), "params": []} for h in captured.hyperparameters]
        updated: list[torch.Tensor] = []
        for part in captured.parts:
            parameter = torch.nn.Parameter(part.parameter.clone())
            parameter.grad = part.gradient.clone()
            replica.param_groups[part.group]["params"].append(parameter)
            if part.state:
                replica.state[parameter] = {
                    key: value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
                    for key, value in part.state.items()
                }
            updated.append(parameter)
        _bare_step(replica)()
        state = [value for p in updated for value in replica.state[p].values() if isinstance(value, torch.Tensor)]
        return [*(p.detach() for p in updated), *state]

    def live(self, captured: OptimizerSlice) -> list[torch.Tensor]:
        """The live values where `captured` was cut, in the order of `apply`. Nothing is copied."""

        def cut(value: torch.Tensor, part: SlicePart, own_shape: torch.Size) -> torch.Tensor:
            found = local_part(value)
            whole = not self.elementwise or found.shape != own_shape
            return found if whole else found.reshape(-1)[part.start : part.stop]

        parameters, state = [], []
        for part in captured.parts:
            parameter = self._optimizer.param_groups[part.group]["params"][part.index]
            own_shape = local_part(parameter).shape
            parameters.append(cut(parameter, part, own_shape))
            values = self._optimizer.state[parameter].values()
            state += [cut(value, part, own_shape) for value in values if isinstance(value, torch.Tensor)]
        return [*parameters, *state]

    def _empty_replica(self) -> Optimizer:
        """An optimizer of the same class and settings that shares nothing a step may change with the live one.

        Made without its `__init__` and `__setstate__`: these would register it, or touch what is live.
        """
        kind = type(self._optimizer)
        replica = kind.__new__(kind)
        for name, value in vars(self._optimizer).items():
            if name == "state" or name == "step":  # schedulers put a counting `step` on the live object
                continue
            kept = isinstance(value, torch.nn.Parameter) or not isinstance(value, (torch.Tensor, list, dict, set))
            replica.__dict__[name] = value if kept else _copied(value)
        replica.state = defaultdict(dict)
        replica._optimizer_step_pre_hooks = OrderedDict()
        replica._optimizer_step_post_hooks = OrderedDict()
        return replica

    def state_tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Live optimizer state as `(surface, name, tensor)`, in parameter order. Nothing is copied."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                for key, value in self._optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        yield "optimizer_state", f"{self.name(parameter)}.{key}", local_part(value)


def _bare_step(optimizer: Optimizer) -> Callable[[], object]:
    """The class's `step`, bound, without the wrapper that calls hooks registered for every optimizer.

    `Optimizer._patch_step_function` (torch 2.10 to 2.13) puts that wrapper on the class and marks it `hooked`.
    """
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return partial(step, optimizer)


def _needs_closure(optimizer: Optimizer) -> bool:
    parameters = list(inspect.signature(type(optimizer).step).parameters.values())
    return any(p.name == "closure" and p.default is inspect.Parameter.empty for p in parameters)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)


def _drawn_gradient(parameter: torch.Tensor, step: int) -> torch.Tensor:
    """Noise of a plausible size, equal on every rank that draws it for the same step and parameter size."""
    generator = torch.Generator(device=parameter.device)
    generator.manual_seed(structure_signature((step, parameter.numel())) % (1 << 63))
    shape = local_part(parameter).shape
    noise = torch.randn(shape, generator=generator, device=parameter.device, dtype=torch.float32)
    return (noise * 1e-3).to(parameter.dtype)
