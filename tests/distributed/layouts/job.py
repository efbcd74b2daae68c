"""What a layout is for the tests, and a job that trains under it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from scout_core.faults.bits import own_part
from tests.distributed.layouts.model import BATCH, LENGTH, WORDS, TinyLM
from tests.distributed.live_state import HOOKS

OWN_DATA = ("dp_replicate", "dp_shard", "ep")
"""Dimensions along which ranks train on data of their own; along the others they share it."""
_IN_LOCKSTEP = ("dp_shard", "cp", "ep", "tp")


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """A model under a layout.

    `root` is what training calls, and what is attached; `plain` the model inside. `compute` makes the gradients of one
    batch `[b, t + 1]` of ids and returns the loss, None on ranks that do not see it. `synchronize` does to gradients
    what the layout has not done by itself.
    """

    root: nn.Module
    plain: nn.Module
    compute: Callable[[torch.Tensor], torch.Tensor | None]
    synchronize: Callable[[], None] = lambda: None


@dataclass(frozen=True, kw_only=True)
class LayoutCase:
    """One layout: the sizes of its mesh, outermost first, and what tests need to know of it.

    `whole` builds the model that `wire` splits. Dotted names within a block: `owned` is the module whose weight the
    tests damage, `before` the one whose product is the last local compute before a collective, None if a block runs
    none; `embedding` and `head` are the local compute at both ends. `options` go to `attach()`.
    """

    name: str
    dims: tuple[tuple[str, int], ...]
    wire: Callable[[nn.Module, DeviceMesh], Wiring]
    whole: Callable[[], nn.Module] = TinyLM
    owned: str = "feed.down"
    before: str | None = None
    embedding: str = "embedding"
    head: str = "head"
    lengths_vary: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return math.prod(size for _, size in self.dims)

    @property
    def replicas(self) -> int:
        """How many different batches a step trains on."""
        return math.prod(size for name, size in self.dims if name in OWN_DATA)

    def expected_peers(self, rank: int) -> tuple[int, ...]:
        """Ranks that vary along `dp_replicate` alone; along `dp_shard` where nothing is replicated."""
        names = [name for name, size in self.dims if size > 1]
        return self._along(rank, ("dp_replicate" if "dp_replicate" in names else "dp_shard",))

    def expected_lockstep(self, rank: int) -> tuple[int, ...]:
        """Ranks, this one included, whose collectives a block's replay runs, its peers' aside."""
        peers = self.expected_peers(rank)
        names = tuple(name for name in _IN_LOCKSTEP if self._along(rank, (name,)) != peers)
        return self._along(rank, names)

    def replica(self, rank: int) -> int:
        """Number of the batch that `rank` trains on."""
        place = np.unravel_index(rank, [size for _, size in self.dims])
        own = [(int(at), size) for at, (name, size) in zip(place, self.dims, strict=True) if name in OWN_DATA]
        return int(np.ravel_multi_index([at for at, _ in own], [size for _, size in own]))

    def build(self, seed: int) -> Job:
        """The job on this rank. Every rank of the world calls; creates the mesh and its process groups."""
        return Job(self, seed)

    def _along(self, rank: int, names: tuple[str, ...]) -> tuple[int, ...]:
        table = np.arange(self.ranks).reshape([size for _, size in self.dims])
        place = np.argwhere(table == rank)[0]
        index = tuple(slice(None) if name in names else int(at) for at, (name, _) in zip(place, self.dims, strict=True))
        return tuple(sorted(int(member) for member in np.ravel(table[index])))


class Job:
    """A case being trained on this rank. Equal seeds give equal bits.

    `model`, `optimizer` and `mesh` are what `attach()` takes. `before_step` is called at the start of every step.
    """

    def __init__(self, case: LayoutCase, seed: int) -> None:
        self.case = case
        names, sizes = zip(*case.dims, strict=True)
        self.mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        torch.manual_seed(seed)
        self.wiring = case.wire(case.whole(), self.mesh)
        self.model = self.wiring.root
        self.plain: TinyLM = self.wiring.plain  # type: ignore[assignment]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.data = replica_data(seed, case.replica(dist.get_rank()))
        self.before_step: list[Callable[[], None]] = []
        self.steps = 0
        self.loss: float | None = None
        torch.manual_seed(seed + 1)

    @property
    def layers(self) -> tuple[int, ...]:
        """Numbers, in the whole model, of the blocks on this rank."""
        return tuple(int(key) for key in self.plain.blocks)

    def block(self, layer: int) -> nn.Module:
        return self.plain.blocks[str(layer)]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self, *, length: int = LENGTH, unseen: bool = False) -> None:
        """One training step. Every rank calls, with a `length` that those sharing its data have too.

        With `unseen` the hooks that others put on the model's modules do not fire on this rank, as if its forward
        passed them by; the training is the same.
        """
        for act in self.before_step:
            act()
        batch = next_batch(self.data, length)
        with self._without_hooks_of_others() if unseen else _as_it_is():
            loss = self.wiring.compute(batch)
        self.loss = None if loss is None else float(loss.detach())
        self.wiring.synchronize()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def owned_state(self) -> dict[str, torch.Tensor]:
        """Copies of what this rank holds of parameters, buffers and optimizer state, by name."""
        found = {
            name: own_part(tensor.detach()).clone() for name, tensor in self.plain.state_dict(keep_vars=True).items()
        }
        for name, parameter in self.plain.named_parameters():
            for key, value in self.optimizer.state[parameter].items():
                found[f"{name}.{key}"] = own_part(value).clone()
        return found

    @contextmanager
    def _without_hooks_of_others(self) -> Iterator[None]:
        """Takes hooks whose code is not torch's or the tests' own off, and puts them back in their order."""
        hidden = []
        for module in self.model.modules():
            for kind in HOOKS:
                hooks = module.__dict__.get(kind)
                if hooks and any(map(_is_of_others, hooks.values())):
                    hidden.append((hooks, list(hooks.items())))
        for hooks, entries in hidden:
            for key, hook in entries:
                if _is_of_others(hook):
                    del hooks[key]
        try:
            yield
        finally:
            for hooks, entries in hidden:
                hooks.clear()
                hooks.update(entries)


def replica_data(seed: int, replica: int) -> torch.Generator:
    """The source of one replica's batches."""
    return torch.Generator().manual_seed(1000 * seed + replica + 1)


def next_batch(data: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    """`[BATCH, length + 1]` ids: inputs and, one later, targets."""
    return torch.randint(0, WORDS, (BATCH, length + 1), generator=data)


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


def _is_of_others(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("scout_core")
