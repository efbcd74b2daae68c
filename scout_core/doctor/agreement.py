"""What should be equal on all ranks and is not. Pure.

SCOUT compares bits. Anything that changes which kernel runs, or how it rounds, makes healthy peers differ, so most of
what is listed here is not tidiness: it is what keeps an innocent rank from being blamed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from scout_core.doctor.facts import RankFacts
from scout_core.doctor.findings import Finding, Severity, rank_text


@dataclass(frozen=True, kw_only=True)
class _Subject:
    """One thing to compare, and how grave a difference is for a job on CPUs and for one on accelerators."""

    key: str
    on_cpu: Severity
    on_gpu: Severity
    why: str
    fix: str


_BITS = "the same work then gives other bits, and a healthy rank would look corrupted"
_SAME_IMAGE = "use one container image, or pin one version, on every host"
_SAME_CALL = "set it in the training script, on every rank alike"
_SAME_ENV = "export the same value on every rank, or unset it everywhere"

_VERSIONS = (
    _Subject(
        key="scout", on_cpu="fatal", on_gpu="fatal",
        why="versions of SCOUT need not understand each other's checks", fix=_SAME_IMAGE,
    ),
    _Subject(key="torch", on_cpu="fatal", on_gpu="fatal", why=f"builds have other kernels: {_BITS}", fix=_SAME_IMAGE),
    _Subject(key="cuda", on_cpu="warning", on_gpu="fatal", why=f"CUDA libraries differ: {_BITS}", fix=_SAME_IMAGE),
    _Subject(key="cudnn", on_cpu="info", on_gpu="fatal", why=f"cuDNN kernels differ: {_BITS}", fix=_SAME_IMAGE),
    _Subject(
        key="nccl", on_cpu="info", on_gpu="warning",
        why="ranks with different NCCL versions may fail to connect, or hang", fix=_SAME_IMAGE,
    ),
    _Subject(
        key="triton", on_cpu="info", on_gpu="warning",
        why="SCOUT's signatures and compiled kernels come from Triton", fix=_SAME_IMAGE,
    ),
    _Subject(
        key="python", on_cpu="warning", on_gpu="warning",
        why="data order, seeds and dependencies may differ", fix=_SAME_IMAGE,
    ),
    _Subject(
        key="driver", on_cpu="info", on_gpu="warning",
        why="the driver compiles and schedules kernels; timing, and for compiled code bits, may differ",
        fix="install one driver version on every host",
    ),
    _Subject(
        key="kernel", on_cpu="info", on_gpu="info",
        why="it changes no results; timing and fault messages may differ",
        fix="boot one kernel version on every host when convenient",
    ),
    _Subject(
        key="cpu_isa", on_cpu="fatal", on_gpu="info",
        why=f"torch chooses CPU kernels by instruction set: {_BITS}",
        fix="train on hosts with equal CPUs, or export ATEN_CPU_CAPABILITY=avx2 (the least of them) on every rank",
    ),
    _Subject(
        key="cpu_model", on_cpu="warning", on_gpu="info",
        why="CPU libraries choose kernels by model, and speeds differ",
        fix="train on hosts with equal CPUs",
    ),
)  # fmt: skip

_SETTINGS = (
    _Subject(key="matmul_precision", on_cpu="fatal", on_gpu="fatal", why=f"TF32 or not: {_BITS}", fix=_SAME_CALL),
    _Subject(key="cudnn_tf32", on_cpu="info", on_gpu="fatal", why=f"TF32 or not: {_BITS}", fix=_SAME_CALL),
    _Subject(
        key="reduced_precision", on_cpu="info", on_gpu="fatal",
        why=f"sums are rounded in other places: {_BITS}", fix=_SAME_CALL,
    ),
    _Subject(
        key="sdp_kernels", on_cpu="info", on_gpu="fatal", why=f"attention kernels differ: {_BITS}", fix=_SAME_CALL
    ),
    _Subject(
        key="deterministic_algorithms", on_cpu="warning", on_gpu="warning",
        why="live kernels differ between ranks; replays set this themselves", fix=_SAME_CALL,
    ),
    _Subject(
        key="cudnn_benchmark", on_cpu="info", on_gpu="warning",
        why="live convolutions differ between ranks; replays set this themselves", fix=_SAME_CALL,
    ),
    _Subject(
        key="CUBLAS_WORKSPACE_CONFIG", on_cpu="info", on_gpu="fatal",
        why=f"strict determinism is possible on some ranks only, and cuBLAS chooses by workspace: {_BITS}",
        fix="export CUBLAS_WORKSPACE_CONFIG=:4096:8 on every rank before Python starts",
    ),
    _Subject(key="NVIDIA_TF32_OVERRIDE", on_cpu="info", on_gpu="fatal", why=f"TF32 or not: {_BITS}", fix=_SAME_ENV),
    _Subject(
        key="ATEN_CPU_CAPABILITY", on_cpu="fatal", on_gpu="info", why=f"CPU kernels differ: {_BITS}", fix=_SAME_ENV
    ),
    _Subject(key="MKL_CBWR", on_cpu="fatal", on_gpu="info", why=f"MKL's kernels differ: {_BITS}", fix=_SAME_ENV),
    _Subject(
        key="NCCL_ALGO", on_cpu="info", on_gpu="warning", why="collectives may fail to pair up, or hang", fix=_SAME_ENV
    ),
    _Subject(
        key="NCCL_PROTO", on_cpu="info", on_gpu="warning", why="collectives may fail to pair up, or hang", fix=_SAME_ENV
    ),
    _Subject(
        key="OMP_NUM_THREADS", on_cpu="warning", on_gpu="info",
        why=f"CPU sums are split by thread: {_BITS}; and speeds differ",
        fix="export the same OMP_NUM_THREADS on every rank",
    ),
)  # fmt: skip

_THREADS = _Subject(
    key="threads", on_cpu="warning", on_gpu="info", why=f"CPU sums are split by thread: {_BITS}; and speeds differ",
    fix="export the same OMP_NUM_THREADS on every rank, or call torch.set_num_threads alike",
)  # fmt: skip
_DEVICE = _Subject(
    key="device", on_cpu="fatal", on_gpu="fatal", why=f"peers must run on one kind of device: {_BITS}",
    fix="give every rank the same kind of device, or form replicas of equal devices only",
)  # fmt: skip


def differences(facts: Sequence[RankFacts]) -> list[Finding]:
    """Everything that differs between ranks, one finding a subject. `facts` are those of all ranks; any order."""
    found = [_compare(facts, subject, "version", _entry("versions", subject.key)) for subject in _VERSIONS]
    found += [_compare(facts, subject, "setting", _entry("settings", subject.key)) for subject in _SETTINGS]
    if found[-1] is None:  # OMP_NUM_THREADS explains the threads where it differs
        found.append(_compare(facts, _THREADS, "setting", lambda rank: str(rank.threads)))
    found.append(_compare(facts, _DEVICE, "kind", lambda rank: rank.device_name or rank.device.split(":")[0]))
    return [finding for finding in found if finding is not None]


def _entry(table: str, key: str) -> Callable[[RankFacts], str]:
    def read(rank: RankFacts) -> str:
        values: Mapping[str, str | None] = rank.versions if table == "versions" else rank.settings
        value = values.get(key)
        return "absent" if value is None else value

    return read


def _compare(
    facts: Sequence[RankFacts], subject: _Subject, prefix: str, read: Callable[[RankFacts], str]
) -> Finding | None:
    holders: dict[str, list[int]] = defaultdict(list)
    for rank in facts:
        holders[read(rank)].append(rank.rank)
    if len(holders) < 2:
        return None
    largest = max(holders, key=lambda value: len(holders[value]))
    majority = len(holders[largest]) * 2 > len(facts)
    odd = [rank for value, ranks in holders.items() if not (majority and value == largest) for rank in ranks]
    parts = sorted(holders.items(), key=lambda item: (-len(item[1]), min(item[1])))
    values = "; ".join(f"{value} on {rank_text(ranks)}" for value, ranks in parts)
    return Finding(
        id=f"{prefix}-{subject.key.lower().replace('_', '-')}",
        severity=subject.on_gpu if any(rank.accelerated for rank in facts) else subject.on_cpu,
        message=f"{subject.key} differs between ranks: {values}. Reason to care: {subject.why}",
        fix=subject.fix,
        ranks=tuple(sorted(odd)),
    )
