"""Random jobs with random faults, to look for a wrong answer."""

from __future__ import annotations

import math
import random
from typing import Any

from scout_core.peers import Grid
from scout_core.simulate.faults import COMPUTED, SimFault
from scout_core.simulate.model import SimModel
from scout_core.simulate.run import Report, simulate

MAX_RANKS = 4096
_KINDS = {
    "corruption": 60,
    "common_mode": 2,
    "transient": 2,
    "drift": 3,
    "nondeterministic": 4,
    "not_ready": 5,
    "raises": 4,
    "desync": 3,
    "straggler": 8,
    "slow_endpoint": 6,
    "slow_link": 2,
    "slow_job": 1,
}
"""How often each kind of fault is drawn, in hundredths."""


def draw_model(rng: random.Random, max_ranks: int = MAX_RANKS) -> SimModel:
    """A layout of 2 to `max_ranks` ranks, each kind of parallelism in about half of them."""

    def size(choices: list[int]) -> int:
        return rng.choice(choices) if rng.random() < 0.5 else 1

    while True:
        sizes = {"tp": size([2, 4, 8]), "pp": size([2, 4, 8]), "cp": size([2, 4]), "ep": size([2, 4, 8])}
        sizes["dp_shard"] = size([2, 3, 4, 8])
        replicas = rng.choice([1, 2, 3, 3, 4, 4, 5, 6, 8, 16, 32])
        world = replicas * math.prod(sizes.values())
        # Wide cohorts take longest and differ from others in nothing but their width.
        wide = world // replicas // sizes["pp"] > 64 and rng.random() < 0.95
        if 2 <= world <= max_ranks and not wide:
            break
    return SimModel(
        grid=Grid.of_sizes(world=world, **sizes),
        layers=rng.randint(1, 3),
        forward=rng.randint(0, 6),
        backward=rng.randint(0, 6),
        windows=rng.randint(1, 3),
    )


def draw_fault(rng: random.Random, model: SimModel, near: list[SimFault]) -> SimFault:
    """A fault anywhere; in half of the cases on a rank or in a cohort that has one already."""
    grid = model.grid
    rank = rng.randrange(grid.world)
    if near and rng.random() < 0.5:
        other = rng.choice(near).rank
        rank = rng.choice([other, *grid.peers(other), *grid.lockstep(other)])
    kind = rng.choices(list(_KINDS), list(_KINDS.values()))[0]
    stage = grid.coordinates(rank).pp
    recipe = rng.choice([*model.classes(stage), "hidden", "hidden", "optimizer", "state"])
    onset = rng.randint(1, 4)
    given: dict[str, Any] = {"kind": kind, "rank": rank, "step": onset, "recipe": recipe}
    given["layer"] = rng.choice(model.stage_layers(stage)) if recipe == "hidden" else 0
    given["window"] = rng.randint(0, 2)
    given["collective"] = rng.randint(0, model.forward + model.backward)
    if recipe == "optimizer":
        given["surface"] = rng.choice(["gradient", "updated_state"])
    elif recipe == "state":
        given["surface"] = rng.choice(["parameter_state", "optimizer_state"])
    else:
        given["surface"] = rng.choice([*COMPUTED, "parameter_state"])
    if given["surface"] in (*COMPUTED, "updated_state") and rng.random() < 0.3:
        given |= {"chance": rng.choice([0.1, 0.3, 0.7]), "varies": rng.random() < 0.5}
    if rng.random() < 0.2:
        given["until"] = onset + rng.randint(1, 6)
    if kind == "nondeterministic":
        given["chance"] = rng.choice([0.3, 1.0])
        given |= {"recipe": "optimizer", "surface": "gradient"} if recipe == "state" else {}
    if kind in ("drift", "straggler", "slow_endpoint", "slow_link", "slow_job"):
        given["factor"] = rng.choice([1.7, 2.0, 5.0])
    if kind == "slow_link":
        given["other_rank"] = rng.choice([r for r in range(grid.world) if r != rank])
    return SimFault(**given)


def campaign(seed: int, *, max_ranks: int = MAX_RANKS) -> Report:
    """One random job of 10 checks with one to four faults, the same for the same seed."""
    rng = random.Random(f"campaign {seed}")
    model = draw_model(rng, max_ranks)
    faults: list[SimFault] = []
    for _ in range(rng.choice([1, 1, 2, 3, 4])):
        faults.append(draw_fault(rng, model, faults))
    return simulate(model, faults, checks=10, seed=seed)
