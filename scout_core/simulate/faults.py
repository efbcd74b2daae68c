"""What goes wrong in a simulated job, and the file that says so."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from scout_core.config import ConfigError
from scout_core.simulate.model import SimModel

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FaultName = Literal[
    "corruption",
    "common_mode",
    "transient",
    "drift",
    "nondeterministic",
    "not_ready",
    "raises",
    "desync",
    "straggler",
    "slow_endpoint",
    "slow_link",
    "slow_job",
]
RecipeClass = Literal["embedding", "hidden", "output", "optimizer", "state"]
Surface = Literal[
    "parameter_state",
    "optimizer_state",
    "gradient",
    "updated_state",
    "output",
    "input_gradient",
    "parameter_gradient",
]

STATE = ("parameter_state", "optimizer_state")
COMPUTED = ("output", "input_gradient", "parameter_gradient")
MODULES = ("embedding", "hidden", "output")
_SURFACES: dict[str, tuple[str, ...]] = {
    "embedding": (*COMPUTED, "parameter_state"),
    "hidden": (*COMPUTED, "parameter_state"),
    "output": (*COMPUTED, "parameter_state"),
    "optimizer": ("gradient", "updated_state"),
    "state": STATE,
}


class SimFault(BaseModel):
    """One thing that is wrong from `step` on, until `until` (that step not included) if given.

    kind: `corruption` of a surface of a recipe on one rank; `common_mode`: the same on all its peers alike;
        `transient`: once, in live training only; `drift`: parameters that lockstep partners should hold alike differ
        between them, in every replica; `nondeterministic`: a recipe that repeats itself nowhere; `not_ready`: no
        invocation was captured; `raises`: the replay raises; `desync`: other collectives issued than on the peers;
        `straggler`: computes `factor` times as long; `slow_endpoint`: so do all collectives of the rank; `slow_link`:
        those that hold both `rank` and `other_rank`; `slow_job`: all collectives of the job.
    recipe, layer: what is hit; `layer` counts from 0 over the whole model, for hidden layers.
    surface: where. A wrong `parameter_state` or `optimizer_state` stands in live state, wherever it is read; the others
        come from the rank's own computing.
    collective: before which of the replay's collectives the rank's own computing goes wrong, from 0; forward ones come
        first. As many as there are: after the last.
    chance: how likely each execution is to go wrong. varies: whether it goes wrong in another way each time.
    window: which of the rotating windows over live state or optimizer slices holds what is wrong.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: FaultName
    rank: int = Field(default=0, ge=0)
    other_rank: int | None = Field(default=None, ge=0)
    step: int = Field(default=1, ge=1)
    until: int | None = Field(default=None, ge=1)
    recipe: RecipeClass = "hidden"
    layer: int = Field(default=0, ge=0)
    surface: Surface = "output"
    collective: int = Field(default=0, ge=0)
    chance: float = Field(default=1.0, gt=0, le=1)
    varies: bool = False
    window: int = Field(default=0, ge=0)
    factor: float = Field(default=2.0, gt=1)

    @model_validator(mode="after")
    def _makes_sense(self) -> SimFault:
        if self.kind in ("corruption", "common_mode", "transient") and self.surface not in _SURFACES[self.recipe]:
            raise ValueError(f"{self.recipe} has no fault in {self.surface}; use {', '.join(_SURFACES[self.recipe])}")
        if self.kind == "nondeterministic" and self.recipe == "state":
            raise ValueError("state is only read, so it repeats itself; use embedding, hidden, output or optimizer")
        if self.kind == "slow_link" and self.other_rank in (None, self.rank):
            raise ValueError("slow_link needs an other_rank")
        if self.until is not None and self.until <= self.step:
            raise ValueError(f"until={self.until} must lie after step={self.step}")
        return self

    @property
    def recipe_id(self) -> str:
        """The recipe's id in the plan."""
        return f"hidden:{self.layer}" if self.recipe == "hidden" else self.recipe

    def active(self, step: int) -> bool:
        """Whether it is wrong at a step."""
        return self.step <= step and (self.until is None or step < self.until)


def load_faults(path: Path) -> list[SimFault]:
    """Faults from a JSON list, or from a TOML or JSON table with a list `fault`.

    Raises `ConfigError` for a file that cannot be read or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
        content: Any = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"cannot read faults from {path}: {error}") from None
    listed = content.get("fault") if isinstance(content, dict) else content
    if not isinstance(listed, list):
        raise ConfigError(f"{path} has no list of faults; give a JSON list, or [[fault]] tables in TOML")
    try:
        return [SimFault.model_validate(entry) for entry in listed]
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {where + ': ' if where else ''}{first['msg']}") from None


def check_faults(faults: Sequence[SimFault], model: SimModel) -> None:
    """Raise `ConfigError` for a fault at a place that the job does not have."""
    world = model.grid.world
    for fault in faults:
        for rank in (fault.rank, fault.other_rank):
            if rank is not None and rank >= world:
                raise ConfigError(f"fault on rank {rank}: the job has ranks 0 to {world - 1}")
        if fault.kind in ("slow_link", "slow_endpoint", "slow_job", "straggler", "desync"):
            continue
        has = model.recipe_ids(fault.rank)
        shown = fault.recipe_id
        if shown not in has and not (model.shard_peers and fault.recipe in ("optimizer", "state")):
            raise ConfigError(f"rank {fault.rank} does not run {shown}, which is on another stage; it runs {has}")
