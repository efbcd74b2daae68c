"""Readiness where replays communicate: partners in lockstep state theirs first, and peers then that of all partners.

The ranks of such a job form a table: partners stand in rows, peers in columns. The first all-gather, among partners,
carries a statement of every rank's contract; what they come to, the row's *standing*, goes along with the contract in
the second, among peers. A standing holds words over the partners' contracts, so standings that are equal in one column
are equal in each: all ranks of the table decide alike after two messages, and no replay waits for one that stays out.
Words over the partners' sizes go along, which may differ from row to row: partners with data of their own thereby know
alike in which sizes the source's row has the replays run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import reduce
from operator import and_

from scout_core.consensus.readiness import (
    COMPARED_GROUPS,
    LAYOUT_VERSION,
    RECIPE_CLASSES,
    RankContract,
    Readiness,
    ReadinessVerdict,
    Reason,
    RecipeContract,
    differs,
    name_ranks,
    signed,
)
from scout_core.consensus.structure import structure_signature

_HEADER_WORDS = 5
STATEMENT_WORDS = _HEADER_WORDS + 2 * len(RECIPE_CLASSES)
STANDING_WORDS = 2 + 2 * len(RECIPE_CLASSES)
GROUP_WORDS = 2 * COMPARED_GROUPS
_AT_ONE_STEP, _GROUPS_AGREE, _FIRST_CLASS = 1, 2, 4


def judge_groups(rows: Sequence[Sequence[int]], ranks: Sequence[int]) -> Reason | None:
    """The first process group whose members among `ranks` issued different calls, or None. Pure.

    `rows[i]` are the `GROUP_WORDS` of rank `ranks[i]`: pairs of a group's key and a word over the calls issued on it. A
    rank that does not know a group is no member of it, or knows too many to compare them all.
    """
    said: dict[int, dict[int, int]] = {}
    for rank, row in zip(ranks, rows, strict=True):
        for key, digest in zip(row[::2], row[1::2], strict=True):
            if key:
                said.setdefault(key, {})[rank] = digest
    for digests in said.values():
        if len(set(digests.values())) > 1:
            return differs("check", "collective_digest", list(digests.values()), list(digests))
    return None


def statement(contract: RankContract) -> list[int]:
    """What a rank tells its partners of its contract, as `STATEMENT_WORDS` words: what must be alike in a column, and
    what need not be, the sizes."""
    ready, words, sizes = 0, [], []
    for position, name in enumerate(RECIPE_CLASSES):
        slot = contract.recipes.get(name, RecipeContract())
        ready += (slot.readiness == Readiness.READY) << position
        words.append(structure_signature((slot.identity, slot.capture_step, slot.structure)))
        sizes.append(structure_signature((slot.structure, slot.shape)))
    header = (LAYOUT_VERSION, contract.step, contract.check_index, contract.collective_digest, ready)
    return [signed(word) for word in (*header, *words, *sizes)]


def standing_of(said: Sequence[Sequence[int]], groups: Sequence[Sequence[int]], ranks: Sequence[int]) -> list[int]:
    """What the statements and group words of a row of partners come to, as `STANDING_WORDS` words. Pure."""
    *placed, digests, ready = zip(*(row[:_HEADER_WORDS] for row in said), strict=True)
    flags = all(len(set(column)) == 1 for column in placed) * _AT_ONE_STEP
    flags += (judge_groups(groups, ranks) is None) * _GROUPS_AGREE
    flags += reduce(and_, ready) * _FIRST_CLASS
    columns = zip(*(row[_HEADER_WORDS:] for row in said), strict=True)
    return [flags, *(signed(structure_signature(column)) for column in (digests, *columns))]


def join_standings(own: ReadinessVerdict, standings: Sequence[Sequence[int]], ranks: Sequence[int]) -> ReadinessVerdict:
    """What may run on the whole table: what every row is ready for in the same way. Pure; equal on all its ranks.

    `own` is the verdict on this rank's column, `standings[i]` that of the row of its peer `ranks[i]`.
    """
    apart = tuple(rank for rank, row in zip(ranks, standings, strict=True) if not row[0] & _AT_ONE_STEP)
    if apart:
        reason = _reason("check", "step", apart, "not at the same step or check")
        kept = tuple(one for one in own.reasons if not one.field.endswith("_digest"))
        return ReadinessVerdict(runnable=(), reasons=(*kept, reason), seeds=own.seeds)
    if any(one.recipe == "check" and not one.field.endswith("_digest") for one in own.reasons):
        return own  # whole rows are at other steps, so every column has seen it
    apart = tuple(rank for rank, row in zip(ranks, standings, strict=True) if not row[0] & _GROUPS_AGREE)
    apart = apart or _minority([row[1] for row in standings], ranks)
    if apart:
        reason = _reason("check", "collective_digest", apart, "whose collectives since the last check differ")
        told = any(one.field == "collective_digest" for one in own.reasons)
        return ReadinessVerdict(runnable=(), reasons=own.reasons if told else (*own.reasons, reason), seeds=own.seeds)
    runnable, reasons = [], list(own.reasons)
    sizes: dict[str, Sequence[int]] = {}
    for name in own.runnable:
        place = RECIPE_CLASSES.index(name)
        apart = tuple(r for r, row in zip(ranks, standings, strict=True) if not row[0] & _FIRST_CLASS << place)
        apart = apart or _minority([row[2 + place] for row in standings], ranks)
        if apart:
            reasons.append(_reason(name, "partner", apart, "they would have to run it in lockstep and cannot"))
        else:
            runnable.append(name)
            sizes[name] = [row[2 + len(RECIPE_CLASSES) + place] for row in standings]
    return ReadinessVerdict(runnable=tuple(runnable), reasons=tuple(reasons), seeds=own.seeds, sizes=sizes)


def _minority(words: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
    """Ranks whose word is not that of a strict majority; all of them if there is none, nobody if all are equal."""
    usual, votes = Counter(words).most_common(1)[0]
    if votes * 2 <= len(words):
        return tuple(ranks)
    return tuple(rank for rank, word in zip(ranks, words, strict=True) if word != usual)


def _reason(recipe: str, field: str, apart: tuple[int, ...], what: str) -> Reason:
    return Reason(recipe=recipe, field=field, ranks=apart, message=f"{recipe}: partners of {name_ranks(apart)}: {what}")
