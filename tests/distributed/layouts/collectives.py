"""Collectives that autograd passes through, written out as training frameworks do; each needs every rank of its group.

`group` None stands for a layout that does not split: nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

Group = dist.ProcessGroup | None


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _summed(gradient, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group, ctx.columns = group, x.shape[-1]
        return torch.cat(_gathered(x, group), dim=-1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        # everyone computes the same loss from the whole, so the own columns' gradient is complete
        return gradient.split(ctx.columns, dim=-1)[dist.get_rank(ctx.group)].contiguous(), None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return torch.cat(_gathered(x, group), dim=1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        # everyone computes a loss of its own from the whole: the own part's gradient is a sum over all
        parts = torch.cat(gradient.chunk(dist.get_world_size(ctx.group), dim=1)).contiguous()
        own = parts.new_empty(parts.shape[0] // dist.get_world_size(ctx.group), *parts.shape[1:])
        dist.reduce_scatter_tensor(own, parts, group=ctx.group)
        return own, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: Sequence[int], got: Sequence[int], group: Group) -> torch.Tensor:
        ctx.splits, ctx.group = (sent, got), group
        return _exchanged(rows, sent, got, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        sent, got = ctx.splits
        return _exchanged(gradient, got, sent, ctx.group), None, None, None


def copy_in(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The same tensor; its gradient is summed over the group. Enters a column-parallel region."""
    return x if group is None else _apply(_CopyIn, x, group)


def reduce_out(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over the group; the gradient passes as it is. Leaves a row-parallel region."""
    return x if group is None else _apply(_Reduce, x, group)


def gather_columns(x: torch.Tensor, group: Group) -> torch.Tensor:
    """`[..., n]` from every rank to `[..., n * size]` on every rank."""
    return x if group is None else _apply(_GatherColumns, x, group)


def gather_sequence(x_btw: torch.Tensor, group: Group) -> torch.Tensor:
    """`[b, t, w]` from every rank to `[b, t * size, w]` on every rank; gradients are reduced and scattered back."""
    return x_btw if group is None else _apply(_GatherSequence, x_btw, group)


def exchange(rows: torch.Tensor, sent: Sequence[int], got: Sequence[int], group: Group) -> torch.Tensor:
    """Rows `[sum(sent), w]`, `sent[r]` of them to rank r of the group, for `[sum(got), w]`, `got[r]` of them from r."""
    return rows if group is None else _apply(_Exchange, rows, sent, got, group)


def exchange_counts(counts: torch.Tensor, group: Group) -> torch.Tensor:
    """Equal shares of `counts` `[size * n]` to every rank of the group; what each sent, in the order of ranks."""
    if group is None:
        return counts
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    return received


def _apply(function: Any, *args: Any) -> torch.Tensor:
    result: torch.Tensor = function.apply(*args)
    return result


def _summed(x: torch.Tensor, group: Group) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gathered(x: torch.Tensor, group: Group) -> list[torch.Tensor]:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return parts


def _exchanged(rows: torch.Tensor, sent: Sequence[int], got: Sequence[int], group: Group) -> torch.Tensor:
    received = rows.new_empty(sum(got), *rows.shape[1:])
    dist.all_to_all_single(received, rows.contiguous(), list(got), list(sent), group=group)
    return received
