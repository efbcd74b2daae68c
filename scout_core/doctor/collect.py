"""Reading one rank's facts from its process and host. Local: no collective, and nothing is changed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import scout_core
from scout_core.doctor.facts import RankFacts
from scout_core.health.identity import IdentityError, Selector, resolve
from scout_core.health.nvml_api import NvmlApi, NvmlUnavailable
from scout_core.health.types import DeviceIdentity
from scout_core.replay.isolation import strict_determinism_possible

_ENVIRONMENT = (
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "ATEN_CPU_CAPABILITY",
    "MKL_CBWR",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "OMP_NUM_THREADS",
)
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_CPU_FILE = Path("/proc/cpuinfo")
# Their functions carry no types.
_CUDNN: Any = torch.backends.cudnn
_CUDA: Any = torch.backends.cuda
_NCCL: Any = torch.cuda.nccl


def local_facts(
    *,
    rank: int = 0,
    world_size: int = 1,
    local_rank: int | None = None,
    in_job: bool = False,
    in_script: bool = False,
) -> RankFacts:
    """The facts of the calling process.

    `local_rank` chooses the accelerator of a process that has not set its own; None takes the current one. `in_script`
    says that the process is a training script, whose flags count.
    """
    device = _device(local_rank)
    cuda = device.type == "cuda"
    known = _nvml_identity(device) if cuda else DeviceIdentity(host=socket.gethostname())
    initialized = dist.is_available() and dist.is_initialized()
    return RankFacts(
        rank=rank,
        world_size=world_size,
        in_job=in_job,
        in_script=in_script,
        host=socket.gethostname(),
        device="cpu" if device.type == "cpu" else str(device),
        device_name=torch.cuda.get_device_name(device) if cuda else "",
        device_uuid=known.uuid,
        mig_uuid=known.mig_uuid,
        pci_bus_id=known.pci_bus_id,
        nvml_index=known.nvml_index,
        devices_visible=torch.accelerator.device_count(),
        backend=dist.get_backend() if initialized else None,
        backends=_backends(),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        threads=torch.get_num_threads(),
        strict_determinism=strict_determinism_possible(),
        gpu_driver_loaded=_DRIVER_FILE.exists(),
        versions=_versions(),
        settings=_settings(),
    )


def _device(local_rank: int | None) -> torch.device:
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    kind = torch.accelerator.current_accelerator()
    assert kind is not None
    if local_rank is None:
        return torch.device(kind.type, torch.accelerator.current_device_index())
    return torch.device(kind.type, local_rank % torch.accelerator.device_count())


def _nvml_identity(device: torch.device) -> DeviceIdentity:
    """What NVML calls a CUDA device; without NVML, or where the environment does not tell, what torch calls it."""
    nvml = NvmlApi()
    try:
        nvml.open()
        try:
            return resolve(Selector(cuda_ordinal=device.index), nvml).identity
        finally:
            nvml.close()
    except (NvmlUnavailable, IdentityError):
        properties: Any = torch.cuda.get_device_properties(device)
        return DeviceIdentity(host=socket.gethostname(), uuid=f"GPU-{properties.uuid}", cuda_ordinal=device.index)


def _backends() -> tuple[str, ...]:
    if not dist.is_available():
        return ()
    there = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
        "xccl": dist.is_xccl_available(),
    }
    return tuple(name for name, available in there.items() if available)


def _versions() -> dict[str, str | None]:
    cudnn = _CUDNN.version() if _CUDNN.is_available() else None
    return {
        "scout": scout_core.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": None if cudnn is None else str(cudnn),
        "nccl": _nccl(),
        "triton": _installed("triton"),
        "pynvml": _installed("nvidia-ml-py"),
        "driver": _driver(),
        "kernel": platform.release(),
        "cpu_model": _cpu_model(),
        "cpu_isa": torch.backends.cpu.get_cpu_capability(),
    }


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nccl() -> str | None:
    if not (dist.is_available() and dist.is_nccl_available()):
        return None
    return ".".join(map(str, _NCCL.version()))


def _driver() -> str | None:
    """Version of the loaded NVIDIA kernel module; no library of the driver is asked."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)", _DRIVER_FILE.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found[1] if found else None


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", _CPU_FILE.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()


def _settings() -> dict[str, str | None]:
    """Flags that change bits or kernels, as text, and the environment variables that do."""
    matmul = _CUDA.matmul
    reduced = (matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction)
    sdp = {
        "flash": _CUDA.flash_sdp_enabled(),
        "efficient": _CUDA.mem_efficient_sdp_enabled(),
        "math": _CUDA.math_sdp_enabled(),
        "cudnn": _CUDA.cudnn_sdp_enabled(),
    }
    algorithms = "off"
    if torch.are_deterministic_algorithms_enabled():
        algorithms = "warn" if torch.is_deterministic_algorithms_warn_only_enabled() else "on"
    return {
        "deterministic_algorithms": algorithms,
        "matmul_precision": torch.get_float32_matmul_precision(),
        "cudnn_tf32": _switch(_CUDNN.allow_tf32),
        "cudnn_benchmark": _switch(_CUDNN.benchmark),
        "cudnn_deterministic": _switch(_CUDNN.deterministic),
        "reduced_precision": f"float16 {reduced[0]}, bfloat16 {reduced[1]}",
        "sdp_kernels": ", ".join(name for name, enabled in sdp.items() if enabled),
        **{name: os.environ.get(name) for name in _ENVIRONMENT},
    }


def _switch(on: bool) -> str:
    return "on" if on else "off"
