"""From the facts of all ranks to findings. Pure: no process group, clock, file or device."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from scout_core.doctor.agreement import differences
from scout_core.doctor.facts import RankFacts
from scout_core.doctor.findings import Finding, Severity, by_severity, count, rank_text

OLDEST_TORCH = (2, 10)


def diagnose(facts: Sequence[RankFacts]) -> tuple[Finding, ...]:
    """Every finding that follows from these ranks' facts alone, gravest first.

    `facts` are those of all ranks that answered, in any order. Ranks of the job's world that are not among them are a
    finding of their own.
    """
    ordered = sorted(facts, key=lambda rank: rank.rank)
    found: list[Finding] = [*_missing(ordered), *differences(ordered)]
    for rule in _RULES:
        found += rule(ordered)
    return by_severity(found)


def peer_finding(peers: int, *, in_job: bool = True, assumed: bool = False) -> Finding:
    """What `peers` equivalent ranks can and cannot tell. Outside a job nothing is wrong with having few: `info`.

    `assumed`: nothing is known of the model, so all ranks are taken for replicas, and the message says so.
    """
    if_replicated = "; if every rank holds a replica: sharding and pipelines divide the number" if assumed else ""
    if peers < 2:
        message = "one rank has no peer to be compared with: nothing can be checked"
        fix = "train on 3 or more replicas; on one device, several ranks can share it over Gloo"
    elif peers == 2:
        message = (
            "two peers show THAT they differ, and name a rank that does not repeat itself; when each repeats itself, "
            "nothing tells which of them is wrong"
        )
        fix = 'train on 3 or more replicas to have the rank named by majority, or set tie_break="reference"'
    else:
        most = (peers - 1) // 2
        message = f"{peers} peers: a strict majority names up to {count(most, 'rank')} at fault in one check"
        return Finding(id="peers", severity="info", message=message + if_replicated)
    return Finding(id="peers", severity="warning" if in_job else "info", message=message + if_replicated, fix=fix)


def _missing(facts: Sequence[RankFacts]) -> list[Finding]:
    world = max((rank.world_size for rank in facts), default=0)
    absent = tuple(sorted(set(range(world)) - {rank.rank for rank in facts}))
    if not absent:
        return []
    return [
        Finding(
            id="rank-missing",
            severity="fatal",
            message=f"{rank_text(absent)} of {world} did not answer in time",
            fix="see whether these processes run and reach MASTER_ADDR:MASTER_PORT; raise --timeout if they are slow",
            ranks=absent,
        )
    ]


def _peers(facts: Sequence[RankFacts]) -> list[Finding]:
    if not facts:
        return []
    if facts[0].in_job:
        return [peer_finding(max(rank.world_size for rank in facts), assumed=True)]
    return [_possible_peers(facts[0])]


def _possible_peers(machine: RankFacts) -> Finding:
    """Without a job: what one rank a device would give. A CPU-only machine can hold any number."""
    if not machine.accelerated:
        message = "no accelerator: ranks run on the CPU over Gloo, as many as wanted; 3 or more name a rank at fault"
        return Finding(id="peers", severity="info", message=message)
    finding = peer_finding(machine.devices_visible, in_job=False, assumed=True)
    message = f"one rank a device gives {count(machine.devices_visible, 'rank')} here: {finding.message}"
    return replace(finding, message=message)


def _old_torch(facts: Sequence[RankFacts]) -> list[Finding]:
    old = {rank.rank: str(rank.versions.get("torch")) for rank in facts if _parts(rank) < OLDEST_TORCH}
    if not old:
        return []
    oldest = ".".join(map(str, OLDEST_TORCH))
    message = f"torch {', '.join(sorted(set(old.values())))} is older than {oldest}, which SCOUT needs"
    return [
        Finding(
            id="torch-old", severity="fatal", message=message, fix=f"pip install 'torch>={oldest}'", ranks=tuple(old)
        )
    ]


def _parts(rank: RankFacts) -> tuple[int, ...]:
    numbers = re.match(r"(\d+)\.(\d+)", rank.versions.get("torch") or "")
    return OLDEST_TORCH if numbers is None else (int(numbers[1]), int(numbers[2]))


def _backends(facts: Sequence[RankFacts]) -> list[Finding]:
    found = []
    without_gloo = _ranks(facts, lambda rank: "gloo" not in rank.backends)
    if without_gloo:
        message = "this torch has no Gloo backend, over which SCOUT's readiness and evidence travel"
        fix = "install a torch build with torch.distributed and Gloo (the official Linux wheels have both)"
        found.append(Finding(id="backend-gloo", severity="fatal", message=message, fix=fix, ranks=without_gloo))
    without_nccl = _ranks(facts, lambda rank: rank.accelerated and not {"nccl", "xccl"} & set(rank.backends))
    if without_nccl:
        message = "an accelerator, but no NCCL: invocations would travel through host memory"
        fix = "install a CUDA build of torch"
        found.append(Finding(id="backend-nccl", severity="warning", message=message, fix=fix, ranks=without_nccl))
    return found


def _device_access(facts: Sequence[RankFacts]) -> list[Finding]:
    unusable = _ranks(facts, lambda rank: rank.gpu_driver_loaded and not rank.accelerated and not rank.devices_visible)
    found = []
    if unusable:
        message = "an NVIDIA driver is loaded, but this torch sees no GPU"
        fix = "check CUDA_VISIBLE_DEVICES, the driver's age, and that torch is a CUDA build (torch.version.cuda)"
        found.append(Finding(id="device-unusable", severity="warning", message=message, fix=fix, ranks=unusable))
    sharing: dict[tuple[str, str], list[RankFacts]] = defaultdict(list)
    for rank in facts:
        if rank.accelerated:
            sharing[rank.host, rank.mig_uuid or rank.device_uuid or rank.device].append(rank)
    for (host, _), ranks in sharing.items():
        if len(ranks) < 2:
            continue
        named = tuple(rank.rank for rank in ranks)
        message = (
            f"{rank_text(named)} share {ranks[0].device} of {host}: NCCL refuses that, a fault of the device shows on "
            "all of them alike, and their timing is one another's"
        )
        fix = "give each rank a device of its own (LOCAL_RANK as the device number); for trials, use the Gloo backend"
        severity: Severity = "fatal" if any(rank.backend == "nccl" for rank in ranks) else "warning"
        found.append(Finding(id="device-shared", severity=severity, message=message, fix=fix, ranks=named))
    return found


def _determinism(facts: Sequence[RankFacts]) -> list[Finding]:
    found = []
    loose = _ranks(facts, lambda rank: not rank.strict_determinism)
    if loose:
        value = next(rank.settings.get("CUBLAS_WORKSPACE_CONFIG") for rank in facts if not rank.strict_determinism)
        message = (
            f"CUBLAS_WORKSPACE_CONFIG is {value or 'not set'}, so replays cannot demand deterministic matrix products: "
            "whether they repeat themselves is measured instead, and what does not is never attributed"
        )
        fix = "export CUBLAS_WORKSPACE_CONFIG=:4096:8 on every rank before Python starts"
        found.append(Finding(id="cublas-workspace", severity="warning", message=message, fix=fix, ranks=loose))
    return found


def _flags(facts: Sequence[RankFacts]) -> list[Finding]:
    """Torch's own flags, which a training script sets: known only where the facts come from inside it."""
    if not any(rank.in_script for rank in facts):
        message = "TF32, cudnn.benchmark and use_deterministic_algorithms are set by the training script, not seen here"
        fix = "call scout_core.doctor.examine(model, optimizer) in the script to have them judged"
        return [Finding(id="flags-unseen", severity="info", message=message, fix=fix)]
    found = []
    free = _ranks(facts, lambda rank: rank.settings.get("deterministic_algorithms") == "off")
    if free:
        message = (
            "torch.use_deterministic_algorithms is off in training; SCOUT switches it on for the replay only, so live "
            "kernels may be others than the replayed ones"
        )
        found.append(Finding(id="live-determinism", severity="info", message=message, ranks=free))
    tf32 = _ranks(facts, lambda rank: rank.accelerated and rank.settings.get("matmul_precision") in ("high", "medium"))
    if tf32:
        message = "float32 matrix products run in TF32 or less; replays do too, and compare exactly among equal devices"
        found.append(Finding(id="tf32", severity="info", message=message, ranks=tf32))
    tuned = _ranks(facts, lambda rank: rank.accelerated and rank.settings.get("cudnn_benchmark") == "on")
    if tuned:
        message = (
            "cudnn.benchmark is on: each rank picks live convolution kernels by its own timing; it is off in replays, "
            "which then exercise other kernels"
        )
        fix = "set torch.backends.cudnn.benchmark = False to have the trained kernels replayed"
        found.append(Finding(id="cudnn-benchmark", severity="info", message=message, fix=fix, ranks=tuned))
    return found


def _crowding(facts: Sequence[RankFacts]) -> list[Finding]:
    """CPU threads of all ranks of a host against its cores: more threads than cores slow ranks at random."""
    found = []
    ranks_on = Counter(rank.host for rank in facts)
    for host, number in ranks_on.items():
        local = [rank for rank in facts if rank.host == host]
        cores, threads = len({core for rank in local for core in rank.cores}), sum(rank.threads for rank in local)
        if threads <= cores or number < 2:
            continue
        named = tuple(rank.rank for rank in local)
        message = f"{host}: {number} ranks with {threads} CPU threads in all on {count(cores, 'core')}"
        if number > cores:
            message += "; SCOUT takes the time spent waiting for a core out of what it measures, but timing is noisy"
            fix = "start at most one rank a core"
            found.append(Finding(id="cores-crowded", severity="info", message=message, fix=fix, ranks=named))
            continue
        message += "; ranks slow one another down at random"
        on_gpu = any(rank.accelerated for rank in local)
        found.append(
            Finding(
                id="cores-crowded",
                severity="info" if on_gpu else "warning",
                message=message,
                fix=f"export OMP_NUM_THREADS={max(cores // number, 1)}",
                ranks=named,
            )
        )
    return found


def _optional(facts: Sequence[RankFacts]) -> list[Finding]:
    found = []
    blind = _ranks(facts, lambda rank: rank.device.startswith("cuda") and rank.versions.get("pynvml") is None)
    if blind:
        message = "the pynvml module is missing: hardware health cannot be read"
        fix = "pip install 'scout-suite[nvml]'"
        found.append(Finding(id="nvml-missing", severity="warning", message=message, fix=fix, ranks=blind))
    slow = _ranks(facts, lambda rank: rank.device.startswith("cuda") and rank.versions.get("triton") is None)
    if slow:
        message = "Triton is missing: signatures fall back to torch operations and cost several times as much"
        found.append(
            Finding(id="triton-missing", severity="warning", message=message, fix="pip install triton", ranks=slow)
        )
    return found


def _ranks(facts: Sequence[RankFacts], has: Callable[[RankFacts], bool]) -> tuple[int, ...]:
    return tuple(rank.rank for rank in facts if has(rank))


_RULES: tuple[Callable[[Sequence[RankFacts]], list[Finding]], ...] = (
    _old_torch,
    _backends,
    _device_access,
    _determinism,
    _flags,
    _crowding,
    _optional,
    _peers,
)
