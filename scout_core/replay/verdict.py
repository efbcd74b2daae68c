"""From the gathered evidence of one recipe to a verdict. Pure: no process group, clock, file or tensor.

Three rules keep blame honest. A rank is attributed by majority only when every execution of every peer repeated itself,
so that chance cannot look like corruption. A rank that does not repeat itself while *every* other peer does, and agrees
with the others, is attributed by its own contradiction (`basis="self"`), which needs no majority and holds between two.
And nobody is blamed for the result of an execution before the others have repeated themselves `PROOF_EXECUTIONS` times,
in this check or in earlier ones: somebody is always the first on whom a rare nondeterminism shows.
As soon as two peers fail to repeat themselves the operation is nondeterministic and blames nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Literal

from scout_core.consensus.c3 import C3Result, C3Status, classify_exact
from scout_core.consensus.readiness import name_ranks
from scout_core.replay.evidence import COLLECTIVE_INPUT, MARKS, Observation, surfaces_of

PROOF_EXECUTIONS = 150
"""Executions of the other peers, without one that varied, before the result of an execution is blamed on a rank.

An operation that varies in a share q of its calls passes them with probability (1 - q)^150: 5e-4 for 5%, 22% for 1%.
"""

EXECUTED = frozenset({COLLECTIVE_INPUT, "output", "input_gradient", "parameter_gradient", "updated_state"})
"""Surfaces that an execution computes. The others are compared as they stand before it; chance has no part in them."""

EXECUTION = 8
"""The first moment of an execution; moments before it are the places of surfaces that only a rank itself holds."""
_GRADIENTS = EXECUTION + MARKS + 1
_NEVER = _GRADIENTS + 1

Persistence = Literal["persistent", "intermittent"]
Basis = Literal["majority", "self", "reference", "none"]


@dataclass(frozen=True, kw_only=True, order=True)
class Suspect:
    """A peer whose evidence stands apart, and the moment of the replay from which on it did.

    Moments count alike on all ranks that work in lockstep: what stands before the execution, then the inputs of the
    collectives of forward, the output, the inputs of the collectives of backward, the gradients.
    """

    position: int
    moment: int


@dataclass(frozen=True, kw_only=True)
class RecipeVerdict:
    """What the peers' evidence says of one recipe.

    `surfaces` has a C3 result per compared surface. `more` asks for that many further executions before a verdict;
    everything else is then provisional. `qualified` is True once every peer repeated itself bit for bit. `repeats` is
    how many executions of peers that are not blamed repeated themselves. `apart` holds the positions that `reason`
    speaks of, and `raised` says that the replay raised on them.
    `suspects` are the peers outside a strict majority, blamed or not, also while a verdict is provisional.
    `reference` holds, per peer, the deviation from a reference over its bound, where two peers were settled by one.
    """

    recipe_id: str
    status: C3Status
    surfaces: Mapping[str, C3Result] = field(default_factory=dict)
    bitmap: tuple[bool, ...] = ()
    basis: Basis = "none"
    persistence: Persistence | None = None
    reason: str | None = None
    qualified: bool = False
    nondeterministic: bool = False
    more: int = 0
    repeats: int = 0
    apart: tuple[int, ...] = ()
    raised: bool = False
    suspects: tuple[Suspect, ...] = ()
    reference: tuple[float, ...] = ()

    @property
    def first_surface(self) -> str | None:
        """The earliest surface, in causal order, that is attributed; or that disagrees at all, if none is."""
        for name, result in self.surfaces.items():
            if result.status is C3Status.ATTRIBUTED:
                return name
        return next((name for name, result in self.surfaces.items() if result.status is C3Status.INCONCLUSIVE), None)


@dataclass(frozen=True, kw_only=True)
class _Case:
    """The evidence of one recipe and what earlier checks left to know."""

    recipe_id: str
    names: tuple[str, ...]
    executions: Sequence[Sequence[Observation]]
    ranks: Sequence[int]
    qualified: bool
    earlier_offenders: frozenset[int]
    earlier_repeats: int

    @property
    def peers(self) -> int:
        return len(self.executions[0])

    @property
    def repeats(self) -> int:
        return (self.peers - 1) * len(self.executions)

    @property
    def lacking(self) -> int:
        """Further executions until the others have repeated themselves often enough to testify."""
        return -(-max(PROOF_EXECUTIONS - self.earlier_repeats - self.repeats, 0) // (self.peers - 1))

    def who(self, positions: Iterable[int]) -> str:
        return name_ranks([self.ranks[p] for p in positions])


def judge_recipe(
    recipe_id: str,
    recipe_class: str,
    executions: Sequence[Sequence[Observation]],
    *,
    qualified: bool,
    earlier_offenders: frozenset[int] = frozenset(),
    earlier_repeats: int = 0,
    ranks: Sequence[int] | None = None,
    lockstep: bool = False,
) -> RecipeVerdict:
    """Judge one recipe from `executions[k][p]`, the evidence of the peer at position p in its k-th execution.

    `qualified` says whether the recipe has repeated itself on every peer before, `earlier_repeats` in how many
    executions of earlier checks (the sum of their verdicts' `repeats`). `earlier_offenders` are positions that once
    failed to repeat themselves here: when another one does, the operation is nondeterministic, not two devices bad.
    `ranks` are the peers' global ranks, for the texts; `lockstep` says that they have partners and collective inputs.
    """
    case = _Case(
        recipe_id=recipe_id,
        names=surfaces_of(recipe_class, lockstep=lockstep),
        executions=executions,
        ranks=range(len(executions[0])) if ranks is None else ranks,
        qualified=qualified,
        earlier_offenders=earlier_offenders,
        earlier_repeats=earlier_repeats,
    )
    verdict = _judge(case)
    return replace(verdict, suspects=_suspects(case)) if verdict.surfaces and not verdict.raised else verdict


def _judge(case: _Case) -> RecipeVerdict:
    recipe_id, executions = case.recipe_id, case.executions
    raised = tuple(p for p in range(case.peers) if any(run[p].flags.failed for run in executions))
    if raised:
        return _raised(case, raised)
    surfaces = _classify(case.names, executions[0])
    if case.peers < 2:
        text = f"{recipe_id}: this rank has no peer to compare with"
        return _inconclusive(case, surfaces, text)
    if len(executions) == 1:
        agree = all(result.status is C3Status.AGREE for result in surfaces.values())
        return RecipeVerdict(
            recipe_id=recipe_id,
            status=C3Status.AGREE if agree else C3Status.INCONCLUSIVE,
            surfaces=surfaces,
            qualified=case.qualified,
            more=0 if agree else 1,
            repeats=case.repeats if agree else 0,
        )
    varied = _varied(executions)
    if not varied:
        return _all_repeat(case, surfaces)
    if len(varied) == 1 and not _warned(executions):
        return _one_varies(case, varied[0])
    return _nondeterministic(case, surfaces, varied)


def _suspects(case: _Case) -> tuple[Suspect, ...]:
    """Peers whose evidence ever differs from what a strict majority of the peers gave in the first execution.

    Where there is no majority, every peer, from the first moment at which any two differ. Empty when all agree.
    """
    first = case.executions[0]
    usual, votes = Counter(peer.words for peer in first).most_common(1)[0]
    model = next(peer for peer in first if peer.words == usual)
    apart: dict[int, int] = {}
    for run in case.executions:
        for p, peer in enumerate(run):
            if peer.words != usual:
                apart[p] = min(_moment(case.names, peer, model), apart.get(p, _NEVER))
    if 2 * votes <= case.peers:
        earliest = min(apart.values())
        apart = dict.fromkeys(range(case.peers), earliest)
    return tuple(Suspect(position=p, moment=moment) for p, moment in sorted(apart.items()))


def _moment(names: Sequence[str], peer: Observation, model: Observation) -> int:
    """The first moment at which a peer's evidence differs from that of the majority (see `Suspect`)."""
    forward = model.forward_marks
    marks = [k for k, (a, b) in enumerate(zip(peer.marks, model.marks, strict=True)) if a != b]
    moments = [EXECUTION + k + (k >= forward) for k in marks]
    for name, a, b in zip(names, peer.words, model.words, strict=True):
        if a != b and name == "output":
            moments.append(EXECUTION + forward)
        elif a != b and name != COLLECTIVE_INPUT:
            moments.append(_GRADIENTS if name in EXECUTED else names.index(name))
    return min(moments)


def _raised(case: _Case, raised: tuple[int, ...]) -> RecipeVerdict:
    surfaces = _classify(case.names, case.executions[0], exclude=frozenset(raised))
    text = f"{case.recipe_id}: the replay raised on {case.who(raised)} (see the log there)"
    return replace(_inconclusive(case, surfaces, text, raised), raised=True)


def _all_repeat(case: _Case, surfaces: Mapping[str, C3Result]) -> RecipeVerdict:
    """Every peer repeated itself: differences between peers are real, and a strict majority says whose."""
    divergent = {name: result for name, result in surfaces.items() if result.status is not C3Status.AGREE}
    if not divergent:
        return RecipeVerdict(
            recipe_id=case.recipe_id, status=C3Status.AGREE, surfaces=surfaces, qualified=True, repeats=case.repeats
        )
    if case.lacking and not _explained(divergent):
        # Lockstep partners may know where it began and need none of these executions: what was seen counts as it is.
        return replace(_inconclusive(case, surfaces, None), more=case.lacking, qualified=True)
    bitmap = _union([result.bitmap for result in divergent.values()])
    attributed = all(r.status is C3Status.ATTRIBUTED for r in divergent.values()) and sum(bitmap) * 2 < len(bitmap)
    text = None if attributed else f"{case.recipe_id}: {_why_unattributed(list(divergent.values()))}"
    return RecipeVerdict(
        recipe_id=case.recipe_id,
        status=C3Status.ATTRIBUTED if attributed else C3Status.INCONCLUSIVE,
        surfaces=surfaces,
        bitmap=bitmap if attributed else (False,) * len(bitmap),
        basis="majority" if attributed else "none",
        persistence="persistent",
        reason=text,
        qualified=True,
        repeats=case.repeats,
    )


def _explained(divergent: Mapping[str, C3Result]) -> bool:
    """Whether what stood before the execution differs on every peer whose results do: then chance made none of it."""
    before = _union([(False,), *(_apart(r) for name, r in divergent.items() if name not in EXECUTED)])
    after = _union([(False,), *(_apart(r) for name, r in divergent.items() if name in EXECUTED)])
    return all(p < len(before) and before[p] for p, apart in enumerate(after) if apart)


def _apart(result: C3Result) -> tuple[bool, ...]:
    """The blamed peers; every peer where no majority blames any."""
    return result.bitmap if any(result.bitmap) else (True,) * len(result.bitmap)


def _one_varies(case: _Case, suspect: int) -> RecipeVerdict:
    """One peer contradicts itself; the others repeat themselves, which they must also do with one another."""
    executions = case.executions
    surfaces = _classify(case.names, executions[_most_divergent(executions, suspect)])
    others = {run[p].words for run in executions for p in range(case.peers) if p != suspect}
    who = case.who([suspect])
    if len(others) > 1:
        text = f"{case.recipe_id}: {who} does not repeat itself and the others do not agree either"
        return _inconclusive(case, surfaces, text, (suspect,))
    if case.earlier_offenders - {suspect}:
        return _nondeterministic(case, surfaces, [suspect, *case.earlier_offenders])
    if case.lacking:
        return replace(_inconclusive(case, surfaces, None), more=case.lacking)
    if not case.qualified and len({run[suspect].words for run in executions[1:]}) < 2:
        text = f"{case.recipe_id}: the very first execution on {who} differed from all later ones, as warming up can"
        return _inconclusive(case, surfaces, text, (suspect,))
    expected = next(iter(others))
    recurs = all(run[suspect].words != expected for run in executions)
    bitmap = tuple(p == suspect for p in range(case.peers))
    return RecipeVerdict(
        recipe_id=case.recipe_id,
        status=C3Status.ATTRIBUTED,
        surfaces={name: _blame(result, bitmap) for name, result in surfaces.items()},
        bitmap=bitmap,
        basis="self",
        persistence="persistent" if recurs else "intermittent",
        qualified=case.qualified,
        repeats=case.repeats,
    )


def _inconclusive(
    case: _Case, surfaces: Mapping[str, C3Result], reason: str | None, apart: tuple[int, ...] = ()
) -> RecipeVerdict:
    return RecipeVerdict(
        recipe_id=case.recipe_id,
        status=C3Status.INCONCLUSIVE,
        surfaces=surfaces,
        reason=reason,
        qualified=case.qualified,
        apart=apart,
    )


def _nondeterministic(case: _Case, surfaces: Mapping[str, C3Result], varied: Sequence[int]) -> RecipeVerdict:
    known = "an operation without a deterministic kernel; " if _warned(case.executions) else ""
    who = case.who(sorted(set(varied)))
    text = f"{case.recipe_id}: {known}the replay does not repeat itself bit for bit on {who}"
    return replace(_inconclusive(case, surfaces, text), qualified=False, nondeterministic=True)


def _classify(
    names: Sequence[str], seen: Sequence[Observation], exclude: frozenset[int] = frozenset()
) -> dict[str, C3Result]:
    return {
        name: classify_exact([None if p in exclude else peer.words[i] for p, peer in enumerate(seen)])
        for i, name in enumerate(names)
    }


def _varied(executions: Sequence[Sequence[Observation]]) -> list[int]:
    return [p for p, seen in enumerate(executions[0]) if any(run[p].words != seen.words for run in executions[1:])]


def _warned(executions: Sequence[Sequence[Observation]]) -> bool:
    return any(peer.flags.nondeterministic_op for run in executions for peer in run)


def _most_divergent(executions: Sequence[Sequence[Observation]], suspect: int) -> int:
    """The execution in which the suspect's evidence differs from its neighbour's, so that the surfaces show it."""
    neighbour = 1 if suspect == 0 else 0
    return next((k for k, run in enumerate(executions) if run[suspect].words != run[neighbour].words), 0)


def _blame(result: C3Result, bitmap: tuple[bool, ...]) -> C3Result:
    if result.status is C3Status.AGREE:
        return result
    return C3Result(status=C3Status.ATTRIBUTED, bitmap=bitmap, evidence=result.evidence)


def _union(bitmaps: Sequence[tuple[bool, ...]]) -> tuple[bool, ...]:
    return tuple(any(column) for column in zip_longest(*bitmaps, fillvalue=False))


def _why_unattributed(divergent: Sequence[C3Result]) -> str:
    peers = len(divergent[0].evidence)
    if all(len(set(result.evidence)) == peers for result in divergent) and peers > 2:
        return "all peers differ from one another, which software explains and no single device does"
    if peers == 2:
        return "two peers disagree and nothing tells which is right; a third peer or a reference would (tie_break)"
    return "the peers disagree without a strict majority"
