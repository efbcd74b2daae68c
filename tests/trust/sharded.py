"""The job of `job.py` with its parameters sharded by FSDP2, on one mesh dimension or replicated on a second one."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.trust import ranks
from tests.trust.job import seed_rank, small_model

MESHES = {"fsdp": ((4,), ("dp_shard",)), "hsdp": ((2, 2), ("dp_replicate", "dp_shard"))}


def build(layout: str, rank: int) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """As `job.build`: the model, what is called, and the optimizer."""
    shape, names = MESHES[layout]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = small_model()
    for block in model[1]:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    seed_rank(rank)
    return model, model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def on(layout: str, what: str, *args: Any, **kwargs: Any) -> Any:
    """A function of `ranks` on this layout."""
    with patch.object(ranks, "build", lambda rank: build(layout, rank)):
        return getattr(ranks, what)(*args, **kwargs)


def resume_elsewhere(layout: str, run_dir: Path, first: int, steps: int, how: str) -> Any:
    """Train to `first` with durable checkpoints alone, come back from them, and train to `steps`."""
    on(layout, "train_with", run_dir, first, how, gemini=False)
    return on(layout, "train_with", run_dir, steps, how, gemini=False)
