"""Putting a described fault into a user's own job, to see whether SCOUT and the people around it react."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from scout_core.config import ConfigError
from scout_core.faults.bits import bit_width, own_part
from scout_core.faults.compute import (
    corrupt_input_gradient,
    corrupt_output,
    corrupt_parameter_gradient,
    nondeterministic_kernel,
    slow_module,
)
from scout_core.faults.fault import Fault
from scout_core.faults.spec import FaultSpec
from scout_core.faults.state import corrupt_optimizer_state, corrupt_rows, corrupt_weight
from scout_core.faults.update import corrupt_optimizer_update
from scout_core.pytorch.discovery import unwrap

VARIABLE = "SCOUT_FAULT"


def install(spec: FaultSpec | str | None, model: nn.Module, optimizer: Optimizer) -> Fault:
    """Prepare one fault; it begins after `spec.step` optimizer steps, on the ranks it names, and nowhere else.

    Every rank may call, with the same spec; no collectives. With None the spec is read from the environment variable
    SCOUT_FAULT, and without that nothing is installed. The fault returned ends with `remove()`, also before it began.
    Raises `ConfigError` for a spec that does not fit the model, at once and on every rank.
    """
    if spec is None:
        spec = os.environ.get(VARIABLE) or None
    if spec is None:
        return Fault()
    if isinstance(spec, str):
        spec = FaultSpec.parse(spec)
    begin = _resolve(spec, unwrap(model), optimizer)
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if spec.rank not in ("all", rank):
        return Fault()
    return _Later(begin, optimizer, spec.step)


class _Later(Fault):
    """A fault that begins after a number of optimizer steps."""

    def __init__(self, begin: Callable[[], Fault], optimizer: Optimizer, steps: int) -> None:
        super().__init__()
        self._begin = begin
        self._left = steps
        self._begun: Fault | None = None
        self._hook = optimizer.register_step_post_hook(self._after_step)
        if steps == 0:
            self._start()

    @property
    def fired(self) -> int:
        return self._begun.fired if self._begun is not None else 0

    def remove(self) -> None:
        super().remove()
        self._hook.remove()
        if self._begun is not None:
            self._begun.remove()

    def _after_step(self, *_: Any) -> None:
        self._left -= 1
        if self._left <= 0:
            self._start()

    def _start(self) -> None:
        self._hook.remove()
        self._begun = self._begin()


def _resolve(spec: FaultSpec, model: nn.Module, optimizer: Optimizer) -> Callable[[], Fault]:
    """The injector with everything it names looked up, ready to be called."""
    kind, element, bit = spec.kind, spec.element, spec.bit
    if kind == "corrupt_optimizer_update":
        return lambda: corrupt_optimizer_update(optimizer, element, bit, every=spec.every, times=spec.times)
    if spec.parameter is not None and kind in (
        "corrupt_weight",
        "corrupt_optimizer_state",
        "corrupt_parameter_gradient",
    ):
        parameter = _find(model, spec.parameter, model.get_parameter, [n for n, _ in model.named_parameters()])
        _check_place(spec, own_part(parameter).numel(), bit_width(parameter))
        if kind == "corrupt_weight":
            return lambda: corrupt_weight(parameter, element, bit)
        if kind == "corrupt_optimizer_state":
            return lambda: corrupt_optimizer_state(optimizer, parameter, str(spec.key), element, bit)
        path, _, name = spec.parameter.rpartition(".")
        owner = model.get_submodule(path)
        return lambda: corrupt_parameter_gradient(owner, name, element, bit, every=spec.every, times=spec.times)
    module = _find(model, str(spec.module), model.get_submodule, [n for n, _ in model.named_modules()])
    if kind == "corrupt_rows":
        if not isinstance(module, nn.Embedding) or spec.row is None:
            raise ConfigError(f"module={spec.module} is a {type(module).__name__}; corrupt_rows needs an Embedding")
        table, row = module, spec.row
        return lambda: corrupt_rows(table, row, bit)
    if kind == "slow_module":
        return lambda: slow_module(module, spec.seconds or 0.0, every=spec.every, times=spec.times)
    if kind == "nondeterministic_kernel":
        return lambda: nondeterministic_kernel(module, every=spec.every, times=spec.times)
    injector = corrupt_output if kind == "corrupt_output" else corrupt_input_gradient
    return lambda: injector(module, element, bit, every=spec.every, times=spec.times)


def _find(model: nn.Module, name: str, look_up: Callable[[str], Any], known: list[str]) -> Any:
    try:
        return look_up(name)
    except AttributeError:
        some = ", ".join(known[:12])
        raise ConfigError(f"the {type(model).__name__} has no {name!r}; it has {some}, ...") from None


def _check_place(spec: FaultSpec, elements: int, width: int) -> None:
    if spec.element >= elements:
        raise ConfigError(f"element={spec.element} is outside {spec.parameter}, which has {elements} elements")
    if spec.bit >= width:
        raise ConfigError(f"bit={spec.bit} is outside {spec.parameter}; its elements have bits 0..{width - 1}")
