"""Whether the health monitor's memory stays flat while a node of fake GPUs misbehaves in every way that can grow.

    python -m benchmarks.health_soak [--minutes 30] [--hz 100] [--devices 2]

Runs a started monitor on its own threads at the given rate. Meanwhile counters rise, links fail and recover,
temperatures cross their limits and XIDs come in, so that every history is in use. Prints the resident memory once a
minute and at the end the rate that was reached, growth and its slope over the last nine tenths of the time.
Exit code 0: memory grew by less than 1 MiB in that time and the rate was at least nine tenths of the one asked for.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import psutil

from scout_core.health import HardwareHealthMonitor, HealthConfig, HealthSource, NvmlSource, XidSource
from scout_core.health.fake_nvml import FakeNvml

GROWTH_LIMIT_BYTES = 1 << 20
_SAMPLE_S = 5.0


def disturb(nvml: FakeNvml, tick: int) -> None:
    """One more step of trouble on every device: some of it fatal at the first, all of it going on for ever."""
    for device in nvml.devices:
        device.ecc_correctable += 3
        device.ecc_uncorrectable += tick % 100 == 0
        device.temperature = 60 + tick % 40
        device.clock_events = (0x00, 0x40, 0x04, 0x01)[tick % 4]
        device.remapped = [tick, 0, tick // 50 % 2, 0]
        device.link_crc = {"3": tick}
        device.errors = {"*": "UNKNOWN"} if tick % 500 < 3 else {}
    nvml.emit_xid(tick % len(nvml.devices), (13, 31, 45, 63, 94)[tick % 5])


def slope(samples: Sequence[tuple[float, int]]) -> float:
    """Least-squares growth in bytes a minute of (seconds, bytes)."""
    times, sizes = [when / 60 for when, _ in samples], [float(size) for _, size in samples]
    return statistics.linear_regression(times, sizes).slope


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--hz", type=float, default=100.0)
    parser.add_argument("--devices", type=int, default=2)
    options = parser.parse_args(arguments)
    nvml = FakeNvml({"devices": [{} for _ in range(options.devices)]})
    sources: list[HealthSource] = [NvmlSource(device_index=i, module=nvml) for i in range(options.devices)]
    sources.append(XidSource(module=nvml, kernel_log=None))
    config = HealthConfig(poll_interval_s=1 / options.hz, read_deadline_s=10.0)
    process, samples = psutil.Process(), []
    began = time.monotonic()
    duration_s = 60 * options.minutes
    with HardwareHealthMonitor(config, sources, on_event=lambda _: None, on_warning=lambda _: None) as monitor:
        tick = 0
        while (now := time.monotonic() - began) < duration_s:
            disturb(nvml, tick)
            tick += 1
            if not samples or now - samples[-1][0] >= min(_SAMPLE_S, duration_s / 50):
                samples.append((now, process.memory_info().rss))
                if len(samples) % 12 == 1:
                    print(f"{now:7.0f} s  {monitor.polls:8d} polls  {samples[-1][1] / 2**20:8.2f} MiB", flush=True)
            time.sleep(1 / options.hz)
        polls = monitor.polls
        fatal, warned = len(monitor.fatal_events), len(monitor.warnings)
    steady = [sample for sample in samples if sample[0] > 0.1 * duration_s]
    growth = steady[-1][1] - steady[0][1]
    rate = polls / (time.monotonic() - began)
    print(f"{polls} polls in {duration_s / 60:g} min, {rate:.1f} a second; {fatal} fatal, {warned} other events kept")
    print(
        f"resident memory {steady[0][1] / 2**20:.2f} -> {steady[-1][1] / 2**20:.2f} MiB after the first tenth "
        f"(growth {growth / 1024:.0f} KiB, slope {slope(steady) / 1024:.2f} KiB a minute)"
    )
    return 0 if growth < GROWTH_LIMIT_BYTES and rate >= 0.9 * options.hz else 1


if __name__ == "__main__":
    raise SystemExit(main())
