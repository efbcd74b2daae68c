"""Everything a restart of a plain PyTorch rank needs, taken and put back bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from scout_core.replay.local_tensors import distribution, is_distributed, local_part


class TrainingState:
    """Model, optimizer, caller-owned objects and every generator of one rank. Local; no collectives."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, stateful: Mapping[str, Any]) -> None:
        for name, item in stateful.items():
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise TypeError(f"stateful[{name!r}] needs state_dict() and load_state_dict(); it is a {type(item)}")
        self._model = model
        self._optimizer = optimizer
        self._stateful = dict(stateful)
        self._schedulers = {name: item for name, item in stateful.items() if isinstance(item, LRScheduler)}
        self._owed: dict[str, bool] = dict.fromkeys(self._schedulers, True)
        self._begin(0)

    def _begin(self, steps: int) -> None:
        self._first = steps
        self._counts = {name: item._step_count for name, item in self._schedulers.items()}

    def _owes(self, name: str, steps: int) -> bool:
        """Whether the caller steps this scheduler after each optimizer step, and so will after the present one.

        The boundary lies inside `optimizer.step()`, before the `scheduler.step()` that follows it. One that has so far
        kept pace with the optimizer is such a scheduler; after a single step this cannot be known, and is assumed.
        """
        passed = steps - self._first
        if passed < 2:
            return self._owed[name]
        return bool(self._schedulers[name]._step_count - self._counts[name] >= passed - 1)

    def take(self, steps: int) -> dict[str, Any]:
        """The state. Parameters and optimizer tensors are live; buffers and caller-owned tensors on a device copied.

        Forward passes change buffers, and callers their own state at any time; an optimizer step changes the rest. Of
        DTensors a rank keeps its own part; `sharded` names the optimizer's, which are laid out as their parameters.
        Raises `TypeError` for those that are not, and for DTensors of the caller's own.
        """
        parameters = {name: p.detach() for name, p in self._model.named_parameters(remove_duplicate=False)}
        buffers = {name: b.detach().clone() for name, b in self._model.named_buffers(remove_duplicate=False)}
        return {
            "parameters": parameters,
            "buffers": buffers,
            "optimizer": self._optimizer.state_dict(),
            "sharded": self._sharded(),
            "stateful": {name: _copied(item.state_dict()) for name, item in self._stateful.items()},
            "owed": {name: self._owes(name, steps) for name in self._schedulers},
            "rng": _generators(),
            "steps": steps,
        }

    def put_back(self, state: Mapping[str, Any]) -> None:
        """Put everything back. Raises `ValueError` naming what does not fit, and then nothing is changed.

        What may refuse its part goes first and is put back to what it was when another refuses.
        """
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        buffers = dict(self._model.named_buffers(remove_duplicate=False))
        for what, live in (("parameters", parameters), ("buffers", buffers), ("stateful", self._stateful)):
            if set(live) != set(state[what]):
                odd = sorted(set(live) ^ set(state[what]))
                raise ValueError(f"{what} differ from those saved: {', '.join(odd[:5])}")
        for name, tensor in (*parameters.items(), *buffers.items()):
            kept = state["parameters" if name in parameters else "buffers"][name]
            own = local_part(tensor)
            if kept.shape != own.shape or kept.dtype != own.dtype:
                raise ValueError(f"{name} is {own.dtype} {tuple(own.shape)}, saved {kept.dtype} {tuple(kept.shape)}")
        self._load_what_may_refuse(self._distributed_again(state["optimizer"], state["sharded"]), state["stateful"])
        with torch.no_grad():
            for name, parameter in parameters.items():
                local_part(parameter).copy_(state["parameters"][name])
            for name, buffer in buffers.items():
                local_part(buffer).copy_(state["buffers"][name])
        for name, scheduler in self._schedulers.items():
            self._owed[name] = bool(state["owed"].get(name, False))
            if self._owed[name]:
                scheduler.step()
        self._begin(int(state["steps"]))
        _restore_generators(state["rng"])

    def _load_what_may_refuse(self, optimizer: Mapping[str, Any], stateful: Mapping[str, Any]) -> None:
        before = self._optimizer.state_dict()
        own = {name: _copied(item.state_dict()) for name, item in self._stateful.items()}
        reached: list[Callable[[], None]] = [lambda: self._optimizer.load_state_dict(before)]
        try:
            self._optimizer.load_state_dict(dict(optimizer))
            for name, item in self._stateful.items():
                reached.append(partial(item.load_state_dict, own[name]))
                item.load_state_dict(stateful[name])
        except Exception as error:
            for undo in reached:
                undo()
            raise ValueError(f"a part of the state was refused: {type(error).__name__}: {error}") from error

    def _sharded(self) -> dict[int, list[str]]:
        """By place of the parameter among the optimizer's, the entries of its state that are DTensors."""
        found = {}
        for place, parameter in enumerate(p for group in self._optimizer.param_groups for p in group["params"]):
            own = {k: v for k, v in self._optimizer.state.get(parameter, {}).items() if is_distributed(v)}
            for key, value in own.items():
                if distribution(value) != distribution(parameter):
                    raise TypeError(f"the optimizer's {key!r} is a DTensor that is not laid out as its parameter is")
            if own:
                found[place] = list(own)
        return found

    def _distributed_again(self, state: Mapping[str, Any], sharded: Mapping[int, list[str]]) -> dict[str, Any]:
        """The optimizer's state with the parts of DTensors as DTensors."""
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        entries = {place: dict(entry) for place, entry in state["state"].items()}
        for place, keys in sharded.items():
            layout = distribution(parameters[place])
            if layout is None:
                raise ValueError(f"parameter {place} of the optimizer was a DTensor when it was saved, and is none now")
            entries[place].update({key: layout.wrap(entries[place][key]) for key in keys})
        return {**state, "state": entries}


def _copied(value: Any) -> Any:
    """Nested state with tensors copied where they are."""
    if is_distributed(value):
        raise TypeError("a stateful object holds a DTensor; let its state_dict() give this rank's part of it")
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return tuple(_copied(item) for item in value) if isinstance(value, tuple) else value


def _generators() -> dict[str, Any]:
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if cuda else None,
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }


def _restore_generators(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
