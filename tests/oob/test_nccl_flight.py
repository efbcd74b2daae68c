"""On two GPUs: a rank that never comes to a collective, and NCCL's flight record in the evidence."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import scout_core
from tests.distributed.pool import own_ranks
from tests.oob.jobs import as_script, fast, first_report, idle

RANKS = 2


def hang_on_gpu(run_dir: str, size: str) -> None:
    """Rank 1 stays away from the third reduction; rank 0 waits for it on the device.

    NCCL's recorder reads its size when the first group is made, the observer when it starts: both come later.
    """
    os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = size
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    model = nn.Sequential(nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)]), nn.Linear(8, 8)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scout_core.attach(model, optimizer, run_dir=run_dir, **fast())
    group = dist.new_group(backend="nccl")
    for step in range(3):
        model(torch.ones(2, 8, device=device)).sum().backward()
        if rank == 1 and step == 2:
            idle()
        values = torch.ones(4, device=device)
        dist.all_reduce(values, group=group)
        optimizer.step()
        torch.cuda.synchronize()
    idle()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")
@pytest.mark.parametrize("size", ["2000", "0"])
def test_nccls_flight_record_is_in_the_bundle_when_torch_keeps_one(tmp_path: Path, size: str) -> None:
    with own_ranks(RANKS, as_script, hang_on_gpu, str(tmp_path), size, timeout=180):
        report = first_report(tmp_path)
    assert 0 not in report["ranks"], "the rank that waits is not at fault"
    bundle = Path(report["evidence"]["bundle"])
    if size == "0":
        assert (bundle / "report.json").exists() and not list(bundle.glob("nccl_flight_*"))
        return
    waiting = pickle.loads((bundle / "nccl_flight_0").read_bytes())["entries"]
    names = [entry["profiling_name"] for entry in waiting]
    assert names.count("nccl:all_reduce") >= 3 and waiting[-1]["state"] != "completed"
    absent = pickle.loads((bundle / "nccl_flight_1").read_bytes())["entries"]
    assert [e["profiling_name"] for e in absent].count("nccl:all_reduce") == names.count("nccl:all_reduce") - 1
