"""What one rank says about itself: plain values, so that every judgement on them is pure and they travel as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from scout_core.health.types import DeviceIdentity


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """One rank's machine, device, versions and settings.

    `device` is `cpu` or the accelerator with its ordinal (`cuda:0`). `device_uuid` (the physical device's), `mig_uuid`,
    `pci_bus_id` and `nvml_index` are what NVML calls it, where known. `backend` is that of the job's default process
    group, None outside a job. `cores` are the CPU numbers this process may run on, `threads` torch's CPU threads.
    `versions` and `settings` map a name to its text, None if absent. `in_script` is True where the facts were read
    inside the training script, so that torch's flags are the job's own. `strict_determinism` tells whether replays can
    run under strict deterministic kernels. `gpu_driver_loaded` is True when the host has an NVIDIA driver, whether or
    not torch can use it.
    """

    rank: int = 0
    world_size: int = 1
    in_job: bool = False
    in_script: bool = False
    host: str
    device: str = "cpu"
    device_name: str = ""
    device_uuid: str | None = None
    mig_uuid: str | None = None
    pci_bus_id: str | None = None
    nvml_index: int | None = None
    devices_visible: int = 0
    backend: str | None = None
    backends: tuple[str, ...] = ()
    cores: tuple[int, ...] = (0,)
    threads: int = 1
    strict_determinism: bool = True
    gpu_driver_loaded: bool = False
    versions: Mapping[str, str | None] = field(default_factory=dict)
    settings: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def accelerated(self) -> bool:
        """Whether the rank trains on something other than the CPU."""
        return self.device != "cpu"

    @property
    def identity(self) -> DeviceIdentity:
        """The rank's device under all its names."""
        return DeviceIdentity(
            host=self.host,
            uuid=self.device_uuid,
            pci_bus_id=self.pci_bus_id,
            name=self.device_name or self.device,
            nvml_index=self.nvml_index,
            cuda_ordinal=int(self.device.partition(":")[2]) if self.device.startswith("cuda:") else None,
            mig_uuid=self.mig_uuid,
            rank=self.rank,
        )

    def to_json(self) -> dict[str, Any]:
        """A plain dict for strict JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RankFacts:
        """The facts `to_json` wrote. Unknown keys are an error (`TypeError`)."""
        return cls(**{**record, "backends": tuple(record["backends"]), "cores": tuple(record["cores"])})
