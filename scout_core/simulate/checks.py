"""One check of one cohort: synthetic evidence, and every decision on it by the code that ranks run.

The order is that of `scout_core.replay.check.CheckRunner`: readiness among peers and then among partners, executions
until every recipe has its verdict, and a memory of what they taught.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from scout_core.consensus.readiness import (
    RankContract,
    Readiness,
    ReadinessVerdict,
    Reason,
    RecipeContract,
    encode,
    judge_readiness,
)
from scout_core.consensus.standing import GROUP_WORDS, join_standings, standing_of, statement
from scout_core.replay.check import Qualification
from scout_core.replay.cohorts import ColumnView, Joined, join
from scout_core.replay.evidence import Observation, surfaces_of
from scout_core.replay.isolation import Elapsed
from scout_core.replay.schedule import Plan, Recipe
from scout_core.replay.verdict import EXECUTED, RecipeVerdict, judge_recipe
from scout_core.simulate.cohort import Cohort
from scout_core.simulate.faults import MODULES, STATE, SimFault
from scout_core.simulate.model import SimModel
from scout_core.simulate.travel import Traces, all_computed, in_state, observation, travel, word
from scout_core.timing.stragglers import StragglerJudge, StragglerThresholds, StragglerVerdict

BASE_US, NOISE = 10_000, 0.03
"""Time of a healthy replay in microseconds, and its spread."""

_ATTEMPTS = 3
"""Checks in which a recipe may fail to qualify, as in `CheckRunner`."""

Runs = list[list[Observation]]
"""Observations of one column, by execution and row."""


@dataclass(frozen=True, kw_only=True)
class CohortCheck:
    """What one check of a cohort found.

    ran: ids of the recipes that every rank of the cohort ran. reasons: why others did not.
    joined, stragglers: by recipe, one entry a column; stragglers only for columns in which somebody may be slow.
    acted: in how many executions each fault, by its number, did something to the evidence.
    settled: ids of recipes that had repeated themselves on all ranks before.
    """

    ran: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()
    joined: Mapping[str, Sequence[Joined]] = field(default_factory=dict)
    stragglers: Mapping[str, Mapping[int, StragglerVerdict]] = field(default_factory=dict)
    acted: Mapping[int, int] = field(default_factory=dict)
    settled: frozenset[str] = frozenset()


class CohortRun:
    """The checks of one cohort, one after the other. `judged` counts the columns that were judged, not looked up."""

    def __init__(
        self, model: SimModel, cohort: Cohort, faults: Mapping[int, SimFault], *, seed: int = 0, every: bool = False
    ) -> None:
        """`faults` are those on ranks of this cohort, by their number. `every`: judge also the columns in which all
        evidence is that of healthy ranks; otherwise the first verdict on such evidence serves for all."""
        self.cohort = cohort
        self.judged = 0
        self._model = model
        self._faults = faults
        self._places = {number: cohort.place(fault.rank) for number, fault in faults.items()}
        self._rng = random.Random(f"{seed}/{cohort.key}")
        self._every = every
        self._lockstep = cohort.columns > 1
        self._known: dict[tuple[int, str], Qualification] = {}
        self._sound: dict[str, list[Observation]] = {}
        self._verdicts: dict[tuple[str, int, bool], RecipeVerdict] = {}
        self._judges = {
            self._places[number][0]: StragglerJudge(StragglerThresholds.of(model.config))
            for number, fault in faults.items()
            if fault.kind == "straggler"
        }

    def check(self, plan: Plan) -> CohortCheck:
        """Run the check of one boundary."""
        acting = {number: fault for number, fault in self._faults.items() if fault.active(plan.step)}
        readiness = self._ready(plan, acting)
        reasons = tuple(dict.fromkeys(reason for verdict in readiness for reason in verdict.reasons))
        runnable = set.intersection(*(set(verdict.runnable) for verdict in readiness))
        recipes = [recipe for recipe in plan.recipes if recipe.recipe_class in runnable]
        columns = range(self.cohort.columns)
        settled = [recipe.recipe_id for recipe in recipes if all(self._qualified(c, recipe) for c in columns)]
        acted: dict[int, int] = {}
        runs: dict[str, list[Runs]] = {recipe.recipe_id: [[] for _ in columns] for recipe in recipes}
        joined: dict[str, list[Joined]] = {}
        todo = {r: [1 if self._settled(c, r) else 2 for c in columns] for r in recipes}
        while todo:
            for recipe, counts in todo.items():
                self._execute(plan, recipe, acting, counts, runs[recipe.recipe_id], acted)
            joined = {recipe.recipe_id: self._join(recipe, runs[recipe.recipe_id], acting) for recipe in recipes}
            again = {recipe: [one.more for one in joined[recipe.recipe_id]] for recipe in recipes}
            todo = {recipe: counts for recipe, counts in again.items() if any(counts)}
        for recipe in recipes:
            for column, one in enumerate(joined[recipe.recipe_id]):
                self._learn(self._known[column, recipe.recipe_id], one.verdict)
        return CohortCheck(
            ran=tuple(recipe.recipe_id for recipe in recipes),
            reasons=reasons,
            joined=joined,
            stragglers={r.recipe_id: self._slow(r, runs[r.recipe_id]) for r in recipes if r.recipe_class in MODULES},
            acted=acted,
            settled=frozenset(settled),
        )

    def _ready(self, plan: Plan, acting: Mapping[int, SimFault]) -> list[ReadinessVerdict]:
        """Every column's readiness, in the light of the rows' standings."""
        sound = judge_readiness([encode(_healthy_contract(plan))] * self.cohort.peers, self.cohort.table[0])
        touched = {self._places[number] for number in acting}
        table, healthy = self.cohort.table, _healthy_contract(plan)
        contracts = {place: self._contract(plan, table[place[0]][place[1]], acting) for place in touched}
        columns = {column for column, _ in touched}
        own = []
        for column, ranks in enumerate(table):
            if column not in columns and not self._every:
                own.append(sound)
                continue
            said = [encode(contracts.get((column, row), healthy)) for row in range(self.cohort.peers)]
            own.append(judge_readiness(said, ranks))
        if not self._lockstep:
            return own
        standings = [self._standing([healthy] * self.cohort.columns, 0)] * self.cohort.peers
        for row in {row for _, row in touched}:
            said_here = [contracts.get((column, row), healthy) for column in range(self.cohort.columns)]
            standings[row] = self._standing(said_here, row)
        # Columns without a fault decide alike, but for the names of the ranks.
        joined = join_standings(sound, standings, table[0])
        return [
            joined if verdict is sound else join_standings(verdict, standings, ranks)
            for verdict, ranks in zip(own, table, strict=True)
        ]

    def _standing(self, contracts: Sequence[RankContract], row: int) -> list[int]:
        """The standing of a row of partners."""
        ranks = [column[row] for column in self.cohort.table]
        return standing_of([statement(one) for one in contracts], [[0] * GROUP_WORDS] * len(ranks), ranks)

    def _contract(self, plan: Plan, rank: int, acting: Mapping[int, SimFault]) -> RankContract:
        here = [fault for fault in acting.values() if fault.rank == rank]
        missing = {fault.recipe for fault in here if fault.kind == "not_ready"}
        if not here:
            return _healthy_contract(plan)
        return RankContract(
            step=plan.step,
            check_index=plan.ordinal,
            collective_digest=1 + rank if any(fault.kind == "desync" for fault in here) else 0,
            recipes={
                name: RecipeContract(readiness=Readiness.NO_CAPTURE if name in missing else Readiness.READY)
                for name in plan.classes
            },
        )

    def _execute(
        self,
        plan: Plan,
        recipe: Recipe,
        acting: Mapping[int, SimFault],
        counts: Sequence[int],
        runs: list[Runs],
        acted: dict[int, int],
    ) -> None:
        """Add executions of a recipe, `counts[c]` in column c. Partners execute a recipe that communicates together."""
        concerned = {n: fault for n, fault in acting.items() if self._concerns(plan, recipe, fault)}
        slow = {self._places[n]: fault.factor for n, fault in acting.items() if fault.kind == "straggler"}
        known = self._known.get((0, recipe.recipe_id), Qualification())
        for execution in range(max(counts)):
            happening = {n: f for n, f in concerned.items() if f.chance >= 1 or self._rng.random() < f.chance}
            for number in happening:
                acted[number] = acted.get(number, 0) + 1
            apart = self._apart(recipe, happening)
            if known.nondeterministic:
                apart = _only_read(apart)
            for column in range(self.cohort.columns):
                if execution < counts[column]:
                    row = self._row_of(recipe, column, apart)
                    runs[column].append(self._timed(row, column, slow) if column in self._judges else row)

    def _concerns(self, plan: Plan, recipe: Recipe, fault: SimFault) -> bool:
        """Whether a fault has anything to do with this recipe at this check."""
        return concerns(self._model, plan, recipe, fault)

    def _apart(self, recipe: Recipe, happening: Mapping[int, SimFault]) -> dict[tuple[int, int], Traces]:
        """Traces by column and row of what happens in one execution."""
        names = surfaces_of(recipe.recipe_class, lockstep=self._lockstep)
        if any(fault.kind == "nondeterministic" for fault in happening.values()):
            everywhere = [(c, p) for c in range(self.cohort.columns) for p in range(self.cohort.peers)]
            return {place: all_computed() for place in everywhere}
        apart: dict[tuple[int, int], Traces] = {}
        rows: dict[int, list[tuple[int, SimFault]]] = {}
        for number, fault in happening.items():
            column, row = self._places[number]
            if self._model.shard_peers and fault.kind == "corruption" and fault.surface in STATE:
                continue  # gathered from its one owner, it is the same on every peer
            if recipe.recipe_class in MODULES:
                rows.setdefault(row, []).append((column, fault))
                continue
            traces = apart.setdefault((column, row), Traces())
            traces.surfaces |= in_state(fault, recipe.recipe_class, names)
            traces.failed = traces.failed or fault.kind == "raises"
            traces.varies = traces.varies or fault.varies
        for row, faults in rows.items():
            for column, traces in travel(self._model, self.cohort, faults).items():
                traces.varies = any(fault.varies for _, fault in faults)
                apart[column, row] = traces
        return apart

    def _row_of(self, recipe: Recipe, column: int, apart: Mapping[tuple[int, int], Traces]) -> list[Observation]:
        """One execution's evidence of all peers of a column; the same list whenever all are healthy."""
        name, kind = recipe.recipe_id, recipe.recipe_class
        if name not in self._sound:
            sound = observation(self._model, name, kind, lockstep=self._lockstep)
            self._sound[name] = [sound] * self.cohort.peers
        rows = [row for row in range(self.cohort.peers) if (column, row) in apart]
        if not rows:
            return self._sound[name]
        seen = list(self._sound[name])
        for row in rows:
            traces = apart[column, row]
            salt = (column, row, self._rng.random() if traces.varies else None)
            seen[row] = observation(self._model, name, kind, lockstep=self._lockstep, traces=traces, salt=salt)
        return seen

    def _timed(self, seen: list[Observation], column: int, slow: Mapping[tuple[int, int], float]) -> list[Observation]:
        def elapsed(row: int) -> Elapsed:
            time_us = BASE_US * slow.get((column, row), 1.0) * self._rng.lognormvariate(0, NOISE)
            return Elapsed(wall_us=round(time_us), wait_us=0)

        return [replace(one, elapsed=elapsed(row)) for row, one in enumerate(seen)]

    def _join(self, recipe: Recipe, runs: Sequence[Runs], acting: Mapping[int, SimFault]) -> list[Joined]:
        """Every column's verdict, in the light of the others'."""
        drifted = {
            self._places[n][0] for n, f in acting.items() if f.kind == "drift" and recipe.recipe_class == "state"
        }
        own: list[RecipeVerdict] = []
        views: list[ColumnView] = []
        for column, seen in enumerate(runs):
            verdict = self._judge(recipe, column, seen)
            more = max(verdict.more, self._more_times(recipe, column, seen))
            own.append(verdict if more == verdict.more else replace(verdict, more=more))
            shared = word("shared", recipe.recipe_id, column in drifted) if recipe.recipe_class == "state" else 0
            row = ColumnView.of(own[-1], shared=shared, listing=1).encode()
            views.append(ColumnView.decode(row))
        if not self._lockstep:
            views = []
        joined: dict[int, Joined] = {}
        found: list[Joined] = []
        for column, verdict in enumerate(own):
            # Columns that share a healthy verdict share what becomes of it.
            one = None if self._every or verdict.suspects else joined.get(id(verdict))
            if one is None:
                one = join(verdict, views, column, self.cohort.table, travels=recipe.recipe_class in MODULES)
                joined[id(verdict)] = one
            found.append(one)
        return found

    def _judge(self, recipe: Recipe, column: int, seen: Runs) -> RecipeVerdict:
        known = self._known.setdefault((column, recipe.recipe_id), Qualification())
        settled = self._settled(column, recipe)
        key = (recipe.recipe_id, len(seen), settled)
        sound = not self._every and all(row is self._sound[recipe.recipe_id] for row in seen)
        if sound and key in self._verdicts:
            return self._verdicts[key]
        self.judged += 1
        names = surfaces_of(recipe.recipe_class, lockstep=self._lockstep)
        verdict = judge_recipe(
            recipe.recipe_id,
            recipe.recipe_class,
            [[Observation.decode(one.encode(), names) for one in row] for row in seen] if self._every else seen,
            qualified=settled,
            earlier_offenders=frozenset(known.offenders),
            earlier_repeats=known.repeats,
            ranks=self.cohort.table[column],
            lockstep=self._lockstep,
        )
        if sound:
            self._verdicts[key] = verdict
        return verdict

    def _more_times(self, recipe: Recipe, column: int, seen: Runs) -> int:
        """Executions still needed to confirm that somebody is slow."""
        if column not in self._judges or recipe.recipe_class not in MODULES:
            return 0
        if not any(self._judges[column].candidates(recipe.recipe_id, _times_ms(seen)[0])):
            return 0
        return max(1 + self._model.config.straggler_confirmations - len(seen), 0)

    def _slow(self, recipe: Recipe, runs: Sequence[Runs]) -> dict[int, StragglerVerdict]:
        return {
            column: judge.judge(recipe.recipe_class, _times_ms(runs[column])) for column, judge in self._judges.items()
        }

    def _qualified(self, column: int, recipe: Recipe) -> bool:
        known = self._known.get((column, recipe.recipe_id), Qualification())
        return known.qualified or recipe.recipe_class == "state"

    def _settled(self, column: int, recipe: Recipe) -> bool:
        known = self._known.get((column, recipe.recipe_id), Qualification())
        return known.qualified or known.nondeterministic or recipe.recipe_class == "state"

    def _learn(self, known: Qualification, verdict: RecipeVerdict) -> None:
        """As `CheckRunner` does."""
        known.repeats += verdict.repeats
        if verdict.nondeterministic:
            known.nondeterministic, known.qualified = True, False
        elif verdict.basis == "self":
            known.offenders |= {p for p, bad in enumerate(verdict.bitmap) if bad}
        elif not known.nondeterministic and not verdict.raised:
            known.qualified = known.qualified or verdict.qualified
            if not known.qualified and self.cohort.peers > 1:
                known.failures += 1
                known.nondeterministic = known.failures >= _ATTEMPTS


def concerns(model: SimModel, plan: Plan, recipe: Recipe, fault: SimFault) -> bool:
    """Whether a fault has anything to do with the evidence of a recipe at a check."""
    if fault.kind in ("nondeterministic", "raises"):
        return fault.recipe_id == recipe.recipe_id
    if fault.kind != "corruption":
        return False
    window = fault.window % model.windows
    if recipe.recipe_class == "state":
        return fault.surface in STATE and window == plan.ordinal % model.windows
    if recipe.recipe_class == "optimizer":
        seen = fault.surface in (*STATE, "gradient", "updated_state")
        return seen and window == plan.optimizer_ordinal % model.windows
    return fault.recipe_id == recipe.recipe_id


def _only_read(apart: Mapping[tuple[int, int], Traces]) -> dict[tuple[int, int], Traces]:
    """What is left where nothing is executed, since a recipe is known not to repeat itself."""
    read = {place: Traces(surfaces=traces.surfaces - EXECUTED) for place, traces in apart.items()}
    return {place: traces for place, traces in read.items() if traces.surfaces}


def _healthy_contract(plan: Plan) -> RankContract:
    ready = {name: RecipeContract(readiness=Readiness.READY) for name in plan.classes}
    return RankContract(step=plan.step, check_index=plan.ordinal, recipes=ready)


def _times_ms(seen: Runs) -> list[list[float | None]]:
    return [[None if one.flags.failed else one.elapsed.busy_us / 1e3 for one in row] for row in seen]
