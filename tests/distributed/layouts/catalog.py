"""The layouts that tests train under, by name."""

from __future__ import annotations

import functools

from tests.distributed.layouts.by_hand import context_parallel, expert_parallel, tensor_parallel_by_hand
from tests.distributed.layouts.job import LayoutCase
from tests.distributed.layouts.model import Experts, TinyLM
from tests.distributed.layouts.wiring import (
    ddp,
    pipeline,
    pipeline_tensor_parallel,
    sequence_parallel,
    sharded,
    sharded_tensor_parallel,
    tensor_parallel,
)

_TP = (("dp_replicate", 4), ("tp", 2))
_PP = (("pp", 2), ("dp_replicate", 4))

_ALL = (
    LayoutCase(name="ddp", dims=(("dp_replicate", 4),), wire=ddp),
    LayoutCase(name="fsdp2", dims=(("dp_shard", 4),), wire=sharded),
    LayoutCase(name="hsdp", dims=(("dp_replicate", 4), ("dp_shard", 2)), wire=sharded),
    LayoutCase(name="tp", dims=_TP, wire=tensor_parallel, before="feed.down"),
    LayoutCase(
        name="sp",
        dims=_TP,
        wire=sequence_parallel,
        # the residual stream is split, and a table of positions would have to be
        whole=functools.partial(TinyLM, position=False),
        before="feed.down",
    ),
    LayoutCase(
        name="tp_by_hand",
        dims=_TP,
        wire=tensor_parallel_by_hand,
        owned="feed.down.product",
        before="feed.down.product",
        embedding="embedding.rows",
        head="head.product",
        # by structure the local parts inside would be found, whose replay runs no collective
        options={"embedding_module": "embedding", "output_module": "head"},
    ),
    LayoutCase(name="cp", dims=(("dp_replicate", 4), ("cp", 2)), wire=context_parallel, before="attention.k"),
    LayoutCase(name="pp_gpipe", dims=_PP, wire=pipeline, lengths_vary=False),
    LayoutCase(
        name="pp_1f1b",
        dims=_PP,
        wire=functools.partial(pipeline, one_forward_one_backward=True),
        lengths_vary=False,
    ),
    LayoutCase(
        name="ep",
        dims=(("dp_replicate", 4), ("ep", 2)),
        wire=expert_parallel,
        whole=functools.partial(TinyLM, feed=Experts),
        owned="feed.experts.0.down",
        before="feed.experts.0",
    ),
    LayoutCase(
        name="fsdp2_tp",
        dims=(("dp_shard", 4), ("tp", 2)),
        wire=sharded_tensor_parallel,
        before="feed.down",
    ),
    LayoutCase(
        name="pp_dp_tp",
        dims=(("pp", 2), ("dp_replicate", 3), ("tp", 2)),
        wire=pipeline_tensor_parallel,
        before="feed.down",
        lengths_vary=False,
    ),
    LayoutCase(
        name="hsdp_tp",
        dims=(("dp_replicate", 3), ("dp_shard", 2), ("tp", 2)),
        wire=sharded_tensor_parallel,
        before="feed.down",
    ),
)

CASES: dict[str, LayoutCase] = {case.name: case for case in _ALL}
SMALL = tuple(name for name, case in CASES.items() if case.ranks <= 8)
"""Those that the pools of 4 and 8 ranks can run; the others need 12."""
