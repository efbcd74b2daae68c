"""A tiny job for torchrun: trains, goes wrong as told, resumes by itself, and writes down how it ended.

`python job.py RUN_DIR STEPS [key=value ...]`; keys: `fault` (sdc, nan, kill, raise, none), `at` (step), `attempts` (in
how many it occurs), `durable` (none, save, dcp), `damaged` (step whose durable checkpoint the first attempt writes with
a NaN in it), `own` (before, after, twice: where the job's own saving stands to one attach or two), `gemini` (0, 1),
`budget`, `flush`, `interval`.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import scout_core
from scout_core.consensus import tensor_signature
from scout_core.faults import corrupt_weight
from scout_core.trust.durable import (
    CheckpointContext,
    DistributedCheckpointCallbacks,
    DurableCallbacks,
    DurableCheckpointConfig,
    TorchSaveCallbacks,
)


class Sampler:
    """Input position of the job: what it gives depends on where it stands."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> float:
        self.position += 1
        return (self.position % 7) / 7

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class DamagingSave(TorchSaveCallbacks):
    """A saver that writes a NaN into one step's checkpoint, which is whole and readable for all that."""

    def __init__(self, step: int) -> None:
        self.step = step

    def save_candidate(self, context: CheckpointContext, state: Any) -> Sequence[Path]:
        if context.step == self.step and context.checkpoint_id.endswith("attempt-0"):
            inner = state["state"]
            damaged = {
                **inner["parameters"],
                "2.weight": torch.full_like(inner["parameters"]["2.weight"], float("nan")),
            }
            state = {**state, "state": {**inner, "parameters": damaged}}
        return super().save_candidate(context, state)


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(16, 8),
        nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)) for _ in range(2)]),
        nn.Linear(8, 16),
    )


def seed_rank(rank: int) -> None:
    torch.manual_seed(100 + rank)
    np.random.seed(rank)
    random.seed(rank)


def build(rank: int) -> tuple[nn.Module, DistributedDataParallel, torch.optim.Optimizer]:
    model = small_model()
    # DDP lays its buckets out anew after the first step of a process, which changes the order of sums, unless it looks
    # for unused parameters: without that no restart of DDP can have the same bits
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    seed_rank(rank)
    return model, ddp, torch.optim.AdamW(ddp.parameters(), lr=1e-2)


def train_step(ddp: nn.Module, optimizer: torch.optim.Optimizer, sampler: Sampler, scheduler: Any) -> None:
    ids = torch.randint(0, 16, (4, 6))
    noise = float(np.random.rand()) + random.random() + sampler.next()
    loss = nn.functional.cross_entropy(ddp(ids).flatten(0, 1) * (1 + noise), ids.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()


def settle(scout: scout_core.Scout) -> None:
    """Let a capture become whole, so that which steps are captured does not hang on the load of the machine."""
    if scout._trust.enabled and scout._trust._gemini is not None:
        assert scout._trust._gemini.settle(60)


def options(words: list[str]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in words)


def main(run_dir: Path, steps: int, given: dict[str, str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    model, ddp, optimizer = build(rank)
    sampler = Sampler()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    saved: list[list[torch.Tensor]] = []
    keep = lambda *_: saved.append([p.detach().clone() for p in model.parameters()])  # noqa: E731
    own = given.get("own", "none")
    scouts: list[scout_core.Scout] = []
    with ExitStack() as stack:
        if own in ("before", "twice"):
            optimizer.register_step_post_hook(keep)
        for folder in (run_dir, run_dir / "again") if own == "twice" else (run_dir,):
            scout = stack.enter_context(
                scout_core.attach(
                    ddp,
                    optimizer,
                    run_dir=folder,
                    check_interval=int(given.get("interval", "2")),
                    gemini=given.get("gemini", "1") == "1",
                    flush_interval=int(given.get("flush", "1")),
                    on_fault="restart",
                    restart_budget=int(given.get("budget", "3")),
                    stateful={"sampler": sampler, "scheduler": scheduler},
                    durable=durable(folder, given),
                )
            )
            scouts.append(scout)
        if own == "after":
            optimizer.register_step_post_hook(keep)
        start = scout.step_count
        with (run_dir / f"starts-{rank}.txt").open("a") as file:
            file.write(f"{attempt} {start}\n")
        while scout.step_count < steps:
            if scout.step_count == int(given.get("at", "-1")) and attempt < int(given.get("attempts", "1")):
                misbehave(given["fault"], rank, model)
            train_step(ddp, optimizer, sampler, scheduler)
            for one in scouts:
                settle(one)
        if own != "none":
            last = all(torch.equal(a, b) for a, b in zip(saved[-1], model.parameters(), strict=True))
            (run_dir / f"own-{rank}.json").write_text(json.dumps([len(saved), steps - start, last]))
        final = [tensor_signature(p) for p in (*model.state_dict().values(), torch.get_rng_state())]
        (run_dir / f"final-{rank}.json").write_text(json.dumps([*final, sampler.position]))
    dist.destroy_process_group()


def durable(folder: Path, given: dict[str, str]) -> DurableCheckpointConfig | None:
    kind = given.get("durable", "none")
    if kind == "none":
        return None
    callbacks: DurableCallbacks = DistributedCheckpointCallbacks() if kind == "dcp" else TorchSaveCallbacks()
    if "damaged" in given:
        callbacks = DamagingSave(int(given["damaged"]))
    return DurableCheckpointConfig(callbacks=callbacks, folder=folder / "durable")


def misbehave(fault: str, rank: int, model: nn.Module) -> None:
    weight = model.get_parameter("2.weight")
    if fault == "nan":
        weight.data.fill_(float("nan"))
    elif rank != 2:
        return
    elif fault == "sdc":
        corrupt_weight(weight, element=3, bit=20)
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "raise":
        raise RuntimeError("the job's own fault")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), options(sys.argv[3:]))
