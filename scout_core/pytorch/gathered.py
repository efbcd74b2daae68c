"""Parameters that `fully_shard` keeps sharded, made whole for the replay of one module and sharded again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from scout_core.pytorch.topology import fsdp_modules
from scout_core.replay.local_tensors import is_distributed

_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


class GatheredModules:
    """Knows which of a model's sharded modules own the parameters of which part. Free where nothing is sharded."""

    def __init__(self, root: nn.Module) -> None:
        self._sharded: list[Any] = list(fsdp_modules(root))
        self._owner: dict[int, Any] = {}
        for module in self._sharded:  # outermost first, so that the innermost owner stays
            self._owner |= {id(part): module for part in module.modules()}

    @property
    def any(self) -> bool:
        """Whether anything is sharded."""
        return bool(self._sharded)

    @contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        """Within the block the parameters of `module` are whole, and the hooks that gather them otherwise are off.

        One all-gather per owning sharded module, on its shard group; every rank of it enters the block.
        """
        owners = {id(owner): owner for part in module.modules() if (owner := self._owning(part)) is not None}
        try:
            for owner in owners.values():
                if not self._is_sharded(owner):
                    owner.reshard()  # left whole by the last backward: these are values from before the update
                owner.unshard()
            with _without_hooks(module):
                yield
        finally:
            for owner in owners.values():
                owner.reshard()

    @contextmanager
    def forward_only(self) -> Iterator[None]:
        """For a forward pass without backward: FSDP waits for one where gradients are on. Shards all of it again."""
        try:
            with torch.no_grad():
                yield
        finally:
            for owner in self._sharded:
                owner.reshard()

    def _owning(self, part: nn.Module) -> Any:
        return self._owner.get(id(part)) if part._parameters else None

    def _is_sharded(self, owner: Any) -> bool:
        parts = (part for part in owner.modules() if self._owner.get(id(part)) is owner)
        return all(is_distributed(p) for part in parts for p in part._parameters.values() if p is not None)


@contextmanager
def _without_hooks(module: nn.Module) -> Iterator[None]:
    """Take the hooks of FSDP off `module` and its parts and put them back in their order."""
    with ExitStack() as stack:
        for part in fsdp_modules(module):
            for name in _HOOKS:
                stack.enter_context(_filtered(getattr(part, name)))
        yield


@contextmanager
def _filtered(hooks: OrderedDict[int, Any]) -> Iterator[None]:
    saved = list(hooks.items())
    for key, hook in saved:
        if hook.__module__.startswith("torch.distributed.fsdp"):
            del hooks[key]
    try:
        yield
    finally:
        hooks.clear()
        hooks.update(saved)
