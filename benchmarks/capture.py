"""Blocking time of a GEMINI capture on the training thread: `python -m benchmarks.capture [--mib N]`.

On the CPU against one memcpy of the same bytes (must be at most 1.5 times that); on CUDA against the bare launch of
the device-to-host copies (at most 1.2 times that, and 10 ms for 12 GB).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch

from scout_core.trust.memory import HostMemory
from scout_core.trust.states import TrustState

ROUNDS = 15


def state(mib: int, device: str) -> dict[str, torch.Tensor]:
    """Training state of about `mib` MiB: tensors of 16 MiB as of a large model, and some small ones."""
    large = {f"large{i}": torch.randn(4 << 20, device=device) for i in range(max(mib // 16, 1))}
    return {**large, **{f"small{i}": torch.randn(256, device=device) for i in range(64)}}


def median_ms(function: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median wall time of a call on this thread, after two calls that are not counted."""
    times = []
    for index in range(rounds + 2):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        started = time.perf_counter()
        function()
        if index >= 2:
            times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512)
    mib = parser.parse_args().mib
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    live = state(mib, device)
    bare = [torch.empty(t.shape, dtype=t.dtype, pin_memory=device == "cuda") for t in live.values()]
    memory = HostMemory(owner=0)

    def copy() -> None:
        for target, source in zip(bare, live.values(), strict=True):
            target.copy_(source, non_blocking=True)

    def capture() -> None:
        captures.append(memory.begin(1, TrustState.RECOVERY_VERIFIED, live))

    captures: list[object] = []
    for _ in range(2):  # both buffers exist afterwards
        memory.begin(0, TrustState.RECOVERY_VERIFIED, live).finish()
    bare_ms, capture_ms = median_ms(copy), median_ms(capture)
    total = sum(t.numel() * t.element_size() for t in live.values())
    figures = {"device": device, "bytes": total, "bare_ms": bare_ms, "capture_ms": capture_ms}
    print(json.dumps({**figures, "ratio": capture_ms / bare_ms}))


if __name__ == "__main__":
    main()
