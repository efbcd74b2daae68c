"""Blocking time of a GEMINI capture on the training thread: `python -m benchmarks.capture [--mib N]`.

On the CPU against one memcpy of the same bytes (must be at most 1.5 times that); on CUDA against the bare launch of
the device-to-host copies (at most 1.2 times that, and 10 ms for 12 GB, which is the default there).

`capture_ms` is the call that begins a capture; with an update right after it, which must wait for the launch of all
copies, it is `at_once_ms`. On CUDA `lost_ms` is what a training thread that launches kernels all the time loses to the
capture, whose copies another thread launches and seals meanwhile. `first_ms` is the first capture, which allocates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from scout_core.trust.memory import Capture, HostMemory
from scout_core.trust.states import TrustState

ROUNDS = 15
KERNELS = 4000


def state(mib: int, device: str) -> dict[str, torch.Tensor]:
    """Training state of about `mib` MiB: tensors of 16 MiB as of a large model, and some small ones."""
    large = {f"large{i}": torch.randn(4 << 20, device=device) for i in range(max(mib // 16, 1))}
    return {**large, **{f"small{i}": torch.randn(256, device=device) for i in range(64)}}


def median_ms(
    function: Callable[[], Any], after: Callable[[Any], object] = lambda _: None, rounds: int = ROUNDS
) -> float:
    """Median wall time of a call on this thread, after two calls that are not counted, nor is `after` each."""
    times = []
    for index in range(rounds + 2):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        result = function()
        if index >= 2:
            times.append((time.perf_counter() - started) * 1e3)
        after(result)
    return statistics.median(times)


def lost_ms(begin: Callable[[], Capture]) -> dict[str, float]:
    """What launching kernels takes on this thread, and how much longer with a capture begun before it."""
    small = torch.zeros(256, device="cuda")

    def train() -> None:
        for _ in range(KERNELS):
            small.add_(1)

    def both() -> threading.Thread:
        thread = threading.Thread(target=begin().finish)
        thread.start()
        train()
        return thread

    alone = median_ms(train)
    return {"kernels_ms": alone, "lost_ms": median_ms(both, after=lambda thread: thread.join()) - alone}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mib = parser.parse_args().mib or (12 << 10 if device == "cuda" else 512)
    torch.set_num_threads(1)
    live = state(mib, device)
    bare = [torch.empty(t.shape, dtype=t.dtype, pin_memory=device == "cuda") for t in live.values()]
    memory = HostMemory(owner=0)

    def copy() -> None:
        for target, source in zip(bare, live.values(), strict=True):
            target.copy_(source, non_blocking=True)

    def begin() -> Capture:
        return memory.begin(1, TrustState.RECOVERY_VERIFIED, live)

    def at_once() -> None:
        begin().hold()

    started = time.perf_counter()
    begin().finish()
    first_ms = (time.perf_counter() - started) * 1e3
    begin().finish()  # both buffers exist afterwards
    assert memory.latest is not None
    kept = memory.latest.load()
    assert all(torch.equal(kept.pop(name), tensor.cpu()) for name, tensor in live.items()), "the copy has other bits"
    figures: dict[str, Any] = {"device": device, "tensors": len(live)}
    figures["bytes"] = sum(t.numel() * t.element_size() for t in live.values())
    figures |= {"first_ms": first_ms, "bare_ms": median_ms(copy), "capture_ms": median_ms(begin, after=Capture.hold)}
    figures["at_once_ms"] = median_ms(at_once)
    if device == "cuda":
        figures |= lost_ms(begin)
    named = ("capture_ms", "at_once_ms", "lost_ms")
    ratios = {name.replace("_ms", "_ratio"): figures[name] / figures["bare_ms"] for name in named if name in figures}
    print(json.dumps({**figures, **ratios}))


if __name__ == "__main__":
    main()
