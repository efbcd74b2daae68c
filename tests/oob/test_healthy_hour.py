"""A healthy job for as long as `SCOUT_HEALTHY_S` says (180 s; an hour for the record): no alarm.

`SCOUT_HEALTHY_STALL_S` is the threshold (10 s). Where cores are short, a loader's new worker may wait longer for one.
`SCOUT_HEALTHY_STEP_S` (0) is how long each step waits as for a device, so that an hour need not keep the cores busy.

Everything that changes the rhythm of a job is in it: evaluation with a batch fewer on one rank, checkpoints that one
rank writes, recompilations, pauses of the garbage collector, uneven batches, loaders with workers, subgroups, checks.
"""

from __future__ import annotations

import gc
import os
import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from tests.oob.jobs import WIDTH, TinyJob, reports, running, say

DURATION_S = float(os.environ.get("SCOUT_HEALTHY_S", "180"))
THRESHOLD_S = float(os.environ.get("SCOUT_HEALTHY_STALL_S", "10"))
STEP_S = float(os.environ.get("SCOUT_HEALTHY_STEP_S", "0"))
START_S = 180.0


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((WIDTH,), index / 200)


def odd_but_healthy(run_dir: str, duration_s: float) -> None:
    thresholds = {"stall_train_s": THRESHOLD_S, "dataloader_stall_s": THRESHOLD_S, "stall_eval_s": 2 * THRESHOLD_S}
    job = TinyJob(run_dir, check_interval=10, checkpoint_stall_s=THRESHOLD_S, **thresholds)
    draw, end = random.Random(job.rank), time.monotonic() + duration_s
    pair = dist.new_group([1, 2])
    loader = job.scout.instrument_dataloader(DataLoader(Rows(), batch_size=4, num_workers=1), name="train")
    going, steps = torch.ones(1), 0
    while going.item():
        for batch in loader:
            for _ in range(draw.randrange(1, 3)):  # uneven: more passes on some ranks
                job.model(batch[: draw.randrange(1, 5)]).square().mean().backward()
            time.sleep(STEP_S)
            for parameter in job.model.parameters():
                dist.all_reduce(parameter.grad)
            job.update()
            steps += 1
            oddity(job, steps, draw, pair)
        going = torch.tensor([float(time.monotonic() < end)])
        dist.broadcast(going, 0)
    say(run_dir, f"done{job.rank}-{steps}")
    job.scout.close()


@torch.compile(backend="eager", dynamic=False)
def compiled(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).sum()


def oddity(job: TinyJob, steps: int, draw: random.Random, pair: dist.ProcessGroup | None) -> None:
    """What comes now and then between two steps."""
    if steps % 7 == 0 and draw.random() < 0.5:
        keep = [[i] for i in range(200_000)]
        gc.collect()
        del keep
    if steps % 11 == 0 and job.rank in (1, 2):
        dist.barrier(group=pair)
    if steps % 13 == 0:
        compiled(torch.ones(steps % 60 + 1))  # a shape of its own: compiled anew
    if steps % 20 == 0:
        job.model.eval()
        with torch.no_grad():
            for _ in range(9 if job.rank == 3 else 10):
                job.model(torch.ones(1, WIDTH))
                time.sleep(0.02)
        dist.barrier()
        job.model.train()
    if steps % 30 == 0:
        if job.rank == 0:
            with job.scout.checkpoint_io("write", name="periodic"):
                time.sleep(draw.uniform(0, 0.4 * THRESHOLD_S))
        with job.scout.phase("checkpoint"):
            dist.barrier()
    if steps % 200 == 0:
        with job.scout.phase("compile"):  # a cold cache on one rank
            time.sleep(1.2 * THRESHOLD_S if job.rank == steps // 200 % 4 else 0)
        dist.barrier()


@pytest.mark.slow
@pytest.mark.timeout(DURATION_S + 2 * START_S)
def test_a_healthy_job_raises_no_alarm(tmp_path: Path) -> None:
    with running(odd_but_healthy, tmp_path, DURATION_S, timeout=DURATION_S + START_S) as ranks:
        outcomes = ranks.wait(DURATION_S + START_S)
    assert [outcome.exitcode for outcome in outcomes] == [0] * 4, outcomes
    done = [path.name for path in tmp_path.glob("done*")]
    assert len(done) == 4 and len({name.rpartition("-")[2] for name in done}) == 1
    assert reports(tmp_path) == []
