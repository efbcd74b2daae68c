"""What an independent reference adds to a dispute (`tie_break="reference"`).

Between two peers it tells which one is wrong. Among more, where a majority has found one apart, it tells a wrong
result from another kernel: libraries that choose kernels by timing may round otherwise on one rank, each time alike.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from scout_core.consensus.c3 import C3Result, C3Status
from scout_core.consensus.readiness import name_ranks
from scout_core.peers import PeerGroup
from scout_core.replay.cohorts import Joined
from scout_core.replay.evidence import EvidenceBatch
from scout_core.replay.guard import attempt
from scout_core.replay.reference import Measured, Obstacle, measure
from scout_core.replay.schedule import Recipe
from scout_core.replay.verdict import EXECUTED, RecipeVerdict
from scout_core.replay.workbench import Workbench

_MIB = 1 << 20
_SAYS = {
    Obstacle.TOO_LARGE: "is larger than tie_break_budget_mib allows",
    Obstacle.RANDOM: "draws random numbers, which the CPU would draw otherwise",
    Obstacle.RAISED: "could not be computed on the CPU in float64 (see the log there)",
    Obstacle.NONFINITE: "has values that are no finite numbers",
    Obstacle.SHARDED: "has parameters or inputs of which a rank holds only a part",
    Obstacle.NO_LIVE_RESULT: "gave no result to compare when it ran once more",
}


@dataclass(frozen=True, kw_only=True)
class Statement:
    """What one peer's comparison with its own reference gave."""

    obstacle: Obstacle
    signature: int
    ratio: float

    def encode(self) -> list[int]:
        """Three signed 64-bit integers."""
        return [int(self.obstacle), self.signature, *struct.unpack("<q", struct.pack("<d", self.ratio))]

    @classmethod
    def decode(cls, row: Sequence[int]) -> Statement:
        obstacle, signature, bits = row
        (ratio,) = struct.unpack("<d", struct.pack("<q", bits))
        return cls(obstacle=Obstacle(obstacle), signature=signature, ratio=ratio)


def disputed(verdict: RecipeVerdict) -> tuple[str, ...]:
    """Surfaces on which a reference has a say: two peers, or a majority and the rest, differ in what they computed.

    Empty when the difference does not last, when anything that stands before the execution differs too, or when the
    recipe varies or raised. Pure.
    """
    apart = tuple(name for name, result in verdict.surfaces.items() if result.status is not C3Status.AGREE)
    closed = verdict.basis == "self" or verdict.nondeterministic or verdict.raised
    if closed or verdict.persistence != "persistent" or not set(apart) <= EXECUTED:
        return ()
    pair = all(len(verdict.surfaces[name].evidence) == 2 for name in apart)
    return apart if pair or verdict.basis == "majority" else ()


def settle(verdict: RecipeVerdict, said: Sequence[Statement], ranks: Sequence[int]) -> RecipeVerdict:
    """The verdict in the light of all peers' references. Pure; equal on all.

    Between two: Attributed with `basis="reference"` when both computed the same reference and exactly one lies outside
    its bound. A majority's verdict stands, unless every peer is inside of one reference: then it was another kernel.
    """
    if verdict.basis == "majority":
        return _another_kernel(verdict, said, ranks)
    blocked = [p for p, statement in enumerate(said) if statement.obstacle is not Obstacle.NONE]
    if blocked:
        why = _SAYS[said[blocked[0]].obstacle]
        return _open(verdict, f"no reference, since it {why} (on {name_ranks([ranks[p] for p in blocked])})")
    if len({statement.signature for statement in said}) > 1:
        return _open(verdict, "their float64 references on the CPU differ too, so neither testifies")
    ratios = tuple(statement.ratio for statement in said)
    outside = tuple(ratio > 1 for ratio in ratios)
    if sum(outside) != 1:
        place = "both outside the" if all(outside) else "too small to matter: both inside the"
        return replace(_open(verdict, f"{place} error bound of a float64 reference"), reference=ratios)
    return replace(
        verdict,
        status=C3Status.ATTRIBUTED,
        surfaces={name: _blamed(result, outside) for name, result in verdict.surfaces.items()},
        bitmap=outside,
        basis="reference",
        persistence="persistent",
        reason=None,
        reference=ratios,
    )


def break_ties(
    bench: Workbench, peers: PeerGroup, recipes: Sequence[Recipe], joined: Mapping[str, Joined], budget_mib: int
) -> dict[str, Joined]:
    """Settle what peers dispute, each by a reference of its own.

    Every peer calls, with the same verdicts: these alone decide whether there is something to settle. One all-gather
    if there is, none otherwise. Where ranks work in lockstep with partners, the verdict only says that it cannot.
    """
    open_ = {r: disputed(joined[r.recipe_id].verdict) for r in recipes}
    open_ = {recipe: surfaces for recipe, surfaces in open_.items() if surfaces}
    result = dict(joined)
    if not open_:
        return result
    if not bench.alone:
        text = "no reference, since it communicates with partners while it runs"
        for key in (r.recipe_id for r in open_ if joined[r.recipe_id].verdict.basis != "majority"):
            result[key] = replace(joined[key], verdict=_open(joined[key].verdict, text))
        return result
    own = [_testify(bench, recipe, surfaces, budget_mib * _MIB) for recipe, surfaces in open_.items()]
    words = [word for statement in own for word in statement.encode()]
    rows = peers.gather(torch.tensor(words, dtype=torch.int64)).tolist()
    for index, recipe in enumerate(open_):
        said = [Statement.decode(row[3 * index : 3 * index + 3]) for row in rows]
        before = joined[recipe.recipe_id]
        result[recipe.recipe_id] = replace(before, verdict=settle(before.verdict, said, peers.ranks))
    return result


def _testify(bench: Workbench, recipe: Recipe, surfaces: Sequence[str], budget_bytes: int) -> Statement:
    """This rank's live result, computed once more, against a reference computed here."""
    batch = EvidenceBatch()
    material = bench.observe(batch, recipe, compute=True)
    batch.resolve()
    if material is None:
        measured = Measured(obstacle=Obstacle.NO_LIVE_RESULT)
    else:
        subject, live = bench.subject(recipe), material.tensors
        outcome = attempt(
            f"computing a reference for {recipe.recipe_id}",
            lambda: measure(subject, live, surfaces, budget_bytes),
        )
        measured = outcome.value or Measured(obstacle=Obstacle.RAISED)
    return Statement(obstacle=measured.obstacle, signature=measured.signature, ratio=measured.ratio)


def _another_kernel(verdict: RecipeVerdict, said: Sequence[Statement], ranks: Sequence[int]) -> RecipeVerdict:
    sound = all(s.obstacle is Obstacle.NONE for s in said) and len({s.signature for s in said}) == 1
    if not sound or any(statement.ratio > 1 for statement in said):
        return verdict
    apart = tuple(p for p, bad in enumerate(verdict.bitmap) if bad)
    nobody = (False,) * len(said)
    who = name_ranks([ranks[p] for p in apart])
    return replace(
        verdict,
        status=C3Status.INCONCLUSIVE,
        surfaces={
            name: result
            if result.status is C3Status.AGREE
            else replace(result, status=C3Status.INCONCLUSIVE, bitmap=nobody)
            for name, result in verdict.surfaces.items()
        },
        bitmap=nobody,
        basis="none",
        persistence=None,
        reason=f"{verdict.recipe_id}: {who} rounds otherwise than its peers, all inside the error bound of a float64 "
        "reference, as another choice of kernel does",
        nondeterministic=True,
        apart=apart,
        reference=tuple(statement.ratio for statement in said),
    )


def _open(verdict: RecipeVerdict, text: str) -> RecipeVerdict:
    return replace(verdict, reason=f"{verdict.recipe_id}: two peers disagree; {text}")


def _blamed(result: C3Result, outside: tuple[bool, ...]) -> C3Result:
    if result.status is C3Status.AGREE:
        return result
    return C3Result(status=C3Status.ATTRIBUTED, bitmap=outside, evidence=result.evidence)
