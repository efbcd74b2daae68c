"""Where the observers of one set of peers meet, and who comes. Pure but for `muster` and `this_run`."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import Store

from scout_core.config import OobConfig

_LOWEST, _PORTS = 20_000, 12_000
LOCAL = "127.0.0.1"
"""Where the first rank's observer is for ranks of the same host; for those of others, that host's name."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The run and its restart generation, from what torchrun says."""

    run: str
    attempt: int
    address: str | None = None


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """TCP at `address` and `port` (0: any free port of the first rank), or the file `file`."""

    address: str = LOCAL
    port: int = 0
    file: Path | None = None


def this_run(environment: Mapping[str, str] | None = None) -> Run:
    """The run this process belongs to. Without torchrun: one run per master port (or per process), attempt 0."""
    env = os.environ if environment is None else environment
    run = env.get("TORCHELASTIC_RUN_ID") or env.get("SLURM_JOB_ID")
    if not run or run == "none":
        run = f"{run or 'run'}-{env.get('MASTER_ADDR', '')}-{env.get('MASTER_PORT', '')}"
    attempt = env.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Run(run=run, attempt=int(attempt) if attempt.isdigit() else 0, address=env.get("MASTER_ADDR"))


def meeting_of(
    config: OobConfig, run: Run, peers: tuple[int, ...], ordinal: int, torchrun: bool, nonce: str = ""
) -> Meeting:
    """The rendezvous that the configuration asks for; equal on every rank of `peers`.

    An explicit address or port selects TCP. `hang_state_dir` alone selects a file. Under torchrun the port follows
    from run id, restart generation and peers, so that a successor never meets its predecessor's listener. A given
    address or port is that of the job's first rank: peers without it meet at their own first rank, at any port.
    `nonce` is of this start alone: a file of the same name would hold the addresses of a job that has ended.
    """
    first = peers[0] == 0
    if config.hang_master_addr is not None or config.hang_master_port is not None:
        port = config.hang_master_port if first or config.hang_master_port is None else 0
        address = (config.hang_master_addr or run.address or LOCAL) if first else LOCAL
        return Meeting(address=address, port=_derived(run, peers, ordinal) if port is None else port)
    if config.hang_state_dir is not None:
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", run.run)[:64]
        return Meeting(file=config.hang_state_dir / f"rendezvous-{name}-{run.attempt}-{peers[0]}-{ordinal}-{nonce}")
    address = run.address if run.address and first else LOCAL
    return Meeting(address=address, port=_derived(run, peers, ordinal) if torchrun else 0)


def muster(
    store: Store, rank: int, ranks: tuple[int, ...], problem: str, timeout_s: float
) -> tuple[tuple[int, ...], str]:
    """Tell the others whether this rank can be watched, hear it of them; those that cannot, and a nonce for all.

    Every one of `ranks` calls, also the one with a `problem`: nobody is to wait for an observer that never comes.
    Raises `RuntimeError` when somebody says nothing within the timeout.
    """
    store.set(f"able/{rank}", f"{secrets.token_hex(8)}|{problem}")
    keys = [f"able/{each}" for each in ranks]
    store.wait(keys, timedelta(seconds=timeout_s))
    said = [value.decode().split("|", 1) for value in store.multi_get(keys)]
    return tuple(each for each, (_, why) in zip(ranks, said, strict=True) if why), said[0][0]


def _derived(run: Run, peers: tuple[int, ...], ordinal: int) -> int:
    text = f"{run.run}|{run.attempt}|{peers}|{ordinal}"
    return _LOWEST + int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") % _PORTS
