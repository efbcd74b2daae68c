"""What befalls a fit, beside a wrong weight: callbacks that stand around SCOUT's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L

from scout_core.health import HealthConfig
from scout_core.health.fake_nvml import FakeNvml
from scout_core.health.watch import HealthWatch
from scout_core.manager_api import SCOUTFaultReport
from scout_lightning import ScoutCallback
from tests.plugins.lightning.fits import share_parameters


class Told:
    """A job's own answer to corruption; counts how often it was asked for."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self, reports: list[SCOUTFaultReport]) -> None:
        self.times += 1


class Share(L.Callback):
    """Before the step after `at` all ranks take rank 0's parameters."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.at:
            share_parameters(pl_module)


class Hardware(L.Callback):
    """After step `at` the (fake) GPU of rank 1 tells of `sign`, to the real monitor, which tells the session."""

    def __init__(self, at: int, sign: dict[str, Any]) -> None:
        self.at = at
        self.sign = sign

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != self.at or trainer.global_rank != 1:
            return
        (scout,) = [one.scout for one in trainer.callbacks if isinstance(one, ScoutCallback)]
        assert scout is not None
        nvml = FakeNvml({"devices": [self.sign]})
        watch = HealthWatch(
            HealthConfig(), rank=1, ordinal=0, deliver=scout._take_hardware, module=nvml, environ={}, kernel_log=None
        )
        assert watch.monitor is not None
        for _ in range(3):
            watch.monitor.poll_once()
        watch.close()


class Save(L.Callback):
    """The ranks `ranks` save once the optimizer has stepped `at` times, wherever this callback stands."""

    def __init__(self, path: Path, at: int, ranks: tuple[int, ...]) -> None:
        self.path = path
        self.at = at
        self.ranks = ranks

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self.at and trainer.global_rank in self.ranks:
            trainer.save_checkpoint(self.path)
