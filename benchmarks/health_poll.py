"""Every health reading of every GPU here, what one poll costs, and whether a CUDA context came of it.

    python -m benchmarks.health_poll [--polls 200] [--fake FILE]

Prints driver and module versions, the table of `scout health`, poll times (median, 95th percentile, maximum, in ms)
per device, the slowest NVML calls, and the proof that NVML alone was used: no process of this pid among the GPUs'
compute processes, torch's CUDA not initialized. (That libcuda is mapped comes of `import torch`, not of a context.)
The target is a poll of at most 20 ms and no context.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from scout_core.health import HardwareHealthMonitor, HealthConfig, NvmlSource, XidSource
from scout_core.health.fake_nvml import FakeNvml
from scout_core.health.nvml_api import NvmlApi, NvmlUnavailable
from scout_core.health.table import health_lines

TARGET_MS = 20.0


class TimedModule:
    """`pynvml`, or the fake, with the time of each function added up."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self.spent_s: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if not name.startswith("nvml") or not callable(value):
            return value

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return value(*arguments)
            finally:
                self.spent_s[name] += time.perf_counter() - began
                self.calls[name] += 1

        return timed


def poll_times_ms(source: NvmlSource | XidSource, polls: int) -> list[float]:
    times = []
    for _ in range(polls):
        began = time.perf_counter()
        source.read()
        times.append(1e3 * (time.perf_counter() - began))
    return times


def cuda_context_evidence(module: Any) -> list[str]:
    nvml = NvmlApi(module)
    nvml.open()
    count = nvml.ask("nvmlDeviceGetCount")
    found = []
    for index in range(count.value if count.ok else 0):
        handle = nvml.ask("nvmlDeviceGetHandleByIndex", index)
        running = nvml.ask("nvmlDeviceGetComputeRunningProcesses", handle.value)
        mine = [process for process in running.value if process.pid == os.getpid()] if running.ok else None
        found.append(f"nvml:{index}: " + (running.reason if mine is None else f"{len(mine)} of my processes"))
    nvml.close()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    found.append("libcuda mapped: " + ("yes" if "libcuda.so" in maps else "no"))
    torch = sys.modules.get("torch")
    found.append("torch CUDA initialized: " + (str(torch.cuda.is_initialized()) if torch else "torch not imported"))
    return found


def summary(times: list[float]) -> str:
    steady = sorted(times[1:])
    p95 = steady[min(len(steady) - 1, int(0.95 * len(steady)))]
    return f"first {times[0]:.2f}, median {statistics.median(steady):.2f}, p95 {p95:.2f}, max {steady[-1]:.2f} ms"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--polls", type=int, default=200)
    parser.add_argument("--fake", type=Path)
    options = parser.parse_args()
    if options.fake is None and importlib.util.find_spec("pynvml") is None:
        print("the pynvml module is missing; install scout-suite[nvml]")
        return 3
    real = FakeNvml.from_file(options.fake) if options.fake else importlib.import_module("pynvml")
    module = TimedModule(real)
    nvml = NvmlApi(module)
    try:
        nvml.open()
    except NvmlUnavailable as error:
        print(error)
        return 3
    version = "fake" if options.fake else importlib.metadata.version("nvidia-ml-py")
    print(f"driver {nvml.ask('nvmlSystemGetDriverVersion').value}, nvidia-ml-py {version}")
    count = nvml.ask("nvmlDeviceGetCount").value
    sources = [NvmlSource(device_index=index, module=module) for index in range(count)]
    xids = XidSource(module=module)

    monitor = HardwareHealthMonitor(HealthConfig(confirmations=1), [*sources, xids])
    monitor.poll_once()
    monitor.poll_once()
    print("\n".join(health_lines(monitor.readings(), monitor.status(), monitor.fatal_events + monitor.warnings)))
    monitor.close()

    worst = 0.0
    for source in [*(NvmlSource(device_index=index, module=module) for index in range(count)), xids]:
        module.spent_s.clear()
        module.calls.clear()
        times = poll_times_ms(source, max(3, options.polls))
        print(f"\npoll of {source.name}: {summary(times)}")
        slow = sorted(module.spent_s, key=lambda name: module.spent_s[name], reverse=True)[:6]
        for name in slow:
            each = 1e3 * module.spent_s[name] / module.calls[name]
            print(f"  {1e3 * module.spent_s[name] / len(times):8.3f} ms a poll  {each:8.4f} ms a call  {name}")
        worst = max(worst, statistics.median(times[1:]))
        source.close()
    print()
    evidence = cuda_context_evidence(module)
    print("\n".join(evidence))
    nvml.close()
    print(f"worst median poll {worst:.2f} ms, target {TARGET_MS:g} ms: {'met' if worst <= TARGET_MS else 'MISSED'}")
    return 0 if worst <= TARGET_MS else 1


if __name__ == "__main__":
    raise SystemExit(main())
