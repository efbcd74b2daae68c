"""Which recipes are due at which optimizer step: pure functions of the step, so every rank and restart agrees."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from math import lcm

from scout_core.adapter import Layout, Surfaces
from scout_core.config import ReplayHarnessConfig


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One replay to run: its id (`embedding`, `hidden:3`, `output`, `optimizer`) and its class."""

    recipe_id: str
    recipe_class: str
    layer: int | None = None


EMBEDDING = Recipe(recipe_id="embedding", recipe_class="embedding")
OUTPUT = Recipe(recipe_id="output", recipe_class="output")
OPTIMIZER = Recipe(recipe_id="optimizer", recipe_class="optimizer")
OWNER_UPDATE = Recipe(recipe_id="owner_update", recipe_class="owner_update")
AT_REST = Recipe(recipe_id="at_rest", recipe_class="at_rest")
STATE = Recipe(recipe_id="state", recipe_class="state")
MODULE_CLASSES = ("embedding", "hidden", "output")
READING_CLASSES = ("state", "at_rest")
"""Classes that execute nothing: they read what is there."""
_CLASSES = (*MODULE_CLASSES, "optimizer", "owner_update")


def hidden(layer: int) -> Recipe:
    """The recipe of the layer with this global id."""
    return Recipe(recipe_id=f"hidden:{layer}", recipe_class="hidden", layer=layer)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one boundary checks. `ordinal` counts checks and rotates sources and windows over the live state;
    `optimizer_ordinal` counts those of the optimizer, so that its slices leave nothing out when others come more often.

    `manual` checks recompute their invocations, since nothing was recorded in the step before.
    """

    step: int
    ordinal: int
    recipes: tuple[Recipe, ...]
    optimizer_ordinal: int = 0
    manual: bool = False

    @property
    def classes(self) -> tuple[str, ...]:
        """Recipe classes of the plan, in their order, each once."""
        return tuple(dict.fromkeys(recipe.recipe_class for recipe in self.recipes))


def available_classes(surfaces: Surfaces, layout: Layout, config: ReplayHarnessConfig) -> tuple[str, ...]:
    """The recipe classes that a model of these surfaces has in this layout."""
    present = {
        "embedding": surfaces.embedding,
        "hidden": surfaces.hidden,
        "output": surfaces.output,
        "optimizer": not layout.shard_peers,
        "owner_update": layout.shard_peers,
        "at_rest": layout.shard_peers and config.at_rest_interval != 0,
    }
    return tuple(name for name, found in present.items() if found)


def plan_step(step: int, config: ReplayHarnessConfig, layers: Sequence[int], available: Sequence[str]) -> Plan | None:
    """What the boundary after optimizer step `step` (counted from 1) checks, or None.

    `available` names the recipe classes this model has. Hidden layers take turns, one a check.
    """
    intervals = {name: _interval(config, name) for name in _CLASSES if name in available and _interval(config, name)}
    due: list[Recipe] = []
    fixed = {"embedding": EMBEDDING, "output": OUTPUT, "optimizer": OPTIMIZER, "owner_update": OWNER_UPDATE}
    for name, interval in intervals.items():
        if step % interval == 0:
            due.append(hidden(layers[(step // interval - 1) % len(layers)]) if name == "hidden" else fixed[name])
    if not due:
        return None
    if config.compare_parameters:
        due.append(STATE)
    if "at_rest" in available:
        due.append(AT_REST)
    updates = intervals.get("optimizer") or intervals.get("owner_update") or step + 1
    return Plan(
        step=step,
        ordinal=_multiples(step, set(intervals.values())),
        recipes=tuple(due),
        optimizer_ordinal=step // updates,
    )


def _interval(config: ReplayHarnessConfig, recipe_class: str) -> int:
    """An owner's update is an optimizer update."""
    return config.interval("optimizer" if recipe_class == "owner_update" else recipe_class)


def _multiples(last: int, intervals: Iterable[int]) -> int:
    """How many of 1..last are a multiple of any of `intervals`, by inclusion and exclusion."""
    distinct = sorted(intervals)
    return sum(
        (1 if size % 2 else -1) * (last // lcm(*chosen))
        for size in range(1, len(distinct) + 1)
        for chosen in combinations(distinct, size)
    )


def plan_all(
    step: int, ordinal: int, config: ReplayHarnessConfig, layers: Sequence[int], available: Sequence[str]
) -> Plan:
    """The whole catalog at one boundary: every layer, and every class that is not switched off by its own interval."""
    off = {name for name in (*MODULE_CLASSES, "optimizer") if getattr(config, f"{name}_interval") == 0}
    off |= {"owner_update"} if "optimizer" in off else set()
    recipes = [EMBEDDING] if "embedding" in available else []
    recipes += [hidden(layer) for layer in layers]
    recipes += [OUTPUT] if "output" in available else []
    recipes += [OPTIMIZER] if "optimizer" in available else []
    recipes += [OWNER_UPDATE] if "owner_update" in available else []
    recipes += [STATE] if config.compare_parameters else []
    chosen = tuple(recipe for recipe in recipes if recipe.recipe_class not in off)
    return Plan(step=step, ordinal=ordinal, recipes=chosen, optimizer_ordinal=ordinal, manual=True)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Elements `start:stop` of the flattened tensor at `index` of a list."""

    index: int
    start: int
    stop: int


def window(sizes: Sequence[tuple[int, int]], ordinal: int, budget_bytes: int) -> list[Piece]:
    """The `ordinal`-th window over tensors of `(elements, bytes per element)`, wrapping around, no element twice.

    Consecutive windows cover everything before anything is covered twice. O(tensors) additions, then O(window).
    """
    ends = list(accumulate(count * width for count, width in sizes))
    total = ends[-1] if ends else 0
    if total <= budget_bytes:
        return [Piece(index=i, start=0, stop=count) for i, (count, _) in enumerate(sizes) if count]
    begin = ordinal * budget_bytes % total
    spans = [(begin, min(begin + budget_bytes, total)), (0, max(begin + budget_bytes - total, 0))]
    pieces: list[Piece] = []
    for low, high in spans:
        index = bisect_right(ends, low)
        while index < len(sizes) and (offset := ends[index] - sizes[index][0] * sizes[index][1]) < high:
            count, width = sizes[index]
            start, stop = max(low - offset, 0) // width, min(-(-(high - offset) // width), count)
            if low < begin and pieces and index == pieces[0].index:  # around and back in the element it began with
                stop = min(stop, pieces[0].start)
            if start < stop:
                pieces.append(Piece(index=index, start=start, stop=stop))
            index += 1
    return pieces
