"""Whether the Lightning callback holds on real devices: silent, without a trace, and right about who is wrong.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.lightning_gpu [--only ddp]

One GPU a rank over NCCL; without GPUs the CPU over Gloo, with FSDP1 left out, which Lightning refuses there. Tried:
`ddp`, `fsdp1` (FSDPStrategy), `fsdp2` (ModelParallelStrategy), and from four ranks on `hsdp`, two replicas of it.
For each: a clean fit with and without the callback, a fit for every rank on which a weight flips a bit after step 2,
and one that resumes from what was verified then. Prints one line a check, exits with 1 if one of them failed.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from scout_core.faults import corrupt_weight
from scout_core.replay.local_tensors import local_part
from scout_core.trust.manifest import ManifestStore
from scout_lightning import ScoutCallback

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
GPU = torch.cuda.is_available()
STEPS, FAULT_AT = 5, 2
WORDS, WIDTH, LENGTH = 512, 128, 32


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(
            *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.embed(ids)))
        return logits


class Module(L.LightningModule):
    def __init__(self, strategy: str) -> None:
        super().__init__()
        self.net, self.strategy = Net(), strategy

    def configure_model(self) -> None:
        if self.strategy not in ("fsdp2", "hsdp"):
            return
        mesh = self.device_mesh["data_parallel"]
        if self.strategy == "hsdp":
            shape = (2, dist.get_world_size() // 2)
            mesh = init_device_mesh("cuda" if GPU else "cpu", shape, mesh_dim_names=("replicate", "shard"))
        for part in (*self.net.blocks, self.net):
            fully_shard(part, mesh=mesh)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        (ids,) = batch
        return nn.functional.cross_entropy(self.net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Resumable:
    """Batches of this rank, and the position among them, which Lightning keeps."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.position = 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < len(self.batches):
            self.position += 1
            yield self.batches[self.position - 1]
        self.position = 0

    def __len__(self) -> int:
        return len(self.batches)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def own_batches() -> Resumable:
    rank, world = dist.get_rank(), dist.get_world_size()
    ids = torch.randint(0, WORDS, (256 * world, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return Resumable([(part,) for part in ids[rank::world].split(8)])


@dataclass
class Watch(L.Callback):
    """Flips the bit, and remembers what SCOUT had to say at the end."""

    fault_rank: int | None
    reports: list[tuple[str, tuple[int, ...], int]] = field(default_factory=list)
    clean: bool = False
    checks: int = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        if trainer.global_step == FAULT_AT and trainer.global_rank == self.fault_rank:
            largest = max(pl_module.net.blocks.parameters(), key=lambda p: local_part(p).numel())
            corrupt_weight(largest, element=3, bit=20)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for one in trainer.callbacks:
            if isinstance(one, ScoutCallback) and one.scout is not None:
                result = one.scout.last_result
                self.reports = [(str(r.kind.value), r.ranks, r.step) for r in one.scout.reports]
                self.clean = result is not None and result.complete and result.trustworthy
                self.checks = one._checks


def strategy_of(name: str) -> Any:
    world = dist.get_world_size()
    if name == "ddp":
        # the layout of its buckets then never changes, so that a resume may give the same bits
        return DDPStrategy(find_unused_parameters=True)
    if name == "fsdp1":
        return FSDPStrategy(auto_wrap_policy={nn.Sequential}, state_dict_type="sharded")
    return ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)


def fit(
    name: str, folder: Path, *, scout: bool = True, fault_rank: int | None = None, ckpt_path: str | None = None
) -> tuple[Watch, list[torch.Tensor]]:
    """One fit on every rank; what was seen, and this rank's parameters."""
    L.seed_everything(0, verbose=False)
    module, watch = Module(name), Watch(fault_rank)
    callbacks: list[Any] = [watch]
    if scout:
        callbacks.append(ScoutCallback(1, folder / "scout"))
        callbacks.append(ModelCheckpoint(folder / "ckpt", filename="{step}", every_n_train_steps=1, save_top_k=-1))
    trainer = L.Trainer(
        accelerator="gpu" if GPU else "cpu",
        devices=dist.get_world_size(),
        strategy=strategy_of(name),
        max_steps=STEPS,
        max_epochs=-1,
        deterministic=True,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=scout,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    trainer.fit(module, own_batches(), ckpt_path=ckpt_path)
    return watch, [local_part(p).detach().cpu().clone() for p in module.parameters()]


class Judge:
    """Prints each check once, from all ranks' answers."""

    def __init__(self) -> None:
        self.failed = 0

    def say(self, what: str, good: bool, seen: object) -> None:
        """Every rank calls; one object gather."""
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (good, repr(seen)))
        passed = all(one for one, _ in told)
        self.failed += not passed
        if dist.get_rank() == 0:
            wrong = "; ".join(f"rank {rank}: {text}" for rank, (one, text) in enumerate(told) if not one)
            print(f"{'ok  ' if passed else 'FAIL'} {what}{'' if passed else ': ' + wrong}", flush=True)


def blamed(name: str, rank: int) -> set[tuple[int, ...]]:
    """Which ranks reports may name when `rank` is wrong: none where two peers differ and nothing tells which is right.

    A shard that is held once is seen to change by its own rank. Under HSDP the other pair sees nothing by itself.
    """
    two = (name == "ddp" and dist.get_world_size() == 2) or name == "hsdp"
    return {()} if two else {(rank,)}


def check(name: str, folder: Path, judge: Judge) -> None:
    clean, with_it = fit(name, folder / "clean")
    _, without = fit(name, folder / "plain", scout=False)
    judge.say(f"{name}: a clean fit is silent", clean.reports == [], clean.reports)
    judge.say(f"{name}: all {STEPS} checks ran, the last one complete", clean.checks == STEPS and clean.clean, clean)
    judge.say(f"{name}: the same bits without the callback", all(map(torch.equal, with_it, without)), "other bits")
    for rank in range(dist.get_world_size()):
        place = folder / f"fault{rank}"
        faulty, _ = fit(name, place, fault_rank=rank)
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, [(ranks, step) for kind, ranks, step in faulty.reports if kind == "sdc"])
        reports = [report for one in told for report in one]
        good = {ranks for ranks, _ in reports} == blamed(name, rank) and min(s for _, s in reports) == FAULT_AT + 1
        judge.say(f"{name}: a wrong weight on rank {rank} is found, blamed {blamed(name, rank)}", good, reports)
        if dist.get_rank() == 0:
            states = {m.step: m.state for m in ManifestStore(place / "scout" / "manifests").all()[0]}
            want = {s: "RECOVERY_VERIFIED" if s <= FAULT_AT else "QUARANTINED" for s in range(1, STEPS + 1)}
        else:
            states = want = {}
        judge.say(f"{name}: its checkpoints are quarantined, those before are verified", states == want, states)
    resumed, bits = fit(name, folder / "fault0", ckpt_path="scout-verified")
    same = all(map(torch.equal, bits, with_it))
    judge.say(f"{name}: resumed from what is verified, the same bits", same and resumed.reports == [], resumed.reports)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["ddp", "fsdp1", "fsdp2", "hsdp"])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("scout").setLevel(logging.CRITICAL)
    if GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if GPU else "gloo")
    told = [tempfile.mkdtemp(prefix="scout-lightning-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told)
    judge = Judge()
    names = ["ddp", "fsdp2"] + (["fsdp1"] if GPU else []) + (["hsdp"] if dist.get_world_size() >= 4 else [])
    for name in [options.only] if options.only else names:
        check(name, Path(str(told[0])) / name, judge)
    if dist.get_rank() == 0:
        print(f"{judge.failed} failed; torch {torch.__version__}, lightning {L.__version__}, {told[0]}")
    dist.barrier()
    dist.destroy_process_group()
    return 1 if judge.failed else 0


if __name__ == "__main__":
    sys.exit(main())
