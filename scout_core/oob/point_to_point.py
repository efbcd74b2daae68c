"""Whom a point-to-point operation is with, from the arguments of its call.

`isend` and `irecv` stay what they are: torch compares the operations of a batch with them by identity, and a script may
hold the originals. The methods of a process group that they call are watched instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

PAIRED = {"send": "dst", "recv": "src"}
"""Functions of torch.distributed and their argument that says with whom, the second positional one."""
BATCH = "batch_isend_irecv"
SINGLE = {"send": "isend", "recv": "irecv", "recv_anysource": "irecv"}
"""Methods of a process group and the function that calls them."""
Partners = tuple[tuple[int, bool], ...]
"""Global ranks, and whether something is to come from each."""
Awaited = tuple[str, Partners]
"""What is waited in, and for whom."""


def argument(args: Sequence[Any], kwargs: Mapping[str, Any], index: int, name: str, default: Any = None) -> Any:
    """An argument given by place or by name."""
    return args[index] if len(args) > index else kwargs.get(name, default)


def rank_given(args: Sequence[Any], kwargs: Mapping[str, Any], index: int, name: str, place: int) -> int | None:
    """The global rank that a call names, as `name` or as `group_<name>` inside the group at `place`; None without."""
    rank = argument(args, kwargs, index, name)
    if rank is None and (inner := kwargs.get(f"group_{name}")) is not None:
        group = argument(args, kwargs, place, "group")
        rank = inner if group is None else dist.get_global_rank(group, inner)
    return None if rank is None else int(rank)


def partner(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Partners:
    """With whom a call of `send` or `recv` is; () for any."""
    rank = rank_given(args, kwargs, 1, PAIRED[name], 2)
    return () if rank is None else ((rank, name.endswith("recv")),)


def batched(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Partners]:
    """The same for each operation of a batch."""
    operations = argument(args, kwargs, 0, "p2p_op_list") or ()
    return [((int(op.peer), getattr(op.op, "__name__", "").endswith("recv")),) for op in operations]


def single(method: str, group: Any, args: Sequence[Any]) -> Partners:
    """The same for a process group's method, whose first argument after the tensors is a rank inside the group."""
    if method == "recv_anysource":
        return ()
    return ((dist.get_global_rank(group, args[0]), method == "recv"),)
