"""How the ranks of a check agree on what may run, before anything does (DESIGN, the way of one check)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from scout_core.consensus.readiness import (
    ROW_WORDS,
    RankContract,
    ReadinessVerdict,
    encode,
    judge_readiness,
    signed,
)
from scout_core.consensus.standing import (
    GROUP_WORDS,
    STATEMENT_WORDS,
    join_standings,
    judge_groups,
    standing_of,
    statement,
)
from scout_core.peers import PeerGroup


def agree(
    contract: RankContract,
    peers: PeerGroup,
    partners: PeerGroup,
    group_words: Callable[[Sequence[int]], list[int]],
    more: Sequence[int],
    asks: bool = False,
) -> tuple[ReadinessVerdict, list[list[int]], bool]:
    """What may run, the words `more` of every peer, which travel along, and whether any partner `asks`.

    Every peer and partner calls.

    Collectives: with lockstep partners one all-gather among them, then one among the peers. Both carry `group_words` of
    the ranks in it: words over the collectives issued on each process group that they share.
    """
    own, standing, asked = encode(contract), [], False
    if partners.size > 1:
        said = _gather(partners, [*statement(contract), *group_words(partners.ranks), asks])
        statements, groups = [row[:STATEMENT_WORDS] for row in said], [row[STATEMENT_WORDS:-1] for row in said]
        asked = any(row[-1] for row in said)
        standing = standing_of(statements, groups, partners.ranks)
    rows = _gather(peers, own + standing + group_words(peers.ranks) + list(more))
    groups_at = ROW_WORDS + len(standing)
    more_at = groups_at + GROUP_WORDS
    verdict = judge_readiness([row[:ROW_WORDS] for row in rows], peers.ranks)
    differs = judge_groups([row[groups_at:more_at] for row in rows], peers.ranks)
    if differs is not None and standing:  # partners have other peers, who do not know of it, and would wait for these
        verdict = replace(verdict, reasons=(*verdict.reasons, replace(differs, field="group_digest")))
    elif differs is not None and not any(reason.recipe == "check" for reason in verdict.reasons):
        verdict = ReadinessVerdict(runnable=(), reasons=(differs,), seeds=())
    if standing:
        verdict = join_standings(verdict, [row[ROW_WORDS:groups_at] for row in rows], peers.ranks)
    return verdict, [row[more_at:] for row in rows], asked


def _gather(group: PeerGroup, words: Sequence[int]) -> list[list[int]]:
    rows: list[list[int]] = group.gather(torch.tensor([signed(word) for word in words], dtype=torch.int64)).tolist()
    return rows
