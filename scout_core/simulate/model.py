"""The simulated job: which recipes each rank has, and what collectives a replay runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from scout_core.config import ReplayHarnessConfig
from scout_core.peers import Grid
from scout_core.replay.schedule import Plan, plan_step


@dataclass(frozen=True, kw_only=True)
class SimModel:
    """A job of `grid.world` ranks.

    Every pipeline stage has `layers` hidden layers; the embedding is on the first stage, the output head on the last.
    Each replayed module runs `forward` and `backward` collectives with its lockstep partners, along their dimensions in
    turn. Live state and optimizer slices are compared in `windows` turns, every `interval` optimizer steps one. Raises
    ValueError for sizes below their least.
    """

    grid: Grid
    layers: int = 2
    forward: int = 2
    backward: int = 2
    windows: int = 2
    interval: int = 1

    def __post_init__(self) -> None:
        for name, least in {"layers": 1, "forward": 0, "backward": 0, "windows": 1, "interval": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")

    @property
    def shard_peers(self) -> bool:
        """Whether peers hold different shards, so that owned state has no copy to be compared with."""
        return self.grid.peer_dim == "dp_shard"

    @cached_property
    def config(self) -> ReplayHarnessConfig:
        """The configuration under which checks are planned and judged."""
        return ReplayHarnessConfig(check_interval=self.interval, compare_parameters=not self.shard_peers)

    def stage_layers(self, stage: int) -> list[int]:
        """Global ids of a stage's hidden layers."""
        return list(range(stage * self.layers, (stage + 1) * self.layers))

    def classes(self, stage: int) -> list[str]:
        """Recipe classes that a stage can run."""
        first, last = stage == 0, stage == self.grid.size("pp") - 1
        optimizer = [] if self.shard_peers else ["optimizer"]
        return [*(["embedding"] if first else []), "hidden", *(["output"] if last else []), *optimizer]

    def recipe_ids(self, rank: int) -> list[str]:
        """Ids of all recipes of a rank."""
        stage = self.grid.coordinates(rank).pp
        hidden = [f"hidden:{layer}" for layer in self.stage_layers(stage)]
        others = [name for name in self.classes(stage) if name != "hidden"]
        return [*hidden, *others, *([] if self.shard_peers else ["state"])]

    def plan(self, stage: int, step: int) -> Plan | None:
        """What the ranks of a stage check at a boundary."""
        return plan_step(step, self.config, self.stage_layers(stage), self.classes(stage))

    @property
    def collective_dims(self) -> tuple[str, ...]:
        """The dimension of each collective of a replayed module, in order; empty without lockstep partners."""
        dims = self.grid.lockstep_dims
        return tuple(dims[i % len(dims)] for i in range(self.forward + self.backward)) if dims else ()
