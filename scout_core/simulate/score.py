"""What came of each fault of a simulation, and which boundary of the contract explains those that were not attributed.

Explanations come from what was done to the ranks alone, never from the verdicts, so that a miss which nothing excuses
stays one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from scout_core.replay.evidence import MARKS
from scout_core.simulate.checks import CohortCheck, concerns
from scout_core.simulate.cohort import Cohort
from scout_core.simulate.faults import MODULES, STATE, SimFault
from scout_core.simulate.model import SimModel
from scout_core.simulate.slow_groups import groups_near, slows


class Boundary(str, Enum):
    """Where the contract ends: why a fault may go without attribution."""

    COMMON_MODE = "common mode: all peers hold the same, so they agree"
    ONE_SHOT = "one-shot transient: it did not recur in a replay"
    INTERMITTENT = "intermittent: it did not recur in replays of a qualified recipe"
    NOT_SAMPLED = "sampled: no check that covers it came while it was there"
    NOT_READY = "readiness: a rank that the replay needs was not ready or raised"
    NO_PEERS = "no equivalent peers"
    TWO_PEERS = "two peers can only say that they differ"
    NO_MAJORITY = "no strict healthy majority of peers"
    SINGLE_OWNER = "single-owner shards have no independent live copy"
    SAME_ROW = "another rank of the same lockstep cohort is faulty too, and its values came first"
    COHORT = "the cohort is named: the collective is one of many that share a word of evidence"
    NONDETERMINISTIC = "the recipe does not repeat itself bit for bit"
    MIXED = "of several faulty ranks one does not repeat itself, and then replays prove nothing about any of them"
    THRESHOLD = "below the thresholds of stragglers"
    ONE_GROUP = "only one slow process group, or none"
    SEVERAL_SLOW = "several independent communication faults at once"
    NO_WITNESS = "no healthy process group to compare with"


RECURRENCES = 3
"""Checks of a qualified recipe in which an intermittent fault that acts must have been attributed."""

Answer = Literal["hit", "noticed", "miss"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one fault.

    answer: `hit`: attributed to its rank or, for faults that no device has, told for what it is; `noticed`: seen, and
        nobody blamed; `miss`: not seen. step: of the first check that gave this answer.
    boundary: what explains an answer other than `hit`; None then means that nothing does.
    """

    number: int
    fault: SimFault
    answer: Answer
    step: int | None = None
    boundary: Boundary | None = None

    @property
    def explained(self) -> bool:
        return self.answer == "hit" or self.boundary is not None

    def to_json(self) -> dict[str, Any]:
        """A plain dict for strict JSON."""
        return {
            "fault": self.fault.model_dump(exclude_defaults=True),
            "answer": self.answer,
            "step": self.step,
            "boundary": self.boundary.value if self.boundary else None,
        }


@dataclass(frozen=True, kw_only=True)
class History:
    """All checks of the cohort of some faults, as `(step, check)`, and the faults by number."""

    model: SimModel
    cohort: Cohort
    faults: Mapping[int, SimFault]
    checks: list[tuple[int, CohortCheck]] = field(default_factory=list)


def wrong_ranks(history: History) -> set[tuple[int, str, int]]:
    """Ranks that were blamed for something they do not have, as `(step, what, rank)`."""
    corrupt = {f.rank for f in history.faults.values() if f.kind == "corruption"}
    slow = {f.rank for f in history.faults.values() if f.kind == "straggler"}
    found = set()
    for step, check in history.checks:
        found |= {(step, recipe, rank) for recipe, rank in blamed(history, check) if rank not in corrupt}
        found |= {(step, f"straggler {recipe}", r) for recipe, r in named_slow(history, check) if r not in slow}
    return found


def blamed(history: History, check: CohortCheck) -> set[tuple[str, int]]:
    """`(recipe, rank)` for every attribution of a check."""
    return {
        (recipe, rank)
        for recipe, columns in check.joined.items()
        for column, one in enumerate(columns)
        for rank, bad in zip(history.cohort.table[column], one.verdict.bitmap, strict=False)
        if bad
    }


def named_slow(history: History, check: CohortCheck) -> set[tuple[str, int]]:
    """`(recipe, rank)` for every straggler that a check reports."""
    return {
        (recipe, rank)
        for recipe, columns in check.stragglers.items()
        for column, verdict in columns.items()
        for rank, slow in zip(history.cohort.table[column], verdict.bitmap, strict=True)
        if slow
    }


def judge(history: History, number: int) -> Outcome:
    """The outcome of one fault that is not of communication."""
    fault = history.faults[number]
    noticed: int | None = None
    for step, check in history.checks:
        if not fault.active(step):
            continue
        seen = _seen(history, fault, step, check)
        if seen == "hit":
            return Outcome(number=number, fault=fault, answer="hit", step=step)
        noticed = step if noticed is None and seen == "noticed" else noticed
    boundary = _boundary(history, number)
    if noticed is None:
        return Outcome(number=number, fault=fault, answer="miss", boundary=boundary)
    return Outcome(number=number, fault=fault, answer="noticed", step=noticed, boundary=boundary)


def _seen(history: History, fault: SimFault, step: int, check: CohortCheck) -> Answer:
    if fault.kind in ("not_ready", "desync"):
        wanted = "readiness" if fault.kind == "not_ready" else "collective_digest"
        told = [r for r in check.reasons if r.field == wanted and (wanted != "readiness" or r.recipe == fault.recipe)]
        alike = {f.rank for f in history.faults.values() if f.kind == fault.kind and f.active(step)}
        if any(fault.rank in r.ranks and alike.issuperset(r.ranks) for r in told):
            return "hit"
        return "noticed" if any(fault.rank in r.ranks for r in told) else "miss"
    if fault.kind == "straggler":
        return "hit" if any(rank == fault.rank for _, rank in named_slow(history, check)) else "miss"
    if fault.kind == "drift":
        return "hit" if any(one.shared_differs for one in check.joined.get("state", ())) else "miss"
    plan = history.model.plan(history.cohort.stage, step)
    recipes = [r for r in plan.recipes if concerns(history.model, plan, r, fault)] if plan is not None else []
    verdicts = [one.verdict for recipe in recipes for one in check.joined.get(recipe.recipe_id, ())]
    if fault.kind == "nondeterministic":
        if any(verdict.nondeterministic for verdict in verdicts):
            return "hit"
        return "noticed" if any(verdict.reason is not None for verdict in verdicts) else "miss"
    if fault.kind == "raises":
        return "hit" if any(verdict.raised for verdict in verdicts) else "miss"
    if any(rank == fault.rank for _, rank in blamed(history, check)):
        return "hit"
    return "noticed" if any(verdict.reason is not None for verdict in verdicts) else "miss"


def _boundary(history: History, number: int) -> Boundary | None:
    """Why a fault could not be attributed, if something in what was done to the ranks says so."""
    fault, model, cohort = history.faults[number], history.model, history.cohort
    if fault.kind == "common_mode":
        return Boundary.COMMON_MODE
    if fault.kind == "transient":
        return Boundary.ONE_SHOT
    if cohort.peers == 1:
        return Boundary.NO_PEERS
    if model.shard_peers and (fault.recipe in ("optimizer", "state") or fault.surface in STATE):
        return Boundary.SINGLE_OWNER
    sampled, ran = _coverage(history, fault)
    if not sampled:
        return Boundary.NOT_SAMPLED
    if not ran:
        return Boundary.NOT_READY
    if fault.kind == "drift":
        return _why_no_drift(history, fault)
    if fault.chance < 1 and not _acted(history, number):
        return Boundary.INTERMITTENT
    if cohort.peers == 2:
        return Boundary.TWO_PEERS
    if fault.kind == "straggler":
        return _why_not_slow(history, number, ran)
    return _why_not_blamed(history, number) if fault.kind == "corruption" else _why_not_told(history, number)


def _coverage(history: History, fault: SimFault) -> tuple[int, int]:
    """In how many checks the fault's recipe was due while it was there, and in how many of those it ran."""
    sampled = ran = 0
    for step, check in history.checks:
        plan = history.model.plan(history.cohort.stage, step)
        if plan is None or not fault.active(step):
            continue
        if fault.kind == "straggler":
            due = [r.recipe_id for r in plan.recipes if r.recipe_class in MODULES]
        elif fault.kind == "drift":
            due = [r.recipe_id for r in plan.recipes if r.recipe_class == "state"]
        elif fault.kind in ("not_ready", "desync"):
            due = [r.recipe_id for r in plan.recipes if fault.kind == "desync" or r.recipe_class == fault.recipe]
        else:
            due = [r.recipe_id for r in plan.recipes if concerns(history.model, plan, r, fault)]
        sampled += bool(due)
        ran += any(recipe in check.ran for recipe in due) or (bool(due) and fault.kind in ("not_ready", "desync"))
    return sampled, ran


def _why_no_drift(history: History, fault: SimFault) -> Boundary | None:
    if history.cohort.columns == 1:
        return Boundary.NO_PEERS
    others = [f for f in history.faults.values() if f is not fault]
    columns = {history.cohort.place(f.rank)[0] for f in history.faults.values() if f.kind == "drift"}
    if len(columns) == history.cohort.columns:
        return Boundary.COMMON_MODE
    if any(f.kind == "raises" and f.recipe == "state" for f in others):
        return Boundary.NOT_READY
    # While some replica stands apart by itself, partners are not compared with each other.
    return Boundary.NO_MAJORITY if any(f.kind == "corruption" and f.surface in STATE for f in others) else None


def _why_not_told(history: History, number: int) -> Boundary | None:
    """Why a rank that is not ready, raises or issues other collectives, or a recipe that varies, was not told for that:
    another fault stood before it."""
    fault, others = history.faults[number], [f for n, f in history.faults.items() if n != number]
    together = [f for f in others if f.kind == "desync" or (f.kind == "not_ready" and f.recipe == fault.recipe)]
    if together:
        split = fault.kind == "desync" and 2 * len({fault.rank, *(f.rank for f in together)}) >= history.cohort.peers
        return Boundary.NO_MAJORITY if split else Boundary.NOT_READY
    same = {f.kind for f in others if f.recipe_id == fault.recipe_id or _overlap(history, fault, f)}
    if "raises" in same:
        return Boundary.NOT_READY
    if "nondeterministic" in same:
        return Boundary.NONDETERMINISTIC
    return Boundary.MIXED if "corruption" in same else None


def _why_not_slow(history: History, number: int, ran: int) -> Boundary | None:
    fault = history.faults[number]
    column, _ = history.cohort.place(fault.rank)
    slow = {f.rank for f in history.faults.values() if f.kind == "straggler"} & set(history.cohort.table[column])
    if 2 * len(slow) >= history.cohort.peers:
        return Boundary.NO_MAJORITY
    if fault.factor < 1.5:
        return Boundary.THRESHOLD
    if ran < history.model.config.straggler_persistence + 1:
        return Boundary.NOT_SAMPLED
    if any(f.kind == "raises" for f in history.faults.values()):
        return Boundary.NOT_READY
    return Boundary.THRESHOLD if len(slow) > 1 else None


def _why_not_blamed(history: History, number: int) -> Boundary | None:
    fault, cohort = history.faults[number], history.cohort
    others = {n: f for n, f in history.faults.items() if n != number and _overlap(history, fault, f)}
    if any(f.kind == "nondeterministic" for f in others.values()):
        return Boundary.NONDETERMINISTIC
    if any(f.kind in ("raises", "not_ready", "desync") for f in others.values()):
        return Boundary.NOT_READY
    _, row = cohort.place(fault.rank)
    rows = [cohort.place(f.rank)[1] for f in others.values() if f.rank != fault.rank]
    if 2 * len({row, *rows}) >= cohort.peers:
        return Boundary.NO_MAJORITY
    if row in rows:
        return Boundary.SAME_ROW
    if len(history.model.collective_dims) >= MARKS and fault.recipe in MODULES:
        first = max(fault.collective, history.model.forward if fault.surface != "output" else 0)
        if first >= MARKS - 1:
            return Boundary.COHORT
    if others and any(f.chance < 1 or f.varies for f in (fault, *others.values())):
        return Boundary.MIXED
    rare = fault.chance < 1 and len(_acted(history, number, settled=True)) < RECURRENCES
    return Boundary.INTERMITTENT if rare else None


def _acted(history: History, number: int, *, settled: bool = False) -> list[int]:
    """Steps of the checks whose evidence a fault touched; of those alone, if so wanted, whose recipes had repeated
    themselves on all ranks before."""
    fault, model = history.faults[number], history.model
    steps = []
    for step, check in history.checks:
        plan = model.plan(history.cohort.stage, step)
        if plan is None or not check.acted.get(number):
            continue
        recipes = {r.recipe_id for r in plan.recipes if concerns(model, plan, r, fault)}
        steps += [step] if not settled or recipes & check.settled else []
    return steps


def _overlap(history: History, one: SimFault, other: SimFault) -> bool:
    """Whether two faults ever concern the same recipe of the same check; with a recipe that does not repeat itself, in
    any check, since it is not executed any more once that is known."""
    for step, _ in history.checks:
        plan = history.model.plan(history.cohort.stage, step)
        if plan is None or not one.active(step):
            continue
        recipes = [recipe for recipe in plan.recipes if concerns(history.model, plan, recipe, one)]
        if other.kind == "nondeterministic" and any(recipe.recipe_id == other.recipe_id for recipe in recipes):
            return True
        if not other.active(step):
            continue
        if other.kind == "desync" or any(concerns(history.model, plan, recipe, other) for recipe in recipes):
            return True
        if other.kind == "not_ready" and any(recipe.recipe_class == other.recipe for recipe in recipes):
            return True
    return False


def communication_boundary(
    model: SimModel, fault: SimFault, acting: Sequence[SimFault], *, sampled: bool
) -> Boundary | None:
    """Why a slow endpoint could not be named among all communication faults of its time."""
    near = groups_near(model.grid, [fault.rank])
    if not sampled:
        return Boundary.NOT_SAMPLED
    if len(acting) > 1:
        return Boundary.SEVERAL_SLOW
    if sum(fault.rank in ranks for _, ranks in near) < 2:
        return Boundary.ONE_GROUP
    return Boundary.NO_WITNESS if all(slows(fault, ranks) for _, ranks in near) else None
