"""One check, from the readiness contract to the result (DESIGN, the way of one check)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from scout_core.adapter import FrameworkAdapter
from scout_core.config import ReplayHarnessConfig
from scout_core.consensus.readiness import RankContract, ReadinessVerdict, Reason
from scout_core.consensus.standing import GROUP_WORDS
from scout_core.consensus.structure import structure_signature
from scout_core.peers import PeerGroup
from scout_core.replay.agreement import agree
from scout_core.replay.assemble import Executions, Found, assemble
from scout_core.replay.cohorts import VIEW_WORDS, ColumnView, Joined, join, wants_closer_look
from scout_core.replay.detail import look_closer
from scout_core.replay.evidence import ROW_WORDS, SHARED_STATE, EvidenceBatch, Observation, fold, surfaces_of
from scout_core.replay.execute import Received
from scout_core.replay.lockstep import Lockstep
from scout_core.replay.owner_verdict import judge_at_rest, settle_owner
from scout_core.replay.recorder import Prepared, Recorder
from scout_core.replay.result import Detail, ReplayResult
from scout_core.replay.schedule import MODULE_CLASSES, READING_CLASSES, Plan, Recipe
from scout_core.replay.tie_break import break_ties
from scout_core.replay.transport import Parcel, agree_on_shapes, carry, carry_slice
from scout_core.replay.verdict import RecipeVerdict, judge_recipe
from scout_core.replay.workbench import Material, Workbench
from scout_core.timing.live import LiveSteps, LiveVerdict
from scout_core.timing.stragglers import StragglerJudge, StragglerThresholds, StragglerVerdict


@dataclass(kw_only=True)
class Qualification:
    """What earlier checks taught about a recipe; equal on every peer, since it comes from gathered evidence alone."""

    qualified: bool = False
    nondeterministic: bool = False
    failures: int = 0
    repeats: int = 0
    offenders: set[int] = field(default_factory=set)


_QUALIFICATION_ATTEMPTS = 3
"""Checks in which a recipe may fail to qualify because one peer once varied, before it is called nondeterministic."""


class CheckRunner:
    """Runs the checks of one rank and its peers and remembers what they taught about each recipe."""

    def __init__(
        self,
        adapter: FrameworkAdapter,
        recorder: Recorder,
        peers: PeerGroup,
        config: ReplayHarnessConfig,
        *,
        partners: PeerGroup | None = None,
        table: Sequence[Sequence[int]] = (),
        shard_peers: bool = False,
    ) -> None:
        """`partners` work in lockstep with this rank; `table[i]` are the peers of the i-th of them."""
        self._adapter = adapter
        self._recorder = recorder
        self._peers = peers
        self._partners = partners or PeerGroup(ranks=(peers.rank,), rank=peers.rank, control=None)
        self._table = table
        self._lockstep = Lockstep(self._partners, peers, shard_peers=shard_peers)
        self._owned = not shard_peers
        self._config = config
        self._known: dict[str, Qualification] = {}
        self._lenient: set[str] = set()
        self.collective_digest: Callable[[], int] = lambda: 0
        self.group_words: Callable[[Sequence[int]], list[int]] = lambda ranks: [0] * GROUP_WORDS
        self.live: LiveSteps | None = None
        self._pace: LiveVerdict | None = None
        self._judge = StragglerJudge(StragglerThresholds.of(config))

    def source(self, plan: Plan) -> int:
        """Position of the peer whose invocation is replayed; moves on with every check, and past any common period."""
        return (plan.ordinal + plan.ordinal // self._peers.size) % self._peers.size

    def is_source(self, plan: Plan) -> bool:
        """Whether this rank's invocation is the one to replay."""
        return self.source(plan) == self._peers.position

    def run(self, plan: Plan) -> ReplayResult:
        """Run one check. Every peer calls at the same boundary.

        Collectives, all on the peer group: one all-gather of readiness, at most one broadcast per device kind, one
        all-gather of evidence; more only when peers' sizes differ, evidence is disputed, or a rank looks slow. With
        lockstep partners, one all-gather among them before the first of the peers' and one after each of evidence, and
        what replays themselves run.
        """
        started = time.perf_counter()
        together = not self._recorder.recomputes(plan) or self._lockstep.all_can(self._recorder.has_input)
        prepared = self._recorder.prepare(plan, keep=self.is_source(plan), together=together)
        contract = RankContract(
            step=plan.step,
            check_index=plan.ordinal,
            collective_digest=self.collective_digest(),
            seed=structure_signature((plan.step, plan.ordinal)),
            recipes=prepared.contracts,
        )
        live = self.live
        words, asks = (live.words(plan.step), live.groups.wants) if live is not None else ([], False)
        readiness, rows, asked = agree(contract, self._peers, self._partners, self.group_words, words, asks)
        if live is not None:
            apart = any(reason.recipe == "check" for reason in readiness.reasons)
            self._pace = live.judge(plan.step, [] if apart else rows, asked)
        reasons = list(readiness.reasons)
        recipes = [recipe for recipe in plan.recipes if recipe.recipe_class in readiness.runnable]
        if not recipes:
            return self._result(plan, started, recipes, Found(), reasons)
        resize = any(reason.field == "shape" and reason.recipe in readiness.runnable for reason in reasons)
        bench = self._workbench(plan, prepared, recipes, readiness, resize)
        found = self._rounds(bench, recipes, self.source(plan))
        found = replace(found, details=self._details(bench, recipes, found.joined))
        return self._result(plan, started, recipes, found, reasons)

    def _result(
        self, plan: Plan, started: float, recipes: Sequence[Recipe], found: Found, reasons: list[Reason]
    ) -> ReplayResult:
        nondeterministic = {key for key, known in self._known.items() if known.nondeterministic}
        result = assemble(plan, self._peers.ranks, self.source(plan), recipes, found, reasons, nondeterministic)
        return replace(
            result,
            collective_timings=(*result.collective_timings, *(self.live.groups.own if self.live is not None else ())),
            cross_pg_result=self.live.groups.found if self.live is not None else None,
            live=self._pace,
            elapsed_ms=(time.perf_counter() - started) * 1e3,
        )

    def _workbench(
        self, plan: Plan, prepared: Prepared, recipes: Sequence[Recipe], readiness: ReadinessVerdict, resize: bool
    ) -> Workbench:
        """Carry the source's invocations over and set up the executions."""
        source = self.source(plan)
        modules: dict[str, tuple[str, nn.Module]] = {
            recipe.recipe_id: self._recorder.module(recipe)
            for recipe in recipes
            if recipe.recipe_id in prepared.invocations
        }
        parcels = [
            Parcel(recipe_id=key, module=module, invocation=prepared.invocations[key])
            for key, (_, module) in modules.items()
        ]
        received: dict[str, Received] = {}
        if parcels:
            if resize:
                agree_on_shapes(parcels, self._peers, source)
            received = carry(parcels, self._peers, source)
        if any(recipe.recipe_class == "owner_update" for recipe in recipes):
            assert prepared.slice is not None, "readiness only lets an optimizer recipe run with a captured slice"
            if self.is_source(plan) and not plan.manual:
                prepared.own_slice = prepared.slice
            prepared.slice = carry_slice(prepared.slice, self._peers, source)
        return Workbench(
            self._adapter,
            prepared,
            received,
            modules,
            seed=readiness.seeds[source],
            sizes={name: words[source] for name, words in readiness.sizes.items()},
            deterministic=self._config.deterministic,
            lenient=self._lenient,
            lockstep=self._lockstep,
            owned=self._owned,
        )

    def _rounds(self, bench: Workbench, recipes: Sequence[Recipe], source: int) -> Found:
        """Execute and gather until every recipe has its verdict: one round, unless something is disputed or slow."""
        executions: Executions = {recipe.recipe_id: [] for recipe in recipes}
        todo = {recipe: 1 if self._settled(recipe) else 2 for recipe in recipes}
        shared: dict[str, tuple[int, int]] = {}
        while todo:
            shared |= self._gather_round(bench, todo, executions)
            joined = self._join(recipes, executions, shared, source)
            todo = {recipe: joined[recipe.recipe_id].more for recipe in recipes if joined[recipe.recipe_id].more}
        if self._config.tie_break == "reference":
            joined = break_ties(bench, self._peers, recipes, joined, self._config.tie_break_budget_mib)
        for recipe in recipes:
            self._learn(recipe, joined[recipe.recipe_id].verdict)
        timings = bench.collective_timings()
        return Found(executions, joined, self._judge_times(recipes, executions), timings)

    def _join(
        self, recipes: Sequence[Recipe], executions: Executions, shared: dict[str, tuple[int, int]], source: int
    ) -> dict[str, Joined]:
        """Every recipe's verdict, in the light of the partners' verdicts: with partners, one all-gather among them."""
        own: list[RecipeVerdict] = []
        for recipe in recipes:
            seen = executions[recipe.recipe_id]
            verdict = self._judge_one(recipe, seen, source)
            own.append(replace(verdict, more=max(verdict.more, self._more_times(recipe, seen))))
        views = [[] for _ in own] if self._partners.size < 2 else self._exchange(own, shared)
        return {
            verdict.recipe_id: join(
                verdict,
                seen,
                self._partners.position,
                self._table,
                travels=recipe.recipe_class in MODULE_CLASSES,
            )
            for recipe, verdict, seen in zip(recipes, own, views, strict=True)
        }

    def _exchange(self, own: list[RecipeVerdict], shared: dict[str, tuple[int, int]]) -> list[list[ColumnView]]:
        """The views of all partners, per recipe."""
        words: list[int] = []
        for verdict in own:
            word, listing = shared.get(verdict.recipe_id, (0, 0))
            words += ColumnView.of(verdict, shared=word, listing=listing).encode()
        rows = self._partners.gather(torch.tensor(words, dtype=torch.int64)).tolist()
        starts = range(0, len(words), VIEW_WORDS)
        return [[ColumnView.decode(row[start : start + VIEW_WORDS]) for row in rows] for start in starts]

    def _judge_times(self, recipes: Sequence[Recipe], executions: Executions) -> dict[str, StragglerVerdict]:
        """Who is slow, per recipe, and over the layers taken together when they are checked in turn.

        A slow device is slow in every layer and shows in few checks; one slow layer shows each time its turn comes.
        """
        verdicts: dict[str, StragglerVerdict] = {}
        timed = [recipe for recipe in recipes if recipe.recipe_class in MODULE_CLASSES]
        timed = [recipe for recipe in timed if not self._known[recipe.recipe_id].nondeterministic]
        single = sum(recipe.recipe_class == "hidden" for recipe in timed) == 1
        for recipe in timed:
            rounds = _rounds_ms(executions[recipe.recipe_id])
            verdicts[recipe.recipe_id] = self._judge.judge(recipe.recipe_id, rounds)
            if recipe.recipe_class == "hidden" and single:
                verdicts["hidden"] = self._judge.judge("hidden", rounds)
        return verdicts

    def _gather_round(
        self, bench: Workbench, todo: dict[Recipe, int], executions: Executions
    ) -> dict[str, tuple[int, int]]:
        """Run the executions in `todo` and share their evidence: one all-gather.

        Returns, by recipe, a word over what of it lockstep partners hold alike, and one over the listing of that.
        """
        batch = EvidenceBatch()
        materials: dict[str, Material | None] = {}
        order = [recipe for recipe, count in todo.items() for _ in range(count)]
        for recipe in order:
            known = self._known.get(recipe.recipe_id)
            computes = known is None or not known.nondeterministic
            materials[recipe.recipe_id] = bench.observe(batch, recipe, compute=computes)
        own = [word for observation in batch.resolve() for word in observation.encode()]
        rows = self._peers.gather(torch.tensor(own, dtype=torch.int64)).tolist()
        for index, recipe in enumerate(order):
            cells = [row[index * ROW_WORDS : (index + 1) * ROW_WORDS] for row in rows]
            names = surfaces_of(recipe.recipe_class, lockstep=self._partners.size > 1)
            executions[recipe.recipe_id].append([Observation.decode(cell, names) for cell in cells])
        return {
            key: (fold(batch.signatures_of(material.signed[SHARED_STATE])), material.listing)
            for key, material in materials.items()
            if material is not None and SHARED_STATE in material.signed
        }

    def _judge_one(self, recipe: Recipe, seen: list[list[Observation]], source: int) -> RecipeVerdict:
        known = self._known.setdefault(recipe.recipe_id, Qualification())
        if recipe.recipe_class == "at_rest":
            return judge_at_rest(recipe.recipe_id, seen[0], self._peers.ranks)
        verdict = judge_recipe(
            recipe.recipe_id,
            recipe.recipe_class,
            seen,
            qualified=self._settled(recipe),
            earlier_offenders=frozenset(known.offenders),
            earlier_repeats=known.repeats,
            ranks=self._peers.ranks,
            lockstep=self._partners.size > 1,
        )
        return settle_owner(verdict, source) if recipe.recipe_class == "owner_update" else verdict

    def _settled(self, recipe: Recipe) -> bool:
        """Whether the recipe needs no qualifying: it repeated itself before, is known not to, or only reads."""
        known = self._known.get(recipe.recipe_id, Qualification())
        return known.qualified or known.nondeterministic or recipe.recipe_class in READING_CLASSES

    def _learn(self, recipe: Recipe, verdict: RecipeVerdict) -> None:
        known = self._known[recipe.recipe_id]
        known.repeats += verdict.repeats
        if verdict.nondeterministic:
            known.nondeterministic, known.qualified = True, False
        elif verdict.basis == "self":
            known.offenders |= {p for p, bad in enumerate(verdict.bitmap) if bad}
        elif not known.nondeterministic and not verdict.raised:
            known.qualified = known.qualified or verdict.qualified
            if not known.qualified and self._peers.size > 1:
                known.failures += 1
                known.nondeterministic = known.failures >= _QUALIFICATION_ATTEMPTS

    def _more_times(self, recipe: Recipe, seen: list[list[Observation]]) -> int:
        """Executions still needed to confirm that somebody is slow; 0 when nobody was in the first."""
        rounds = _rounds_ms(seen)
        if recipe.recipe_class not in MODULE_CLASSES:
            return 0
        if not any(self._judge.candidates(recipe.recipe_id, rounds[0])):
            return 0
        return max(1 + self._config.straggler_confirmations - len(rounds), 0)

    def _details(self, bench: Workbench, recipes: Sequence[Recipe], joined: dict[str, Joined]) -> dict[str, Detail]:
        """A closer look at each disputed recipe; costs nothing when all agree. Partners execute it once more alike."""
        details: dict[str, Detail] = {}
        for recipe in recipes:
            if not joined[recipe.recipe_id].closer:
                continue
            verdict = joined[recipe.recipe_id].verdict
            batch = EvidenceBatch()
            material = bench.observe(batch, recipe, compute=not self._known[recipe.recipe_id].nondeterministic)
            batch.resolve()
            surface, group = verdict.first_surface, self._peers
            if joined[recipe.recipe_id].shared_differs:
                surface, group = SHARED_STATE, self._partners
            elif not wants_closer_look(verdict):
                continue
            assert surface is not None, "a closer look is wanted at a surface"
            found = look_closer(group, batch, material, surface, verdict.bitmap)
            if found is not None:
                details[recipe.recipe_id] = found
        return details


def _rounds_ms(seen: list[list[Observation]]) -> list[list[float | None]]:
    """Times of all executions, waiting for a core left out; None where a peer's execution raised."""
    return [[None if o.flags.failed else o.elapsed.busy_us / 1e3 for o in run] for run in seen]
