"""What the Lightning callback costs a healthy fit: steps of fits with it against steps of fits without, in turn.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.lightning_cost [--steps 200 --pairs 10 --width 512 ...]

A pair is one fit with the callback and one without, of the same model on the same batches, in alternating order in the
same processes. Timed are its steps on rank 0 from the second on, so neither start nor end. Printed: the mean ratio over
pairs with a 95% bootstrap interval, what attaching adds once, and the ratio of a fit of steps x pairs with both.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import random
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy

from benchmarks.healthy_path import GPT, synchronize
from scout_lightning import ScoutCallback

_RESAMPLES = 10_000


class Module(L.LightningModule):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.net = GPT(options.vocab, options.width, options.layers, options.heads, options.context)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return F.cross_entropy(self.net(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Times(L.Callback):
    """Seconds of setting up, and of all steps but the first."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.setup_s = self.steps_s = 0.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 0:
            synchronize(pl_module.device)
            self.setup_s = time.perf_counter() - self.began
            self.first = time.perf_counter()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        synchronize(pl_module.device)
        self.steps_s = time.perf_counter() - self.first


def fit(options: argparse.Namespace, folder: Path, *, scout: bool) -> Times:
    """One fit; every rank calls. Exits when a check of it was not clean."""
    L.seed_everything(0, verbose=False)
    shape = (options.batch, options.context + 1)
    batches = [torch.randint(0, options.vocab, shape) for _ in range(8)] * math.ceil((options.steps + 1) / 8)
    callback, times = ScoutCallback(options.every, folder), Times()
    cuda = torch.cuda.is_available()
    trainer = L.Trainer(
        accelerator="gpu" if cuda else "cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(),
        precision=options.precision,
        use_distributed_sampler=False,
        max_steps=options.steps + 1,
        max_epochs=-1,
        callbacks=[callback, times] if scout else [times],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(folder),
    )
    told: list[Any] = []
    close = callback._close

    def last() -> None:
        if callback.scout is not None:
            told.extend([callback.scout.last_result, list(callback.scout.reports)])
        close()

    callback._close = last  # type: ignore[method-assign]
    trainer.fit(Module(options), torch.utils.data.DataLoader(batches, batch_size=None))
    if scout and (told[0] is None or not told[0].trustworthy or told[1]):
        raise SystemExit(f"a healthy fit was not clean: {told}")
    return times


def interval(values: list[float]) -> tuple[float, float]:
    """95% bootstrap interval of the mean."""
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return means[_RESAMPLES // 40], means[-_RESAMPLES // 40]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (
        ("steps", 200), ("pairs", 10), ("every", 50), ("width", 512), ("layers", 4), ("heads", 8), ("vocab", 512),
        ("context", 256), ("batch", 2),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--precision", default="32-true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    ratios, added_s, plain_s = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        fit(options, Path(folder) / "warm", scout=True)
        for pair in range(options.pairs):
            order = (True, False) if pair % 2 else (False, True)
            times = {scout: fit(options, Path(folder) / f"{pair}", scout=scout) for scout in order}
            ratios.append(times[True].steps_s / times[False].steps_s)
            added_s.append(times[True].setup_s - times[False].setup_s)
            plain_s.append(times[False].steps_s)
        dist.barrier()
    if dist.get_rank() == 0:
        low, high = interval(ratios)
        total = options.pairs * statistics.fmean(plain_s)
        figures = {
            "ranks": dist.get_world_size(),
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "parameters_M": round(sum(p.numel() for p in Module(options).parameters()) / 1e6, 1),
            "step_ms": round(1e3 * statistics.fmean(plain_s) / options.steps, 3),
            "checks_every": options.every,
            "step_ratio": round(statistics.fmean(ratios), 4),
            "step_ratio_95": [round(low, 4), round(high, 4)],
            "attach_s": round(statistics.median(added_s), 3),
            f"ratio_of_{options.pairs * options.steps}_steps": round(
                statistics.fmean(ratios) + statistics.median(added_s) / total, 4
            ),
        }
        print(json.dumps(figures, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
