"""A simulation from its faults to its report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scout_core.consensus.readiness import ROW_WORDS as READY_WORDS
from scout_core.consensus.standing import GROUP_WORDS, STANDING_WORDS, STATEMENT_WORDS
from scout_core.peers import Grid
from scout_core.replay.cohorts import VIEW_WORDS
from scout_core.replay.evidence import ROW_WORDS, surfaces_of
from scout_core.simulate.checks import CohortRun
from scout_core.simulate.cohort import Cohort, cohort_of
from scout_core.simulate.faults import SimFault, check_faults
from scout_core.simulate.model import SimModel
from scout_core.simulate.score import History, Outcome, communication_boundary, judge, wrong_ranks
from scout_core.simulate.slow_groups import COMMUNICATION, locate


@dataclass(frozen=True, kw_only=True)
class Groups:
    """What every rank of the job derived: the number of distinct groups, their sizes, and the time for all ranks."""

    peer_groups: int
    peers: int
    cohorts: int
    partners: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one rank sends in a check of four recipes that finds nothing. Independent of tensor sizes.

    messages: collectives on control groups; the source's invocation travels in one broadcast more per kind of device.
    bytes_per_surface: of evidence.
    """

    messages: int
    bytes: int
    bytes_per_surface: float


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a simulation found. `false_alarms` are `(step, what, rank)` of blame on ranks that have no such fault.

    `decision_s` is the CPU time of all decisions on this machine and `judged` the columns of recipes they were about: a
    rank of a real job decides on its own column only, `decision_us_per_rank` for all recipes of a check.
    """

    model: SimModel
    checks: int
    groups: Groups
    cost: Cost
    outcomes: tuple[Outcome, ...]
    false_alarms: tuple[tuple[int, str, int], ...]
    healthy_cohorts: int
    decision_s: float
    decision_us_per_rank: float

    @property
    def answers(self) -> Counter[str]:
        """How many faults had each answer."""
        return Counter(outcome.answer for outcome in self.outcomes)

    @property
    def sound(self) -> bool:
        """No false alarm, and every fault that was not attributed is explained."""
        return not self.false_alarms and all(outcome.explained for outcome in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        """A plain dict for strict JSON."""
        return {
            "type": "simulation",
            "ranks": self.model.grid.world,
            "dims": dict(self.model.grid.dims),
            "checks": self.checks,
            "groups": vars(self.groups),
            "cost": vars(self.cost),
            "answers": dict(self.answers),
            "outcomes": [outcome.to_json() for outcome in self.outcomes],
            "false_alarms": [{"step": step, "what": what, "rank": rank} for step, what, rank in self.false_alarms],
            "healthy_cohorts": self.healthy_cohorts,
            "decision_s": round(self.decision_s, 4),
            "decision_us_per_rank": round(self.decision_us_per_rank, 1),
            "sound": self.sound,
        }


def simulate(
    model: SimModel, faults: Sequence[SimFault], *, checks: int = 8, seed: int = 0, healthy: bool = False
) -> Report:
    """Run `checks` checks of the job with these faults, and judge what was said of them.

    Cohorts with a fault are simulated in every check. `healthy`: all others too, in the first one, and every column of
    theirs judged by itself. Raises `ConfigError` for a fault at a place that the job does not have.
    """
    check_faults(faults, model)
    groups = _derive(model.grid) if healthy else _estimate(model.grid)
    histories = _histories(model, faults)
    judged, started = 0, time.process_time()
    for history in histories.values():
        run = CohortRun(model, history.cohort, history.faults, seed=seed, every=healthy)
        for ordinal in range(1, checks + 1):
            plan = model.plan(history.cohort.stage, ordinal * model.interval)
            if plan is not None:
                history.checks.append((plan.step, run.check(plan)))
        judged += run.judged
    alarms = {alarm for history in histories.values() for alarm in wrong_ranks(history)}
    outcomes = {n: judge(history, n) for history in histories.values() for n in history.faults}
    quiet, quiet_judged, quiet_alarms = _all_others(model, set(histories), seed) if healthy else (0, 0, set())
    slow, slow_alarms = _communication(model, faults, checks, seed)
    elapsed_s = time.process_time() - started
    recipes = len(model.classes(0)) + (0 if model.shard_peers else 1)
    judged += quiet_judged
    return Report(
        model=model,
        checks=checks,
        groups=groups,
        cost=_cost(model, groups.partners > 1),
        outcomes=tuple(found for _, found in sorted((outcomes | slow).items())),
        false_alarms=tuple(sorted(alarms | quiet_alarms | slow_alarms)),
        healthy_cohorts=quiet,
        decision_s=elapsed_s,
        decision_us_per_rank=elapsed_s / max(judged, 1) * recipes * 1e6,
    )


def _histories(model: SimModel, faults: Sequence[SimFault]) -> dict[int, History]:
    """The cohorts that have a fault, by key, with the numbers of their faults."""
    found: dict[int, tuple[Cohort, dict[int, SimFault]]] = {}
    for number, fault in enumerate(faults):
        if fault.kind not in COMMUNICATION:
            cohort = cohort_of(model.grid, fault.rank)
            found.setdefault(cohort.key, (cohort, {}))[1][number] = fault
    return {key: History(model=model, cohort=cohort, faults=own) for key, (cohort, own) in found.items()}


def _all_others(model: SimModel, faulty: set[int], seed: int) -> tuple[int, int, set[tuple[int, str, int]]]:
    """One check of every cohort without a fault: their number, columns judged, and blame, which should be none."""
    alarms: set[tuple[int, str, int]] = set()
    cohorts = judged = 0
    seen: set[int] = set()
    for rank in model.grid.members:
        if rank in seen:
            continue
        cohort = cohort_of(model.grid, rank)
        seen.update(member for column in cohort.table for member in column)
        plan = model.plan(cohort.stage, model.interval)
        if cohort.key in faulty or plan is None:
            continue
        run = CohortRun(model, cohort, {}, seed=seed, every=True)
        history = History(model=model, cohort=cohort, faults={}, checks=[(plan.step, run.check(plan))])
        alarms |= wrong_ranks(history)
        cohorts, judged = cohorts + 1, judged + run.judged
    return cohorts, judged, alarms


def _communication(
    model: SimModel, faults: Sequence[SimFault], checks: int, seed: int
) -> tuple[dict[int, Outcome], set[tuple[int, str, int]]]:
    """Outcomes of communication faults. A slow link or job has no rank to name: naming nobody is what is right."""
    wanted = {n: fault for n, fault in enumerate(faults) if fault.kind in COMMUNICATION}
    named: dict[int, int | None] = {}
    acting: dict[int, list[SimFault]] = {}
    alarms: set[tuple[int, str, int]] = set()
    for step in (ordinal * model.interval for ordinal in range(1, checks + 1)):
        acting[step] = [fault for fault in wanted.values() if fault.active(step)]
        if acting[step]:
            named[step] = locate(model.grid, acting[step], seed=seed).rank
            ends = {fault.rank for fault in acting[step] if fault.kind == "slow_endpoint"}
            rank = named[step]
            alarms |= {(step, "communication", rank)} if rank is not None and rank not in ends else set()
    outcomes = {}
    for number, fault in wanted.items():
        steps = [step for step in named if fault.active(step)]
        if fault.kind == "slow_endpoint":
            hits = [step for step in steps if named[step] == fault.rank]
        else:
            hits = [step for step in steps if named[step] is None]
        last = acting[steps[-1]] if steps else [fault]
        outcomes[number] = Outcome(
            number=number,
            fault=fault,
            answer="hit" if hits else "miss",
            step=hits[0] if hits else None,
            boundary=None if hits else communication_boundary(model, fault, last, sampled=bool(steps)),
        )
    return outcomes, alarms


def _derive(grid: Grid) -> Groups:
    """Every rank's own groups, derived one rank after the other as each rank does for itself."""
    started = time.process_time()
    peers: set[int] = set()
    cohorts: set[int] = set()
    for rank in grid.members:
        peers.add(grid.peers(rank)[0])
        cohorts.add(grid.lockstep(rank)[0])
    seconds = time.process_time() - started
    return _sizes(grid, peer_groups=len(peers), cohorts=len(cohorts), seconds=seconds)


def _estimate(grid: Grid) -> Groups:
    first = next(iter(grid.members))
    peers, partners = len(grid.peers(first)), len(grid.lockstep(first))
    return _sizes(grid, peer_groups=grid.world // peers, cohorts=grid.world // partners, seconds=0.0)


def _sizes(grid: Grid, *, peer_groups: int, cohorts: int, seconds: float) -> Groups:
    first = next(iter(grid.members))
    return Groups(
        peer_groups=peer_groups,
        peers=len(grid.peers(first)),
        cohorts=cohorts,
        partners=len(grid.lockstep(first)),
        seconds=seconds,
    )


def _cost(model: SimModel, lockstep: bool) -> Cost:
    classes = [*model.classes(0), *([] if model.shard_peers else ["state"])]
    surfaces = sum(len(surfaces_of(name, lockstep=lockstep)) for name in classes)
    evidence = 8 * ROW_WORDS * len(classes)
    joining = STATEMENT_WORDS + GROUP_WORDS + STANDING_WORDS + VIEW_WORDS * len(classes) if lockstep else 0
    return Cost(
        messages=4 if lockstep else 2,
        bytes=8 * (READY_WORDS + GROUP_WORDS + joining) + evidence,
        bytes_per_surface=evidence / surfaces,
    )
