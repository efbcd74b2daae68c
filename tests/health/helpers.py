"""A node of fake GPUs under a monitor whose clock the test turns."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scout_core.health import HardwareHealthMonitor, HealthConfig, HealthEvent, HealthSource, NvmlSource, XidSource
from scout_core.health.fake_nvml import FakeNvml


class Clock:
    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class Node:
    """`devices` describe the fake GPUs. Polls are 10 s apart unless told otherwise."""

    def __init__(
        self,
        devices: Sequence[dict[str, Any]],
        *,
        config: HealthConfig | None = None,
        sources: Sequence[HealthSource] | None = None,
        kernel_log: Path | None = None,
        init_error: str | None = None,
    ) -> None:
        self.clock = Clock()
        self.nvml = FakeNvml({"devices": list(devices)})
        self.nvml.init_error = init_error
        self.alarms: list[HealthEvent] = []
        self.told: list[HealthEvent] = []
        self.xids = XidSource(module=self.nvml, kernel_log=kernel_log, clock=self.clock)
        if sources is None:
            sources = [*(NvmlSource(device_index=i, module=self.nvml) for i in range(len(devices))), self.xids]
        self.monitor = HardwareHealthMonitor(
            config or HealthConfig(),
            sources,
            on_event=self.alarms.append,
            on_warning=self.told.append,
            clock=self.clock,
        )

    def __enter__(self) -> Node:
        return self

    def __exit__(self, *exc: object) -> None:
        self.monitor.close()

    def uuid(self, index: int) -> str:
        return str(self.nvml.devices[index].uuid)

    def poll(self, times: int = 1, seconds: float = 10.0) -> None:
        for _ in range(times):
            self.monitor.poll_once()
            self.clock.now_s += seconds

    def alarm_keys(self) -> list[tuple[str, str]]:
        return [event.key for event in self.alarms]

    def warning_keys(self) -> list[tuple[str, str]]:
        return [event.key for event in self.told if event.severity.value == "warning"]
