"""The readiness contract: what every peer states before any collective of a check may run.

Each rank fills one fixed-size row of 64-bit words; the rows of all peers are gathered once. `judge_readiness` is a
pure function of the gathered rows, so every peer reaches the same decision about what runs and why the rest does not.
The row has a slot per recipe class whatever is due, so ranks that disagree about the schedule still gather rows of
one size.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

RECIPE_CLASSES = ("embedding", "hidden", "output", "optimizer", "state", "owner_update", "at_rest")
"""Slots of the row: the contract's four classes, the rotating comparison of live state, and for state that is held once
the owner's update and its memory at rest."""

LAYOUT_VERSION = 3
COMPARED_GROUPS = 8
"""Process groups of a rank whose collectives are compared one by one in a check."""
_WORD = 1 << 64


class Readiness(IntEnum):
    """What a rank says of one recipe class."""

    NOT_DUE = 0
    READY = 1
    NO_CAPTURE = 2
    FAILED = 3
    UNAVAILABLE = 4


@dataclass(frozen=True, kw_only=True)
class RecipeContract:
    """One rank's word on one recipe class.

    `identity` is the modules or slice to replay, `structure` the nesting, dtypes and non-tensor arguments of the
    invocation, `shape` its tensor sizes alone. All are 64-bit signatures; `capture_step` is a step number.
    """

    readiness: Readiness = Readiness.NOT_DUE
    identity: int = 0
    capture_step: int = 0
    structure: int = 0
    shape: int = 0


@dataclass(frozen=True, kw_only=True)
class RankContract:
    """One rank's whole row. `seed` is what a source offers to seed the replay's random numbers with."""

    step: int
    check_index: int
    collective_digest: int = 0
    seed: int = 0
    recipes: Mapping[str, RecipeContract]


DIGEST_FIELDS = frozenset({"collective_digest", "group_digest"})
"""What differs where ranks took part in other collectives since the last check: some of them paired wrongly."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Why a recipe did not lead to an exact verdict: the field that differs and the ranks that stand apart."""

    recipe: str
    field: str
    ranks: tuple[int, ...]
    message: str

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, kw_only=True)
class ReadinessVerdict:
    """`runnable` recipe classes run on every peer; `reasons` say why others do not, or why a run cannot certify.

    A class that is runnable and has a reason is replayed in the source's shape although its peers saw other shapes.
    `sizes` has, by class, a word per peer over the sizes in which it and all its lockstep partners would have it
    replayed.
    """

    runnable: tuple[str, ...]
    reasons: tuple[Reason, ...]
    seeds: tuple[int, ...]
    sizes: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)


_HEADER = ("version", "step", "check_index", "collective_digest", "seed")
_SLOT = ("readiness", "identity", "capture_step", "structure", "shape")
ROW_WORDS = len(_HEADER) + len(_SLOT) * len(RECIPE_CLASSES)


def encode(contract: RankContract) -> list[int]:
    """The row as `ROW_WORDS` signed 64-bit integers."""
    words = [LAYOUT_VERSION, contract.step, contract.check_index, contract.collective_digest, contract.seed]
    for name in RECIPE_CLASSES:
        slot = contract.recipes.get(name, RecipeContract())
        words += [int(getattr(slot, field)) for field in _SLOT]
    return [signed(word) for word in words]


def judge_readiness(rows: Sequence[Sequence[int]], ranks: Sequence[int]) -> ReadinessVerdict:
    """Decide from all peers' rows what may run. Pure; `rows[i]` is the row of global rank `ranks[i]`.

    Nothing runs when the peers disagree about layout, step, check or issued collectives. A recipe class runs when
    every peer is ready with the same identity, capture step and structure.
    """
    columns = list(zip(*rows, strict=True))
    for index, field in enumerate(_HEADER[:-1]):
        if len(set(columns[index])) > 1:
            reason = differs("check", field, columns[index], ranks)
            return ReadinessVerdict(runnable=(), reasons=(reason,), seeds=())
    runnable: list[str] = []
    reasons: list[Reason] = []
    sizes: dict[str, Sequence[int]] = {}
    for position, name in enumerate(RECIPE_CLASSES):
        start = len(_HEADER) + position * len(_SLOT)
        slot = dict(zip(_SLOT, columns[start : start + len(_SLOT)], strict=True))
        found = _judge_slot(name, slot, ranks)
        if found is not None:
            reasons.append(found)
        if all(state == Readiness.READY for state in slot["readiness"]) and (found is None or found.field == "shape"):
            runnable.append(name)
            sizes[name] = slot["shape"]
    seeds = tuple(columns[len(_HEADER) - 1])
    return ReadinessVerdict(runnable=tuple(runnable), reasons=tuple(reasons), seeds=seeds, sizes=sizes)


_STATE_MESSAGES = {
    Readiness.NOT_DUE: "did not schedule it",
    Readiness.NO_CAPTURE: "captured no invocation",
    Readiness.FAILED: "failed while preparing it (see the log of that rank)",
    Readiness.UNAVAILABLE: "cannot replay it (see the log of that rank)",
}


def _judge_slot(name: str, slot: Mapping[str, Sequence[int]], ranks: Sequence[int]) -> Reason | None:
    states = slot["readiness"]
    if all(state == Readiness.NOT_DUE for state in states):
        return None
    for state, text in _STATE_MESSAGES.items():
        apart = tuple(rank for rank, said in zip(ranks, states, strict=True) if said == state)
        if apart:
            who = "every rank" if len(apart) == len(ranks) else name_ranks(apart)
            return Reason(recipe=name, field="readiness", ranks=apart, message=f"{name}: {who} {text}")
    for field in ("identity", "capture_step", "structure", "shape"):
        if len(set(slot[field])) > 1:
            return differs(name, field, slot[field], ranks)
    return None


def differs(recipe: str, field: str, column: Sequence[int], ranks: Sequence[int]) -> Reason:
    """Name the ranks outside a strict majority; without one, name all and give the groups."""
    groups: dict[int, list[int]] = {}
    for rank, value in zip(ranks, column, strict=True):
        groups.setdefault(value, []).append(rank)
    value, votes = Counter(column).most_common(1)[0]
    readable = field in ("step", "check_index", "capture_step", "version")
    if votes * 2 > len(column):
        apart = tuple(rank for rank, said in zip(ranks, column, strict=True) if said != value)
        detail = ", ".join(str(said) for said in sorted({s for s in column if s != value})) if readable else ""
        tail = f" ({detail} against {value})" if readable else ""
        message = f"{recipe}: {field} differs on {name_ranks(apart)}{tail}"
    else:
        apart = tuple(ranks)
        shown = "; ".join(name_ranks(members) for members in groups.values())
        message = f"{recipe}: {field} differs and no majority agrees: {shown}"
    return Reason(recipe=recipe, field=field, ranks=apart, message=message)


def name_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 1, 3`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def signed(word: int) -> int:
    """A 64-bit word as the signed integer of the same bits."""
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word
