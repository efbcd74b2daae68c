"""From the gathered evidence of one recipe to a verdict. Pure: no process group, clock, file or tensor.

Two rules keep blame honest. A rank is attributed by majority only when every execution of every peer repeated itself,
so that chance cannot look like corruption. A rank that does not repeat itself while *every* other peer does, and agrees
with the others, is attributed by its own contradiction (`basis="self"`), which needs no majority and holds between two.
As soon as two peers fail to repeat themselves the operation is nondeterministic and blames nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from scout_core.consensus.c3 import C3Result, C3Status, classify_exact
from scout_core.replay.evidence import SURFACES, Observation

SELF_ROUNDS = 4
"""Further executions before a rank is named for not repeating itself on a module that is not yet qualified."""

Persistence = Literal["persistent", "intermittent"]
Basis = Literal["majority", "self", "none"]


@dataclass(frozen=True, kw_only=True)
class RecipeVerdict:
    """What the peers' evidence says of one recipe.

    `surfaces` has a C3 result per compared surface. `more` asks for that many further executions before a verdict;
    everything else is then provisional. `qualified` is True once every peer repeated itself bit for bit.
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

    @property
    def first_surface(self) -> str | None:
        """The earliest surface, in causal order, that is attributed; or that disagrees at all, if none is."""
        for name, result in self.surfaces.items():
            if result.status is C3Status.ATTRIBUTED:
                return name
        return next((name for name, result in self.surfaces.items() if result.status is C3Status.INCONCLUSIVE), None)


def judge_recipe(
    recipe_id: str,
    recipe_class: str,
    executions: Sequence[Sequence[Observation]],
    *,
    qualified: bool,
    earlier_offenders: frozenset[int] = frozenset(),
) -> RecipeVerdict:
    """Judge one recipe from `executions[k][p]`, the evidence of the peer at position p in its k-th execution.

    `qualified` says whether the recipe has repeated itself on every peer before. `earlier_offenders` are positions
    that once failed to repeat themselves here: when another does too, the operation is at fault, not two devices.
    """
    names = SURFACES[recipe_class]
    failed = [p for p, seen in enumerate(executions[0]) if any(run[p].flags.failed for run in executions)]
    if failed:
        surfaces = _classify(names, executions[0], exclude=frozenset(failed))
        text = f"{recipe_id}: the replay raised on peer {', '.join(map(str, failed))}"
        return RecipeVerdict(
            recipe_id=recipe_id, status=C3Status.INCONCLUSIVE, surfaces=surfaces, reason=text, qualified=qualified
        )
    surfaces = _classify(names, executions[0])
    agree = all(result.status is C3Status.AGREE for result in surfaces.values())
    if len(executions[0]) < 2:
        return RecipeVerdict(
            recipe_id=recipe_id,
            status=C3Status.INCONCLUSIVE,
            surfaces=surfaces,
            reason=f"{recipe_id}: this rank has no peer to compare with",
            qualified=qualified,
        )
    if len(executions) == 1:
        status = C3Status.AGREE if agree else C3Status.INCONCLUSIVE
        return RecipeVerdict(
            recipe_id=recipe_id, status=status, surfaces=surfaces, qualified=qualified, more=0 if agree else 1
        )
    varied = _varied(executions)
    if not varied:
        return _all_repeat(recipe_id, surfaces)
    if len(varied) == 1 and not _warned(executions):
        return _one_varies(recipe_id, names, executions, varied[0], qualified, earlier_offenders)
    return _nondeterministic(recipe_id, surfaces, varied, executions)


def _all_repeat(recipe_id: str, surfaces: Mapping[str, C3Result]) -> RecipeVerdict:
    """Every peer repeated itself: differences between peers are real, and a strict majority says whose."""
    divergent = [result for result in surfaces.values() if result.status is not C3Status.AGREE]
    if not divergent:
        return RecipeVerdict(recipe_id=recipe_id, status=C3Status.AGREE, surfaces=surfaces, qualified=True)
    bitmap = _union([result.bitmap for result in divergent])
    attributed = all(result.status is C3Status.ATTRIBUTED for result in divergent) and sum(bitmap) * 2 < len(bitmap)
    return RecipeVerdict(
        recipe_id=recipe_id,
        status=C3Status.ATTRIBUTED if attributed else C3Status.INCONCLUSIVE,
        surfaces=surfaces,
        bitmap=bitmap if attributed else (False,) * len(bitmap),
        basis="majority" if attributed else "none",
        persistence="persistent",
        reason=None if attributed else f"{recipe_id}: {_why_unattributed(divergent)}",
        qualified=True,
    )


def _one_varies(
    recipe_id: str,
    names: Sequence[str],
    executions: Sequence[Sequence[Observation]],
    suspect: int,
    qualified: bool,
    earlier_offenders: frozenset[int],
) -> RecipeVerdict:
    """One peer contradicts itself; the others repeat themselves, which they must also do with one another."""
    peers = len(executions[0])
    surfaces = _classify(names, executions[_most_divergent(executions, suspect)])
    others = {run[p].words for run in executions for p in range(peers) if p != suspect}
    if len(others) > 1:
        text = f"{recipe_id}: peer {suspect} does not repeat itself and the others do not agree either"
        return RecipeVerdict(
            recipe_id=recipe_id, status=C3Status.INCONCLUSIVE, surfaces=surfaces, reason=text, qualified=qualified
        )
    if earlier_offenders - {suspect}:
        return _nondeterministic(recipe_id, surfaces, [suspect, *earlier_offenders], executions)
    if not qualified and len(executions) < 2 + SELF_ROUNDS:
        return RecipeVerdict(
            recipe_id=recipe_id, status=C3Status.INCONCLUSIVE, surfaces=surfaces, more=2 + SELF_ROUNDS - len(executions)
        )
    if not qualified and len({run[suspect].words for run in executions[2:]}) < 2:
        text = f"{recipe_id}: peer {suspect} once did not repeat itself before the recipe was qualified"
        return RecipeVerdict(recipe_id=recipe_id, status=C3Status.INCONCLUSIVE, surfaces=surfaces, reason=text)
    expected = next(iter(others))
    recurs = all(run[suspect].words != expected for run in executions)
    bitmap = tuple(p == suspect for p in range(peers))
    return RecipeVerdict(
        recipe_id=recipe_id,
        status=C3Status.ATTRIBUTED,
        surfaces={name: _blame(result, bitmap) for name, result in surfaces.items()},
        bitmap=bitmap,
        basis="self",
        persistence="persistent" if recurs else "intermittent",
        qualified=qualified,
    )


def _nondeterministic(
    recipe_id: str, surfaces: Mapping[str, C3Result], varied: Sequence[int], executions: Sequence[Sequence[Observation]]
) -> RecipeVerdict:
    known = "an operation without a deterministic kernel; " if _warned(executions) else ""
    positions = ", ".join(map(str, sorted(set(varied))))
    return RecipeVerdict(
        recipe_id=recipe_id,
        status=C3Status.INCONCLUSIVE,
        surfaces=surfaces,
        reason=f"{recipe_id}: {known}the replay does not repeat itself bit for bit on peers {positions}",
        nondeterministic=True,
    )


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
    return tuple(any(column) for column in zip(*bitmaps, strict=True))


def _why_unattributed(divergent: Sequence[C3Result]) -> str:
    peers = len(divergent[0].evidence)
    if all(len(set(result.evidence)) == peers for result in divergent) and peers > 2:
        return "all peers differ from one another, which software explains and no single device does"
    if peers == 2:
        return "two peers disagree and nothing tells which is right; a third peer or a reference would"
    return "the peers disagree without a strict majority"
