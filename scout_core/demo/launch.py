"""Starting the ranks of the demo on this machine, and ending them whatever happens."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import (
    ProcessContext,
    ProcessExitedException,
    ProcessRaisedException,
    start_processes,
)

from scout_core.demo.events import Setup
from scout_core.demo.ranks import run_rank

_POLL_S = 0.1
_END_S = 5.0
RankFunction = Callable[[int, Setup, Connection], None]


class RankDied(RuntimeError):
    """A rank's process ended before its work was done; the message says which and how."""


def plan(ranks: int | None, gpus: int, only: tuple[str, ...] = ()) -> Setup:
    """Where the ranks run: one per GPU over NCCL where there are enough (3 or more), else over Gloo.

    Ranks share the GPUs if there are one or two, and the CPU if there is none. `port` is filled in by `launch`.
    Raises `ValueError` for fewer than three ranks: two that differ do not tell which is wrong.
    """
    if ranks is None:
        ranks = 3 if gpus == 3 else 4
    if ranks < 3:
        raise ValueError(
            f"--ranks {ranks} is too few: two ranks that differ do not tell which is wrong; take 3 or more"
        )
    one_each = gpus >= ranks
    return Setup(
        ranks=ranks, backend="nccl" if one_each else "gloo", gpus=ranks if one_each else gpus, port=0, only=only
    )


def launch(setup: Setup, function: RankFunction = run_rank) -> Generator[Any, None, None]:
    """Run `function(rank, setup, pipe)` in a process per rank; yields what rank 0 sends through the pipe.

    All processes are gone when the iterator ends or is closed, and when this process ends in whatever way. Raises
    `RankDied` as soon as one ends with an error.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    receiver, sender = get_context("spawn").Pipe(duplex=False)
    with _environment(setup), _ended(_start(function, replace(setup, port=store.port), sender)) as context:
        sender.close()
        done = False
        while not done:
            done = _all_ended(context)
            yield from _received(receiver)


def _all_ended(context: ProcessContext) -> bool:
    try:
        return bool(context.join(timeout=0.0))
    except (ProcessExitedException, ProcessRaisedException) as error:
        raise RankDied(f"rank {error.error_index} of the demo died: {str(error).strip()}") from None


def _received(receiver: Connection) -> Iterator[Any]:
    """What has come through the pipe; returns after a moment of silence, or when every rank has closed it."""
    while receiver.poll(_POLL_S):
        try:
            yield receiver.recv()
        except EOFError:
            return


def _start(function: RankFunction, setup: Setup, sender: Connection) -> ProcessContext:
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    context: ProcessContext = start_processes(  # type: ignore[no-untyped-call]
        # no daemons, which may have no children: loaders have workers
        function,
        args=(setup, sender),
        nprocs=setup.ranks,
        join=False,
        daemon=False,
        start_method="spawn",
    )
    return context


@contextmanager
def _ended(context: ProcessContext) -> Iterator[ProcessContext]:
    try:
        yield context
    finally:
        for process in context.processes:
            process.terminate()
        for process in context.processes:
            process.join(_END_S)
            if process.is_alive():
                process.kill()
                process.join()


@contextmanager
def _environment(setup: Setup) -> Iterator[None]:
    """Settings that a rank's process must have before it starts, taken back afterwards.

    One thread a rank, since ranks share the cores; loopback for Gloo, so that no name has to resolve; a fixed cuBLAS
    workspace, without which matrix products on a GPU need not repeat themselves.
    """
    settings = {"OMP_NUM_THREADS": "1"}
    if any(name == "lo" for _, name in socket.if_nameindex()):
        settings["GLOO_SOCKET_IFNAME"] = "lo"
    if setup.gpus:
        settings["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def count_gpus() -> int:
    """CUDA devices of this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
