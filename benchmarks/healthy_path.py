"""What SCOUT costs a healthy job: a check against its floor, and a step that does not check.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.healthy_path [--width 512 --layers 4 ...]

The floor of a check is the bare forward and backward of the replayed modules on the same inputs, plus one optimizer
step on the same slice, timed in the same run. Steps that do not check are compared with the same loop without SCOUT in
alternating blocks. On GPUs the ranks use NCCL with one GPU each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import scout_core


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_btd: torch.Tensor) -> torch.Tensor:
        b, t, d = x_btd.shape
        q, k, v = (
            part.view(b, t, self.heads, d // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x_btd)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d)
        x_btd = x_btd + self.proj(mixed)
        return x_btd + self.down(F.gelu(self.up(self.norm2(x_btd))))


class GPT(nn.Module):
    """Embedding, layers, final norm, head."""

    def __init__(self, vocab: int, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids_bt: torch.Tensor) -> torch.Tensor:
        x_btd = self.embedding(ids_bt) + self.position[: ids_bt.shape[1]]
        for layer in self.layers:
            x_btd = layer(x_btd)
        return self.head(self.norm(x_btd))


def synchronize(device: torch.device) -> None:
    """Wait for a GPU; nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Wall time of `work`, a GPU waited for."""
    synchronize(device)
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


class Job:
    """A DDP training loop on random tokens."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(0)
        dtype = getattr(torch, options.dtype)
        model = GPT(options.vocab, options.width, options.layers, options.heads, options.context)
        self.device, self.options = device, options
        self.plain = model.to(device=device, dtype=dtype)
        self.ddp = nn.parallel.DistributedDataParallel(
            self.plain, device_ids=[device.index] if device.type == "cuda" else None
        )
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-4)
        shape = (options.batch, options.context + 1)
        self.ids = torch.randint(0, options.vocab, shape, device=device)

    def step(self) -> None:
        logits = self.ddp(self.ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), self.ids[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def floor(job: Job, slice_elements: int, repeats: int) -> float:
    """Median seconds of forward and backward of embedding, one layer and head, plus AdamW on a slice."""
    options, device = job.options, job.device
    dtype = next(job.plain.parameters()).dtype
    hidden = torch.randn(options.batch, options.context, options.width, device=device, dtype=dtype)
    ids = job.ids[:, :-1]
    logits_gradient = torch.randn(options.batch, options.context, options.vocab, device=device, dtype=dtype)
    count = min(slice_elements, sum(p.numel() for p in job.plain.parameters()))
    part = nn.Parameter(torch.randn(count, device=device, dtype=dtype))
    part.grad = torch.randn_like(part)
    adam = torch.optim.AdamW([part], lr=1e-4)

    def bare() -> None:
        for module, value, gradient in (
            (job.plain.embedding, ids, hidden),
            (job.plain.layers[0], hidden.detach().requires_grad_(), hidden),
            (job.plain.head, hidden.detach().requires_grad_(), logits_gradient),
        ):
            leaves = [p for p in module.parameters() if p.requires_grad]
            leaves += [value] if value.is_floating_point() else []
            torch.autograd.grad(module(value), leaves, gradient)
        adam.step()

    return statistics.median([seconds(device, bare) for _ in range(repeats)][1:])


def measure_checks(job: Job, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Seconds that a check adds to its step, and seconds of the floor, measured in turn.

    Every second step checks; a check's cost is that step's time less the time of the step before, which does not.
    """
    scout = scout_core.attach(job.ddp, job.optimizer, check_interval=2)
    for _ in range(2 * options.layers + 2):  # every layer is qualified once
        job.step()
    added, floors = [], []
    for _ in range(options.checks):
        without = seconds(job.device, job.step)
        added.append(seconds(job.device, job.step) - without)
        floors.append(floor(job, scout.config.replay.optimizer_slice_elements, 5))
        assert scout.last_result is not None and scout.last_result.step == scout.step_count
        if not scout.last_result.trustworthy:
            raise SystemExit(f"a healthy check was not clean: {scout.last_result.to_json()}")
    scout.close()
    return added, floors


def measure_idle_steps(job: Job, options: argparse.Namespace) -> tuple[float, float]:
    """Median step seconds without SCOUT and with SCOUT attached but never due, in alternating blocks of one run."""
    plain, watched = [], []
    for _ in range(options.blocks):
        plain += [seconds(job.device, job.step) for _ in range(options.block)]
        with scout_core.attach(job.ddp, job.optimizer, check_interval=10**9):
            watched += [seconds(job.device, job.step) for _ in range(options.block)]
    return statistics.median(plain), statistics.median(watched)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (
        ("width", 512), ("layers", 4), ("heads", 8), ("vocab", 512), ("context", 256), ("batch", 2),
        ("checks", 12), ("blocks", 6), ("block", 8),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    job = Job(options, device)
    for _ in range(3):
        job.step()
    attach_s = seconds(device, lambda: scout_core.attach(job.ddp, job.optimizer, check_interval=0).close())
    idle_plain, idle_watched = measure_idle_steps(job, options)
    checks, floors = measure_checks(job, options)
    check, base = statistics.median(checks), statistics.median(floors)
    if dist.get_rank() == 0:
        figures = {
            "parameters_M": round(sum(p.numel() for p in job.plain.parameters()) / 1e6, 1),
            "ranks": dist.get_world_size(),
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "attach_s": round(attach_s, 3),
            "step_ms": round(idle_plain * 1e3, 3),
            "unchecked_step_ratio": round(idle_watched / idle_plain, 4),
            "check_ms": round(check * 1e3, 3),
            "floor_ms": round(base * 1e3, 3),
            "check_over_floor": round(check / base, 3),
            "amortized_percent_interval_10": round(100 * check / (10 * idle_plain), 2),
        }
        print(json.dumps(figures, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
