"""Speed of tensor signatures beside torch.sum on the same tensor: `python -m benchmarks.signature_speed`.

Signature and sum alternate, so that both see the same machine; printed are the medians and the median of the paired
ratios (above 1: the signature is faster). CPU is measured on one thread, CUDA by events on one stream. The last case is
a list of many small tensors, where the number of launches and the host's own time decide.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch

from scout_core.consensus.signature import signatures, tensor_signature

_MIB = 1 << 20


def _cpu_seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _cuda_seconds(call: Callable[[], object]) -> float:
    """Device time from the first to the last launch of the call."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(1_000_000)  # the device starts late, so that the host's launches are not what is measured
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _compare(
    label: str,
    byte_count: int,
    ours: Callable[[], object],
    reference: Callable[[], object],
    seconds: Callable[[Callable[[], object]], float],
    repeats: int,
) -> None:
    """Print one line: GB/s of both (decimal), and the median over pairs of reference time / our time."""
    for _ in range(5):
        ours(), reference()
    pairs = [(seconds(ours), seconds(reference)) for _ in range(repeats)]
    our_s, reference_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(reference / our for our, reference in pairs)
    print(
        f"{label:34s} signature {byte_count / our_s / 1e9:8.1f} GB/s {our_s * 1e6:9.1f} us   "
        f"torch.sum {byte_count / reference_s / 1e9:8.1f} GB/s {reference_s * 1e6:9.1f} us   ratio {ratio:5.2f}"
    )


def _small_tensors(device: str) -> list[torch.Tensor]:
    """500 float32 tensors of 1 to 16,384 elements: biases, norms and small matrices."""
    lengths = random.Random(0)
    return [torch.randn(lengths.randint(1, 16_384), device=device) for _ in range(500)]


def _run(device: str, sizes_mib: list[int], repeats: int) -> None:
    seconds = _cpu_seconds if device == "cpu" else _cuda_seconds
    for size in sizes_mib:
        tensor = torch.randn(size * _MIB // 4, device=device)
        # tensor_signature waits for the device; signatures is what a check calls there.
        ours = (lambda t=tensor: tensor_signature(t)) if device == "cpu" else (lambda t=tensor: signatures([t]))
        _compare(f"{device} float32 {size} MiB", tensor.nbytes, ours, tensor.sum, seconds, repeats)
    if device == "cuda":
        shifted = torch.randn(256 * _MIB // 4 + 1, device=device)[1:]
        _compare("cuda 256 MiB at 4-byte alignment", shifted.nbytes, lambda: signatures([shifted]), shifted.sum,
                 seconds, repeats)  # fmt: skip
    small = _small_tensors(device)
    byte_count = sum(tensor.nbytes for tensor in small)
    _compare(f"{device} 500 small tensors", byte_count, lambda: signatures(small),
             lambda: [tensor.sum() for tensor in small], seconds, repeats)  # fmt: skip
    host_s = statistics.median(_cpu_seconds(lambda: signatures(small)) for _ in range(repeats))
    print(f"{device} 500 small tensors, host time {host_s * 1e6:.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=101, help="pairs a case")
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    _run("cpu", [1, 64], repeats)
    if torch.cuda.is_available():
        _run("cuda", [1, 16, 256, 2048], repeats)


if __name__ == "__main__":
    main()
