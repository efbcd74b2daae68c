"""Fits that tests run on ranks of a pool: real Lightning trainers over the pool's process group."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from benchmarks.lightning_gpu import Resumable
from scout_core.faults import corrupt_weight
from scout_core.oob.writer import Publisher
from scout_core.replay.local_tensors import local_part
from scout_lightning import ScoutCallback

WORDS, WIDTH, LENGTH = 16, 8, 4


class PoolEnvironment(LightningEnvironment):
    """The pool has started the ranks and their process group."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return dist.get_world_size()

    def set_world_size(self, size: int) -> None:
        return None

    def global_rank(self) -> int:
        return dist.get_rank()

    def set_global_rank(self, rank: int) -> None:
        return None

    def local_rank(self) -> int:
        return dist.get_rank()


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One fit. `fault_at`: on rank `fault_rank` a weight flips a bit after this many optimizer steps. `look`: a check
    off schedule after this one. `before` and `after` are callbacks around SCOUT's, `patience_s` how long ranks wait for
    each other's word."""

    folder: Path
    steps: int = 4
    scout: bool = True
    every: int = 1
    callbacks: int = 1
    scout_last: bool = False
    checkpoint: dict[str, Any] | None = None
    fault_at: int | None = None
    fault_rank: int = 2
    look: int | None = None
    on_fault: Any = "report"
    patience_s: float = 300.0
    before: tuple[L.Callback, ...] = ()
    after: tuple[L.Callback, ...] = ()
    ckpt_path: str | None = None
    accumulate: int = 1
    clip: float | None = None
    mode: str = "auto"
    raise_at: int | None = None
    raises: str = "error"
    oob: bool = False
    validate: bool = False
    trainer: dict[str, Any] = field(default_factory=dict)
    layout: str = "ddp"
    extras: tuple[str, ...] = ()
    prog_bar: bool = False


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)) for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.blocks(self.embed(ids)))
        return logits


def share_parameters(module: nn.Module) -> None:
    """Rank 0's go to every rank, as a job may do it: from then on all agree, whatever they had."""
    for parameter in module.parameters():
        dist.broadcast(parameter.data, 0)


class Module(L.LightningModule):
    def __init__(self, fit: Fit) -> None:
        super().__init__()
        self.net = Net()
        self.fit = fit
        self.phases: set[tuple[str, str]] = set()
        self.automatic_optimization = not fit.mode.startswith("manual")

    def see(self, where: str) -> None:
        """The phase that the observers are told, once the first step is done."""
        for one in self.trainer.callbacks:
            scout = getattr(one, "scout", None)
            if scout is not None and scout._oob._publisher is not None and scout.step_count:
                self.phases.add((where, scout._oob._publisher.phase.name))

    def loss(self, batch: Any) -> torch.Tensor:
        (ids,) = batch["a"] if isinstance(batch, dict) else batch
        return nn.functional.cross_entropy(self.net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.fit.raise_at == index:
            if self.fit.raises == "interrupt":
                raise KeyboardInterrupt
            if self.fit.raises == "error":
                raise RuntimeError("user code failed")
            os.kill(os.getpid(), signal.SIGTERM)
        loss = self.loss(batch)
        if "early_stopping" in self.fit.extras:
            self.log("unchanging", 1.0, on_step=False, on_epoch=True)
        if self.fit.mode.startswith("fp16") and index < 2:
            loss = loss * float("inf")
        if not self.automatic_optimization:
            optimizers = self.optimizers()
            order = optimizers if isinstance(optimizers, list) else [optimizers]
            for turn, optimizer in enumerate(order * 2 if self.fit.mode == "manual_twice" else order):
                if self.fit.mode == "manual_twice" and turn:
                    share_parameters(self)
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()
        return loss

    def on_validation_epoch_start(self) -> None:
        self.see("validation")

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self.see("training")

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.fit.mode == "manual2":
            return [torch.optim.SGD(self.net.blocks.parameters(), 0.1), torch.optim.AdamW(self.net.head.parameters())]
        if self.fit.mode == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), max_iter=2)
        flat = self.fit.layout == "fsdp1_flat"  # the optimizer is to own what FSDP made of the parameters
        return torch.optim.AdamW(
            (self.trainer.model if flat else self).parameters(), 1e-2, fused=self.fit.mode == "fp16_fused"
        )


class Sharded(Module):
    """Under `ModelParallelStrategy`: `tp` and `fsdp` on the strategy's mesh, `hsdp` on one of the job's own."""

    def configure_model(self) -> None:
        blocks = [block[0] for block in self.net.blocks]
        if self.fit.layout == "hsdp":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            for part in (*blocks, self.net):
                fully_shard(part, mesh=mesh)
            return
        data, tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
        if tensor.size() > 1:
            for block in self.net.blocks:
                parallelize_module(block, tensor, {"0": ColwiseParallel(output_layouts=Replicate())})
        if data.size() > 1:
            for part in (*blocks, self.net):
                fully_shard(part, mesh=data)


class CpuFsdp(FSDPStrategy):
    """Lightning's FSDP1 on the CPU, which it refuses; torch does not."""

    def setup_environment(self) -> None:
        shape = self.kwargs.pop("device_mesh", None)
        super().setup_environment()
        if shape is not None:
            self.kwargs["device_mesh"] = init_device_mesh("cpu", shape)

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            model,
            sharding_strategy=self.sharding_strategy,
            mixed_precision=self.mixed_precision_config,
            device_id=torch.device("cpu"),
            **self.kwargs,
        )


class LateWrites(AsyncCheckpointIO):
    """A disk so slow that nothing is written before the fit has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = Event()

    def _ensure_setup(self) -> None:
        fresh = self._executor is None
        super()._ensure_setup()
        if fresh:
            self._executor.submit(self.ended.wait, 60.0)  # type: ignore[union-attr]

    def teardown(self) -> None:
        self.ended.set()
        super().teardown()


WRITERS = {"async": AsyncCheckpointIO, "late": LateWrites}


FSDP1 = {
    "fsdp1": {"auto_wrap_policy": {nn.Sequential}},
    "fsdp1_one_unit": {},
    "fsdp1_hybrid": {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2), "auto_wrap_policy": {nn.Linear}},
    "fsdp1_flat": {"use_orig_params": False},
    "fsdp1_replicated": {"sharding_strategy": "NO_SHARD", "auto_wrap_policy": {nn.Sequential}},
}


def strategy_of(fit: Fit) -> Any:
    if fit.layout == "ddp":
        return DDPStrategy(find_unused_parameters=True)
    if fit.layout in FSDP1:
        # the check refuses every accelerator but GPUs, before the strategy is asked anything
        _AcceleratorConnector._check_strategy_and_fallback = lambda self: None  # type: ignore[method-assign]
        return CpuFsdp(state_dict_type="sharded", **FSDP1[fit.layout])
    return ModelParallelStrategy(*LAYOUTS[fit.layout])


LAYOUTS = {"hsdp": (4, 1), "fsdp": (4, 1), "tp": (1, 4), "fsdp_tp": (2, 2)}


class Corrupt(L.Callback):
    def __init__(self, fit: Fit) -> None:
        self.fit = fit
        self.done = False

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        due = trainer.global_step == self.fit.fault_at and trainer.global_rank == self.fit.fault_rank
        if due and not self.done:
            weight = pl_module.net.blocks[1][0].weight
            corrupt_weight(weight, element=3, bit=20 if weight.dtype is torch.float32 else 10)
            self.done = True


class Look(L.Callback):
    """Once the optimizer has stepped `look` times: the whole catalog, as a recovery would ask for it."""

    def __init__(self, fit: Fit) -> None:
        self.fit = fit
        self.found: tuple[str, bool] | None = None

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
        scouts = [one.scout for one in trainer.callbacks if isinstance(one, ScoutCallback) and one.scout is not None]
        if scouts and self.found is None and scouts[0].step_count == self.fit.look:
            result = scouts[0].check_now()
            self.found = (result.status.value, result.complete)


class SeeBar(L.Callback):
    """How far the progress bar of this rank came, and what it shows."""

    def __init__(self) -> None:
        self.done = -1.0
        self.shown: list[str] = []

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        bar = trainer.progress_bar_callback
        if bar is None or not trainer.is_global_zero:
            return
        if isinstance(bar, RichProgressBar):
            self.done = bar.progress.tasks[0].completed
        else:
            self.done = bar.train_progress_bar.n
        self.shown = sorted(name for name in bar.get_metrics(trainer, pl_module) if name.startswith("scout/"))


EXTRAS = {
    "early_stopping": lambda: EarlyStopping("unchanging", patience=1, check_on_train_epoch_end=True),
    "accumulation": lambda: GradientAccumulationScheduler({0: 2, 1: 1}),
    "tqdm": TQDMProgressBar,
    "rich": RichProgressBar,
}


class Errors(logging.Handler):
    """What SCOUT could not do, and logged instead of raising it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        yield


class Loader(Resumable):
    def __init__(self, length: int | None = None) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        ids = torch.randint(0, WORDS, (256, LENGTH + 1), generator=torch.Generator().manual_seed(0))
        super().__init__([(part,) for part in ids[rank::world].split(2)][:length])


def run(fit: Fit) -> dict[str, Any]:
    """The fit, and how it ended on this rank."""
    errors = Errors()
    logging.getLogger("scout").addHandler(errors)
    try:
        with quiet():
            return {**_run(fit), "errors": errors.said}
    finally:
        logging.getLogger("scout").removeHandler(errors)


def _run(fit: Fit) -> dict[str, Any]:
    L.seed_everything(0, verbose=False)
    module = Sharded(fit) if fit.layout in LAYOUTS else Module(fit)
    ours = [
        ScoutCallback(
            fit.every,
            fit.folder / "scout",
            {"oob": {"oob_enabled": fit.oob}, "trust": {"agreement_timeout_s": fit.patience_s}},
            on_fault=fit.on_fault,
            prog_bar=fit.prog_bar,
        )
        for _ in range(fit.callbacks if fit.scout else 0)
    ]
    saver = (
        [] if fit.checkpoint is None else [ModelCheckpoint(fit.folder / "ckpt", filename="{step}", **fit.checkpoint)]
    )
    order = [*saver, *ours] if fit.scout_last else [*ours, *saver]
    looker = Look(fit)
    if fit.mode.startswith("fp16"):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        plugins: list[Any] = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    else:
        plugins = []
    bar = SeeBar()
    options = {"max_steps": fit.steps, "max_epochs": -1, "accumulate_grad_batches": fit.accumulate}
    if fit.validate:
        options |= {"limit_val_batches": 1, "val_check_interval": 1}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy_of(fit),
        plugins=[PoolEnvironment(), *plugins, *(WRITERS[name]() for name in fit.extras if name in WRITERS)],
        gradient_clip_val=fit.clip,
        callbacks=[
            Corrupt(fit),
            looker,
            *fit.before,
            *order,
            *fit.after,
            bar,
            *(EXTRAS[name]() for name in fit.extras if name in EXTRAS),
        ],
        logger=CSVLogger(fit.folder / "csv") if "csv" in fit.extras else False,
        default_root_dir=str(fit.folder),
        enable_checkpointing=fit.checkpoint is not None,
        enable_progress_bar=bool({"tqdm", "rich"} & set(fit.extras)),
        enable_model_summary=False,
        **{**options, **fit.trainer},
    )
    batches = (
        CombinedLoader({"a": Loader(), "b": Loader(2)}, "max_size_cycle") if "combined" in fit.extras else Loader()
    )
    if fit.mode == "compiled_net":
        module.net = torch.compile(module.net, backend="eager")
    elif fit.mode == "compiled_in_place":
        module.net.compile(backend="eager")
    fitted = torch.compile(module, backend="eager") if fit.mode == "compiled_module" else module
    ended: str | int | None = None
    handles = ours[:1]
    seen: dict[str, Any] = {}
    original = ScoutCallback._close

    def remember(self: ScoutCallback) -> None:
        if self.scout is not None:
            seen.update(reports=list(self.scout.reports), steps=self.scout.step_count, result=self.scout.last_result)
            seen["attached"] = seen.get("attached", 0) + 1
            publisher = self.scout._oob._publisher
            seen["watched"] = sorted(publisher._names) if publisher is not None else []
            seen.update(checks=self._checks, metrics=dict(trainer.callback_metrics))
        original(self)

    entered: Counter[str] = Counter()
    original_enter = Publisher.enter

    def enter(self: Publisher, activity: Any, name: str, usual_ns: int) -> None:
        entered[name] += 1
        original_enter(self, activity, name, usual_ns)

    ScoutCallback._close = remember  # type: ignore[method-assign]
    Publisher.enter = enter  # type: ignore[method-assign]
    try:
        trainer.fit(fitted, batches, Loader() if fit.validate else None, ckpt_path=fit.ckpt_path)
    except (RuntimeError, SystemExit, KeyboardInterrupt) as error:
        ended = error.code if isinstance(error, SystemExit) else str(error)
        for one in handles:
            one._close()
    finally:
        ScoutCallback._close = original  # type: ignore[method-assign]
        Publisher.enter = original_enter  # type: ignore[method-assign]
    states = [s for o in trainer.optimizers for s in o.state_dict()["state"].values()] if ended is None else []
    result = seen.get("result")
    return {
        "parameters": [local_part(p).detach().clone() for p in module.parameters()],
        "optimizer": [local_part(v).clone() for s in states for v in s.values() if isinstance(v, torch.Tensor)],
        "rng": torch.get_rng_state(),
        "global_step": trainer.global_step,
        "ended": ended,
        "steps": seen.get("steps"),
        "checks": seen.get("checks"),
        "looked": looker.found,
        "bar": (bar.done, bar.shown),
        "attached": seen.get("attached"),
        "entered": entered,
        "watched": seen.get("watched"),
        "phases": sorted(module.phases),
        "metrics": {k: float(v) for k, v in seen.get("metrics", {}).items() if k.startswith("scout/")},
        "reports": [(r.kind, r.ranks, r.step) for r in seen.get("reports", [])],
        "status": None if result is None else (result.status.value, result.complete, result.trustworthy),
        "reasons": [] if result is None else [r.message for r in result.inconclusive_reasons],
        "wrapped": any(name in vars(trainer.strategy) for name in ("save_checkpoint", "remove_checkpoint")),
        "hooks": sum(len(o._optimizer_step_post_hooks) for o in trainer.optimizers),
        "answers": getattr(fit.on_fault, "times", 0),
        "pid": os.getpid(),
    }


def run_all(fits: list[Fit]) -> list[dict[str, Any]]:
    """Several fits after one another, in the same processes."""
    return [run(fit) for fit in fits]
