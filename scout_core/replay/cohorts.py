"""Joining the verdicts of ranks that work in lockstep. Pure: no process group, clock, file or tensor.

Each of these ranks is compared with its own peers, so the ranks form a table: a column per lockstep partner, judged by
itself, and a row per replica, whose members exchange values while they replay. Corruption travels along the row and
makes innocent partners differ from their peers too. But every rank's inputs to the collectives were compared, in order:
the one whose evidence stood apart first had nothing wrong from the others, so it is where the fault began. If several
stood apart from the same moment on, only the row can be named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scout_core.consensus.c3 import C3Result, C3Status
from scout_core.consensus.readiness import name_ranks
from scout_core.replay.verdict import EXECUTION, RecipeVerdict, Suspect

_LISTED = 4
VIEW_WORDS = 4 + _LISTED
"""Words in which a rank tells its partners of one recipe, whatever the number of peers."""


@dataclass(frozen=True, kw_only=True)
class ColumnView:
    """What the partners must know of one column's verdict. All peers of the column hold the same.

    `closer` asks for a closer look. `shared` is a word over state that all partners should hold alike, and `listing`
    one over what it covers; comparable where the listings are equal.
    """

    more: int = 0
    raised: bool = False
    nondeterministic: bool = False
    qualified: bool = False
    closer: bool = False
    diverges: bool = False
    too_many: bool = False
    suspects: tuple[Suspect, ...] = ()
    shared: int = 0
    listing: int = 0

    @classmethod
    def of(cls, verdict: RecipeVerdict, *, shared: int = 0, listing: int = 0) -> ColumnView:
        return cls(
            more=verdict.more,
            raised=verdict.raised,
            nondeterministic=verdict.nondeterministic,
            qualified=verdict.qualified,
            closer=wants_closer_look(verdict),
            diverges=verdict.first_surface is not None,
            too_many=len(verdict.suspects) > _LISTED,
            suspects=verdict.suspects[:_LISTED],
            shared=shared,
            listing=listing,
        )

    def encode(self) -> list[int]:
        """`VIEW_WORDS` signed 64-bit integers."""
        flags = sum(bit << i for i, bit in enumerate(getattr(self, name) for name in _FLAGS))
        packed = [(s.position + 1) << 16 | s.moment for s in self.suspects]
        return [self.more, flags, self.shared, self.listing, *packed, *[0] * (_LISTED - len(packed))]

    @classmethod
    def decode(cls, row: Sequence[int]) -> ColumnView:
        more, flags, shared, listing, *packed = row
        return cls(
            more=more,
            shared=shared,
            listing=listing,
            suspects=tuple(Suspect(position=(p >> 16) - 1, moment=p & 0xFFFF) for p in packed if p),
            **{name: bool(flags >> i & 1) for i, name in enumerate(_FLAGS)},
        )


_FLAGS = ("raised", "nondeterministic", "qualified", "closer", "diverges", "too_many")


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A verdict in the light of the partners' verdicts. `more` and `closer` are the same for all of them, so that they
    go on in lockstep. `shared_differs`: the state that partners should hold alike is not, in every replica."""

    verdict: RecipeVerdict
    more: int
    closer: bool
    shared_differs: bool = False


def wants_closer_look(verdict: RecipeVerdict) -> bool:
    """Whether tensors of the recipe should be compared one by one."""
    return verdict.first_surface is not None and not verdict.nondeterministic and not verdict.raised


def join(
    own: RecipeVerdict, views: Sequence[ColumnView], column: int, table: Sequence[Sequence[int]], *, travels: bool
) -> Joined:
    """`own`, the verdict of column `column`, joined with those of all columns.

    `views[i]` is of the i-th partner's column, `table[i][p]` the global rank at its position p. `travels` says that the
    recipe communicates, so that one rank's error shows on its partners.
    """
    if len(views) < 2:
        return Joined(verdict=own, more=own.more, closer=wants_closer_look(own))
    shared = _shared(own, views, column, table)
    if not travels:
        verdict = shared or own
        closer = any(view.closer for view in views) or shared is not None
        return Joined(
            verdict=verdict, more=max(v.more for v in views), closer=closer, shared_differs=shared is not None
        )
    earliest = _earliest(views)
    more = max((view.more for view in views if not _settled(view, earliest)), default=0)
    verdict = replace(own, qualified=all(view.qualified for view in views))
    if any(view.raised for view in views) and not own.raised:
        ranks = [table[i][0] for i, view in enumerate(views) if view.raised]
        text = f"{own.recipe_id}: the replay raised on a partner or peer of {name_ranks(ranks)}, so it gave no evidence"
        verdict = replace(_unblamed(verdict, text), raised=True)
    elif any(view.nondeterministic for view in views) and not own.nondeterministic:
        text = f"{own.recipe_id}: its replay on lockstep partners does not repeat itself bit for bit"
        verdict = replace(_unblamed(verdict, text), nondeterministic=True, qualified=False)
    elif not more and own.suspects:
        verdict = _blame(verdict, views, column, table)
    return Joined(verdict=verdict, more=more, closer=any(view.closer for view in views) and not more)


def _earliest(views: Sequence[ColumnView]) -> dict[int, int]:
    """By replica, the first moment at which it stood apart in a column that needs no further executions."""
    found: dict[int, int] = {}
    for suspect in (suspect for view in views if not view.more for suspect in view.suspects):
        found[suspect.position] = min(suspect.moment, found.get(suspect.position, suspect.moment))
    return found


def _settled(view: ColumnView, earliest: Mapping[int, int]) -> bool:
    """Whether a column needs no further executions: it asks for none, or what differs in it began in one that does."""
    if not view.more:
        return True
    if view.too_many or not view.suspects:
        return False
    return all(earliest.get(suspect.position, suspect.moment) < suspect.moment for suspect in view.suspects)


def _earlier(suspect: Suspect, column: int, views: Sequence[ColumnView]) -> list[int]:
    """Columns in which the same replica stood apart before it did in this one."""
    return [
        i
        for i, view in enumerate(views)
        if i != column and any(s.position == suspect.position and s.moment < suspect.moment for s in view.suspects)
    ]


def _alike(suspect: Suspect, column: int, views: Sequence[ColumnView]) -> list[int]:
    """Columns in which the same replica stood apart from the same moment on, when values may already have travelled."""
    if suspect.moment < EXECUTION:
        return []
    return [i for i, view in enumerate(views) if i != column and suspect in view.suspects]


def _blame(
    own: RecipeVerdict, views: Sequence[ColumnView], column: int, table: Sequence[Sequence[int]]
) -> RecipeVerdict:
    """Keep the blame only for ranks on which the fault began."""
    victims = {s.position: _earlier(s, column, views) for s in own.suspects if _earlier(s, column, views)}
    tied = {s.position: _alike(s, column, views) for s in own.suspects if s.position not in victims}
    tied = {position: columns for position, columns in tied.items() if columns}
    if not victims and not tied:
        return own
    kept = tuple(bad and p not in victims and p not in tied for p, bad in enumerate(own.bitmap))
    if any(kept):
        surfaces = {name: _reduced(result, kept) for name, result in own.surfaces.items()}
        return replace(own, bitmap=kept, surfaces=surfaces)
    undecided = len(own.suspects) == len(table[column])
    if tied:
        position, columns = next(iter(tied.items()))
        speaks = column < min(columns)  # one of them for all
        row = sorted(table[i][p] for i in (column, *columns) for p in (tied if undecided else [position]))
        text = f"{own.recipe_id}: the fault lies with one of {name_ranks(row)}, which work in lockstep"
        return replace(_unblamed(own, text), persistence=(own.persistence or "persistent") if speaks else None)
    position, columns = next(iter(victims.items()))
    origin = sorted({table[i][p] for i in columns for p in (victims if undecided else [position])})
    who = name_ranks([table[column][p] for p in (victims if undecided else [position])])
    text = (
        f"{own.recipe_id}: {who} differs only from when on it had values from {name_ranks(origin)}, which differ before"
    )
    return replace(_unblamed(own, text), persistence=None)


def _unblamed(own: RecipeVerdict, text: str) -> RecipeVerdict:
    nobody = (False,) * len(next(iter(own.surfaces.values())).bitmap)
    return replace(
        own,
        status=C3Status.INCONCLUSIVE,
        surfaces={name: _reduced(result, nobody) for name, result in own.surfaces.items()},
        bitmap=nobody,
        basis="none",
        reason=text,
        more=0,
    )


def _reduced(result: C3Result, kept: Sequence[bool]) -> C3Result:
    """A surface's result with blame for the kept positions alone."""
    if result.status is not C3Status.ATTRIBUTED:
        return result
    bitmap = tuple(bad and keep for bad, keep in zip(result.bitmap, kept or result.bitmap, strict=True))
    status = C3Status.ATTRIBUTED if any(bitmap) else C3Status.INCONCLUSIVE
    return C3Result(status=status, bitmap=bitmap, evidence=result.evidence)


def _shared(
    own: RecipeVerdict, views: Sequence[ColumnView], column: int, table: Sequence[Sequence[int]]
) -> RecipeVerdict | None:
    """The verdict on state that all partners should hold alike; None when they do, or when it cannot be said.

    Judged only while every column agrees in itself: then every replica has the same partners apart, so that no device
    holds it wrong by itself. Software does this, and so does one wrong step of one partner, which replicas share.
    """
    words = [view.shared for view in views]
    if any(view.diverges or view.raised for view in views) or len({view.listing for view in views}) > 1:
        return None
    if len(set(words)) < 2:
        return None
    groups: dict[int, list[int]] = {}
    for word, ranks in zip(words, table, strict=True):
        groups.setdefault(word, []).append(ranks[0])
    apart = "; ".join(name_ranks(members) for members in groups.values())
    text = f"{own.recipe_id}: what lockstep partners should hold alike differs between them, in every replica: {apart}"
    return replace(_unblamed(own, text), persistence="persistent" if column == 0 else None)
