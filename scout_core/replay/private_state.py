"""State that modules keep where PyTorch does not look: plain attributes, containers, generators of their own.

A forward pass may count its calls, append to a list, rebind a buffer or draw from a private generator. None of that is
a parameter or a buffer, so `torch.func.functional_call` does not shield it from a replay.
"""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

Undo = Callable[[], None]

_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)  # exactly these: a subclass may run code of its own
_MOST_ITEMS = 4096
"""Larger containers are data, not state of a layer, and are left as they are."""


@contextmanager
def preserved_attributes(module: nn.Module, *, seed: int | None = None) -> Iterator[None]:
    """Let `module` run, and put back afterwards what its parts hold in attributes, however deep in plain containers.

    Tensors that are neither parameters nor buffers are replaced by copies within the block. Generators that belong to
    the module are seeded from `seed`, so that peers draw alike. Objects of the user's own classes are not looked into.
    """
    undo: list[Undo] = []
    seen: set[int] = set()
    try:
        for part in module.modules():
            _shield(part.__dict__, undo, seen, seed)
        yield
    finally:
        for step in reversed(undo):
            step()


def _shield(contents: dict[str, Any], undo: list[Undo], seen: set[int], seed: int | None) -> None:
    """Save one module's attributes. Registries are saved as they are; their tensors are substituted elsewhere."""
    saved = dict(contents)
    undo.append(lambda: _restore(contents, saved))
    for name, value in saved.items():
        if name in ("_parameters", "_buffers", "_modules"):
            undo.append(_container_undo(value))
        else:
            contents[name] = _saved(value, undo, seen, seed)


def _saved(value: Any, undo: list[Undo], seen: set[int], seed: int | None) -> Any:
    """What stands for `value` within the block: a copy of a plain tensor, anything else itself once it is saved."""
    if isinstance(value, torch.Tensor):
        return value if isinstance(value, nn.Parameter) else _copy(value)
    if type(value) in _CONTAINERS:
        if id(value) not in seen and len(value) <= _MOST_ITEMS:
            seen.add(id(value))
            undo.append(_container_undo(value))
            _replace_items(value, undo, seen, seed)
    elif _is_generator(value) and id(value) not in seen:
        seen.add(id(value))
        undo.append(_generator_undo(value))
        if seed is not None:
            _seed(value, seed)
    return value


def _replace_items(container: Any, undo: list[Undo], seen: set[int], seed: int | None) -> None:
    if isinstance(container, dict):
        entries: Any = list(container.items())
    elif isinstance(container, (list, deque)):
        entries = list(enumerate(container))
    else:
        return  # a set cannot hold a tensor whose values count
    for key, item in entries:
        stand_in = _saved(item, undo, seen, seed)
        if stand_in is not item:
            container[key] = stand_in


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _restore(contents: dict[str, Any], saved: dict[str, Any]) -> None:
    """Touch only what changed: the dictionary belongs to a live module."""
    for name in [name for name in contents if name not in saved]:
        del contents[name]
    for name, value in saved.items():
        if name not in contents or contents[name] is not value:
            contents[name] = value


def _container_undo(container: Any) -> Undo:
    """Gives a list, dict, set or deque its present items back, in their order."""
    items = list(container.items()) if isinstance(container, dict) else list(container)

    def undo() -> None:
        present = list(container.items()) if isinstance(container, dict) else list(container)
        if len(present) == len(items) and all(map(_is_same, present, items)):
            return
        container.clear()
        if isinstance(container, (list, deque)):
            container.extend(items)
        else:
            container.update(items)

    return undo


def _is_same(a: Any, b: Any) -> bool:
    if type(a) is tuple and type(b) is tuple and len(a) == len(b) == 2:
        return a[0] is b[0] and a[1] is b[1]
    return a is b


def _numpy_generators() -> tuple[type, ...]:
    numpy = sys.modules.get("numpy")
    return (numpy.random.Generator, numpy.random.RandomState) if numpy is not None else ()


def _is_generator(value: Any) -> bool:
    return isinstance(value, (torch.Generator, random.Random, *_numpy_generators()))


def _generator_undo(generator: Any) -> Undo:
    if isinstance(generator, torch.Generator):
        return partial(_set_torch_state, generator, generator.get_state())
    if isinstance(generator, random.Random):
        return partial(generator.setstate, generator.getstate())
    bits = _bit_generator(generator)
    numpy_state = bits.state

    def undo() -> None:
        bits.state = numpy_state

    return undo


def _set_torch_state(generator: torch.Generator, state: torch.Tensor) -> None:
    generator.set_state(state)


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed % (1 << 63))
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    else:
        bits = _bit_generator(generator)
        bits.state = type(bits)(seed % (1 << 63)).state


def _bit_generator(generator: Any) -> Any:
    legacy = getattr(generator, "_bit_generator", None)
    return legacy if legacy is not None else generator.bit_generator
