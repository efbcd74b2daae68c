"""Gathering every rank's facts within a job, and saying who did not answer."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from scout_core.doctor.collect import local_facts
from scout_core.doctor.facts import RankFacts
from scout_core.doctor.findings import Finding

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class JobError(RuntimeError):
    """The job's ranks cannot be brought together at all; the message says the fix."""


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """Facts of the ranks that answered, and what was found on the way to them.

    `speaks` is True on the lowest rank that answered; where gathering failed, the others hold their own facts only.
    """

    speaks: bool
    facts: tuple[RankFacts, ...]
    findings: tuple[Finding, ...] = ()


def launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher such as torchrun has told this process its place in a job."""
    return all(name in environ for name in _NEEDED)


def gather_initialized(timeout_s: float) -> JobFacts:
    """Facts of all ranks of a job whose default process group exists.

    Every rank calls. Creates one Gloo group, gathers once on it and ends it. Raises `RuntimeError` from
    torch.distributed when a rank does not come in time.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    own = local_facts(rank=rank, world_size=world, in_job=True, in_script=True)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc="scout_doctor")
    try:
        return JobFacts(speaks=rank == 0, facts=_exchange(own, world, group))
    finally:
        dist.destroy_process_group(group)


def gather_launched(timeout_s: float) -> JobFacts:
    """Facts of all ranks of a job that is started for the doctor alone.

    Every rank calls; makes a Gloo group of all ranks and ends it. Facts are posted in the launcher's store first, so
    that a rank which never starts is named, and differing versions are shown even where Gloo cannot connect. Raises
    `JobError` without a launcher or without its store.
    """
    if not launched():
        missing = ", ".join(name for name in _NEEDED if name not in os.environ)
        raise JobError(
            f"not within a job: {missing} not set; start it on every rank with "
            "`torchrun --nproc-per-node N -m scout_core.doctor`"
        )
    timeout = timedelta(seconds=timeout_s)
    try:
        store, rank, world = next(rendezvous("env://", timeout=timeout))
    except dist.DistError as error:
        raise JobError(
            f"no answer from the store at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within {timeout_s:g} "
            f"s: is rank 0 running, and is the port open? ({error})"
        ) from error
    own = local_facts(rank=rank, world_size=world, local_rank=int(os.environ.get("LOCAL_RANK", rank)), in_job=True)
    board = _Board(PrefixStore("scout_doctor", store), world)
    board.post(own)
    if not board.all_posted(timeout):
        return board.read(own)
    try:
        dist.init_process_group("gloo", store=PrefixStore("gloo", store), rank=rank, world_size=world, timeout=timeout)
        return JobFacts(speaks=rank == 0, facts=_exchange(own, world, dist.group.WORLD))
    except RuntimeError as error:
        return board.read(own, _unconnected(error))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class _Board:
    """One entry a rank in the job's store."""

    def __init__(self, store: Store, world: int) -> None:
        self._store = store
        self._keys = [str(rank) for rank in range(world)]

    def post(self, own: RankFacts) -> None:
        self._store.set(str(own.rank), json.dumps(own.to_json()))

    def all_posted(self, timeout: timedelta) -> bool:
        try:
            self._store.wait(self._keys, timeout)
        except dist.DistError:
            return False
        return True

    def read(self, own: RankFacts, *findings: Finding) -> JobFacts:
        """What was posted, when the ranks could not be gathered; read by the lowest rank that came, and only by it."""
        found: list[RankFacts] = []
        try:
            for key in self._keys:
                if not self._store.check([key]):
                    continue
                if not found and key != str(own.rank):
                    return JobFacts(speaks=False, facts=(own,), findings=findings)
                found.append(RankFacts.from_json(json.loads(self._store.get(key))))
        except dist.DistError as error:
            raise JobError(f"the job's store went away: {error}") from error
        return JobFacts(speaks=True, facts=tuple(found), findings=findings)


def _exchange(own: RankFacts, world: int, group: dist.ProcessGroup | None) -> tuple[RankFacts, ...]:
    gathered: list[Any] = [None] * world
    dist.all_gather_object(gathered, own.to_json(), group=group)
    return tuple(RankFacts.from_json(record) for record in gathered)


def _unconnected(error: RuntimeError) -> Finding:
    return Finding(
        id="gloo-unreachable",
        severity="fatal",
        message=f"all ranks are there, but cannot connect over Gloo, which SCOUT's checks need: {error}",
        fix="export GLOO_SOCKET_IFNAME=<the interface that all hosts share>; open the hosts' ports to one another",
    )
