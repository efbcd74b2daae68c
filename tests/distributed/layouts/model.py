"""The tiny language model that every layout splits in its own way, and its parts for layouts that split by hand.

Built whole from one seed on every rank, then split: so each layout trains the same function, which a test compares.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.distributed.layouts.collectives import (
    Group,
    copy_in,
    exchange,
    exchange_counts,
    gather_columns,
    gather_sequence,
    reduce_out,
)

WIDTH, HEAD, INNER, WORDS, LENGTH, BATCH, LAYERS = 16, 4, 32, 32, 8, 4, 4
EXPERTS, CHOSEN = 4, 2


class Attention(nn.Module):
    """Causal attention over as many heads as the projections have here."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x_btw: torch.Tensor) -> torch.Tensor:
        return self.o(attend(self.q(x_btw), self.k(x_btw), self.v(x_btw)))


def attend(q_btw: torch.Tensor, k_bsw: torch.Tensor, v_bsw: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Causal attention of queries that begin at position `start` of the keys' sequence; `[b, t, w]`."""
    q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (q_btw, k_bsw, v_bsw))
    reach = torch.ones(start + q.shape[2], k.shape[2], dtype=torch.bool).tril()[start:]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=reach).transpose(1, 2).flatten(2)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, feed: Callable[[], nn.Module] = FeedForward) -> None:
        super().__init__()
        self.norm_attention, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm_feed, self.feed = nn.LayerNorm(WIDTH), feed()

    def forward(self, x_btw: torch.Tensor) -> torch.Tensor:
        x_btw = x_btw + self.attention(self.norm_attention(x_btw))
        return x_btw + self.feed(self.norm_feed(x_btw))


class TinyLM(nn.Module):
    """Embedding, position, blocks, norm, head. A pipeline stage has None for what lives on another stage.

    Blocks keep their numbers of the whole model as keys, also on a stage that has some of them only.
    """

    def __init__(self, *, position: bool = True, feed: Callable[[], nn.Module] = FeedForward) -> None:
        super().__init__()
        self.embedding: nn.Module | None = nn.Embedding(WORDS, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH)) if position else None
        self.blocks = nn.ModuleDict({str(number): Block(feed) for number in range(LAYERS)})
        self.norm: nn.Module | None = nn.LayerNorm(WIDTH)
        self.head: nn.Module | None = nn.Linear(WIDTH, WORDS, bias=False)
        self.part = 0  # which part of the sequence, where it is split

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        if self.position is not None:
            x = x + self.position[self.part * x.shape[1] : (self.part + 1) * x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.head is None else self.head(x)


class ColumnParallel(nn.Module):
    """The own part of a linear layer's outputs, as Megatron's; `product` is the local multiplication."""

    def __init__(self, whole: nn.Linear, group: Group, *, gather: bool = False) -> None:
        super().__init__()
        self.group, self.gather = group, gather
        self.product = _linear(own_chunk(whole.weight, 0, group))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.product(copy_in(x, self.group))
        return gather_columns(y, self.group) if self.gather else y


class RowParallel(nn.Module):
    """A linear layer over the own part of its inputs, summed over the group; `product` is the local multiplication."""

    def __init__(self, whole: nn.Linear, group: Group) -> None:
        super().__init__()
        self.group = group
        self.product = _linear(own_chunk(whole.weight, 1, group))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return reduce_out(self.product(x), self.group)


class Rows(nn.Embedding):
    """The own rows of a table; words that live elsewhere give zeros."""

    def __init__(self, whole: nn.Embedding, group: Group) -> None:
        weight = own_chunk(whole.weight, 0, group)
        super().__init__(*weight.shape, _weight=weight)
        self.first = dist.get_rank(group) * weight.shape[0]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        own = ids - self.first
        elsewhere = (own < 0) | (own >= self.num_embeddings)
        return super().forward(own.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0.0)


class VocabularyParallel(nn.Module):
    """An embedding whose rows are spread over the group."""

    def __init__(self, whole: nn.Embedding, group: Group) -> None:
        super().__init__()
        self.group, self.rows = group, Rows(whole, group)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return reduce_out(self.rows(ids), self.group)


class ContextAttention(nn.Module):
    """Attention of the own part of the sequence to the keys and values of the whole, gathered from the group."""

    def __init__(self, whole: Attention, group: Group) -> None:
        super().__init__()
        self.group = group
        self.q, self.k, self.v, self.o = whole.q, whole.k, whole.v, whole.o

    def forward(self, x_btw: torch.Tensor) -> torch.Tensor:
        keys, values = (gather_sequence(part(x_btw), self.group) for part in (self.k, self.v))
        return self.o(attend(self.q(x_btw), keys, values, start=dist.get_rank(self.group) * x_btw.shape[1]))


class Experts(nn.Module):
    """A router that sends each token to `CHOSEN` of `EXPERTS` feed-forward networks, spread over the group."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(FeedForward() for _ in range(EXPERTS))
        self.group: Group = None

    def spread(self, group: Group) -> None:
        """Keep the own experts only."""
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        share = EXPERTS // size
        self.experts, self.group = self.experts[rank * share : (rank + 1) * share], group

    def forward(self, x_btw: torch.Tensor) -> torch.Tensor:
        tokens = x_btw.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(CHOSEN)
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=EXPERTS)
        received = exchange_counts(counts, self.group)  # from every rank, for each of the own experts
        sent, got = (part.unflatten(0, (-1, len(self.experts))).sum(1).tolist() for part in (counts, received))
        answers = self._compute(exchange(tokens[order // CHOSEN], sent, got, self.group), received)
        results = exchange(answers, got, sent, self.group)[order.argsort()].unflatten(0, (-1, CHOSEN))
        return (results * weights.unsqueeze(-1)).sum(1).view_as(x_btw)

    def _compute(self, rows: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """The own experts' answers; rows come sorted by sender, then by expert."""
        own = len(self.experts)
        expert = torch.arange(own).repeat(len(received) // own).repeat_interleave(received)
        order = expert.argsort(stable=True)
        shares = rows[order].split(expert.bincount(minlength=own).tolist())
        answers = [network(share) for network, share in zip(self.experts, shares, strict=True)]
        return torch.cat(answers)[order.argsort()]


def own_chunk(whole: torch.Tensor, dim: int, group: Group) -> torch.Tensor:
    """A copy of this rank's equal share of `whole` along `dim`."""
    return whole.detach().chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].clone()


def _linear(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight)
    return linear
