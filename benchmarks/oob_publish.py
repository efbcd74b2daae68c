"""Cost of the out-of-band publisher: one write, one collective, the hooks of a step with eight layers; its observer.

`python -m benchmarks.oob_publish` on an idle machine; CPU only, one process and its observer.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import psutil
import torch
from torch import nn

import scout_core
from scout_core.oob.channel import Channel, Scope
from scout_core.oob.fingerprints import describe
from scout_core.oob.layout import CallState
from scout_core.oob.writer import Publisher

_WRITES = 100_000
_PASSES = 300
_WATCHED_S = 10.0


def publish_us() -> tuple[float, float]:
    """Microseconds of one progress write, and of one collective's two writes; the best of five runs."""
    with tempfile.TemporaryDirectory() as folder:
        scope = Scope(run="bench", attempt=0, pid=0, peers=(0,), rank=0)
        channel = Channel.create(scope, world=1, folder=Path(folder))
        publisher = Publisher(channel.memory, (0,))
        what = describe("all_reduce", ("float32[4]", "SUM"), "a.py:1")
        single, pair = [], []
        for _ in range(5):
            started = time.perf_counter()
            for _ in range(_WRITES):
                publisher.publish()
            single.append(time.perf_counter() - started)
            started = time.perf_counter()
            for _ in range(_WRITES // 10):
                publisher.end_call(*publisher.begin_call((0, 1), what), CallState.RETURNED)
            pair.append(time.perf_counter() - started)
        channel.close(unlink=True, folder=Path(folder))
    return min(single) / _WRITES * 1e6, min(pair) / (_WRITES // 10) * 1e6


def forward_us(model: nn.Module) -> float:
    """Microseconds of a forward pass; the best of `_PASSES`."""
    x, best = torch.ones(1, 8), float("inf")
    for _ in range(_PASSES):
        started = time.perf_counter()
        model(x)
        best = min(best, time.perf_counter() - started)
    return best * 1e6


def main() -> None:
    """Print the figures."""
    write, collective = publish_us()
    print(f"one publish {write:.2f} us; one collective (enter and leave) {collective:.2f} us")
    model = nn.Sequential(nn.Sequential(*[nn.Sequential(nn.Linear(8, 8)) for _ in range(8)]), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bare = forward_us(model)
    started = time.perf_counter()
    with scout_core.attach(model, optimizer, check_interval=0) as scout:
        print(f"attach {time.perf_counter() - started:.2f} s")
        extra = forward_us(model) - bare
        print(f"8 layers add {extra:.1f} us a pass: {extra / 50_000:.3%} of a 50 ms step")
        observer = psutil.Process(scout.observer_pid)
        before, end = observer.cpu_times(), time.monotonic() + _WATCHED_S
        while time.monotonic() < end:
            model(torch.ones(1, 8))
            time.sleep(0.01)
        after = observer.cpu_times()
        used = after.user + after.system - before.user - before.system
        rss = observer.memory_info().rss / 2**20
        print(f"observer: {rss:.0f} MiB resident, {used / _WATCHED_S:.3%} of a core while training progresses")


if __name__ == "__main__":
    main()
