"""What a fault does to the evidence of a replay: on its own rank, and on the partners that its values travel to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import xxhash

from scout_core.replay.evidence import COLLECTIVE_INPUT, MARKS, Flags, Observation, surfaces_of
from scout_core.simulate.cohort import Cohort
from scout_core.simulate.faults import COMPUTED, SimFault
from scout_core.simulate.model import SimModel


@dataclass(kw_only=True)
class Traces:
    """What differs on one rank in one execution: surfaces, inputs of collectives by number, and whether it raised.

    `varies`: it differs in another way each time.
    """

    surfaces: set[str] = field(default_factory=set)
    calls: set[int] = field(default_factory=set)
    failed: bool = False
    varies: bool = False


def word(*parts: object) -> int:
    """A signed 64-bit word that is the same for the same parts."""
    unsigned = xxhash.xxh3_64_intdigest(repr(parts).encode())
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


def in_state(fault: SimFault, recipe_class: str, names: Sequence[str]) -> set[str]:
    """Surfaces of a recipe without inner collectives on which a fault shows, on its own rank alone."""
    follows: dict[str, set[str]] = {
        "parameter_state": {"parameter_state", "updated_state"},
        "optimizer_state": {"optimizer_state", "updated_state"},
        "gradient": {"gradient", "updated_state"},
        "updated_state": {"updated_state"},
    }
    if recipe_class == "state":
        return {str(fault.surface)} & set(names)
    return follows.get(fault.surface, set()) & set(names)


def travel(model: SimModel, cohort: Cohort, faults: Iterable[tuple[int, SimFault]]) -> dict[int, Traces]:
    """Traces by column, in one row of a cohort, of faults at `(column, fault)`, while a module is replayed.

    The rank's own computing is wrong from some moment on, and with it all that it gives into collectives from then on;
    whoever receives of that gives on wrong values from the next collective on. Not every value reaches every receiver.
    """
    dims = model.collective_dims
    forward = model.forward if dims else 0
    starts = [(column, fault, *_start(fault, forward, len(dims))) for column, fault in faults]
    traces: dict[int, Traces] = {}
    for column, fault, _, _ in starts:
        own = traces.setdefault(column, Traces())
        own.failed = own.failed or fault.kind == "raises"
        own.surfaces |= {"parameter_state"} if fault.surface == "parameter_state" and fault.kind != "raises" else set()
    wrong: set[int] = set()
    for call in range(len(dims) + 1):
        wrong |= {column for column, _, start, early in starts if start == call and early}
        if call == forward:
            _mark(traces, wrong, "output")
        wrong |= {column for column, f, start, early in starts if start == call < len(dims) and not early}
        if call < len(dims):
            for column in wrong:
                traces.setdefault(column, Traces()).calls.add(call)
            wrong |= _received(cohort, dims[call], call, wrong)
    _mark(traces, wrong, "input_gradient", "parameter_gradient")
    for column, fault, start, early in starts:
        if start == len(dims) and not early:  # nothing is computed from it any more
            _mark(traces, {column}, fault.surface)
    return traces


def _start(fault: SimFault, forward: int, calls: int) -> tuple[int, bool]:
    """Before which collective a rank goes wrong, and whether that is in the forward pass."""
    if fault.surface == "parameter_state" and fault.kind != "raises":
        return 0, True
    if fault.surface == "output" or fault.kind == "raises":
        return min(fault.collective, forward), True
    return min(max(fault.collective, forward), calls), False


def _mark(traces: dict[int, Traces], columns: Iterable[int], *surfaces: str) -> None:
    for column in columns:
        traces.setdefault(column, Traces()).surfaces |= set(surfaces)


def _received(cohort: Cohort, dim: str, call: int, wrong: Iterable[int]) -> set[int]:
    """The columns that get wrong values in a collective along `dim`; one in five is spared."""
    reached = {other for column in wrong for other in cohort.along[dim][column]}
    return {column for column in reached if word("spared", cohort.key, call, column) % 5}


def observation(
    model: SimModel,
    recipe_id: str,
    recipe_class: str,
    *,
    lockstep: bool,
    traces: Traces | None = None,
    salt: object = None,
) -> Observation:
    """The evidence of one execution; without traces that of a healthy rank. `salt` makes wrong values differ."""
    names = surfaces_of(recipe_class, lockstep=lockstep)
    found = traces or Traces()
    calls = model.collective_dims if COLLECTIVE_INPUT in names else ()
    wrong = set(found.surfaces) | ({COLLECTIVE_INPUT} if found.calls and calls else set())
    marks = [0] * MARKS
    for call in range(len(calls)):
        mark = min(call, MARKS - 1)
        apart = any(min(c, MARKS - 1) == mark for c in found.calls)
        marks[mark] = word(recipe_id, "mark", mark, salt if apart else None)
    return Observation(
        words=tuple(word(recipe_id, name, salt if name in wrong else None) for name in names),
        flags=Flags(failed=found.failed),
        marks=tuple(marks),
        forward_marks=min(model.forward, MARKS) if calls else 0,
    )


def all_computed() -> Traces:
    """Traces of an execution of which everything comes out in another way."""
    return Traces(surfaces={*COMPUTED, "updated_state"}, calls=set(range(64)), varies=True)
