"""Killing ranks of a real job at chosen moments of their work on checkpoints, and starting it again, many times."""

from __future__ import annotations

import functools
import mmap
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import scout_core
from scout_core.consensus import tensor_signature
from scout_core.trust import files
from scout_core.trust.durable import DurableCheckpointConfig, TorchSaveCallbacks
from scout_core.trust.gemini import Gemini
from scout_core.trust.saver import DurableTier
from scout_core.trust.shard import Shards
from tests.distributed.pool import Ranks, own_ranks
from tests.trust.job import Sampler, build, train_step

RANKS = 4
PHASES = ("save", "commit", "rename", "replicate", "flush")
_BOARD_BYTES = RANKS * len(PHASES)
_DEADLINE_S = 120.0


class Ballast(Sampler):
    """An input position with a megabyte that must fit it: state of two steps is told at once."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "ballast": torch.full((1 << 18,), float(self.position))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if not torch.equal(state["ballast"], torch.full((1 << 18,), float(self.position))):
            raise ValueError("the state is of more than one step")


def digest(model: Any, sampler: Sampler) -> int:
    """Of everything that the trajectory depends on and that two runs have in common."""
    tensors = (*model.state_dict().values(), torch.get_rng_state(), torch.tensor(sampler.position))
    return functools.reduce(lambda word, t: (word * 31 + tensor_signature(t)) & ((1 << 64) - 1), tensors, 0)


def healthy(steps: int) -> list[list[int]]:
    """Digest after every step of a run that nobody disturbs, without SCOUT; by step."""
    model, ddp, optimizer = build(dist.get_rank())
    sampler, found = Sampler(), []
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    for _ in range(steps):
        train_step(ddp, optimizer, sampler, scheduler)
        found.append(digest(model, sampler))
    return found


def train_for_ever(run_dir: Path) -> None:
    """Go on from wherever the run stands; say on the board what this rank is doing, and write down what it came to."""
    rank = dist.get_rank()
    show_phases(run_dir / "board", rank)
    model, ddp, optimizer = build(rank)
    sampler = Ballast()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    with (run_dir / f"digests-{rank}").open("ab", buffering=0) as log:
        scout = scout_core.attach(
            ddp,
            optimizer,
            run_dir=run_dir,
            stateful={"sampler": sampler, "scheduler": scheduler},
            durable=DurableCheckpointConfig(callbacks=TorchSaveCallbacks(), folder=run_dir / "durable"),
            check_interval=2,
            gemini=True,
            flush_interval=1,
        )
        log.write(f"start {scout.step_count} {digest(model, sampler)}\n".encode())
        while True:
            train_step(ddp, optimizer, sampler, scheduler)
            log.write(f"step {scout.step_count} {digest(model, sampler)}\n".encode())


def show_phases(path: Path, rank: int) -> None:
    """One byte on the board for each phase of this rank, not 0 while it is inside."""
    with path.open("r+b") as file:
        board = mmap.mmap(file.fileno(), _BOARD_BYTES)
    places: list[tuple[str, Any, str]] = [
        ("save", TorchSaveCallbacks, "save_candidate"),
        ("commit", DurableTier, "_commit"),
        ("rename", files, "publish"),
        ("replicate", Gemini, "_replicate"),
        ("flush", Shards, "write"),
    ]
    for phase, owner, name in places:
        setattr(owner, name, _shown(getattr(owner, name), board, rank * len(PHASES) + PHASES.index(phase)))


def _shown(function: Callable[..., Any], board: mmap.mmap, place: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def shown(*args: Any, **kwargs: Any) -> Any:
        board[place] += 1
        try:
            return function(*args, **kwargs)
        finally:
            board[place] -= 1

    return shown


def campaign(run_dir: Path, kills: int, seed: int) -> list[tuple[str, int]]:
    """Kill a rank inside each phase in turn, `kills` times; returns `(phase, step of the next start)` of every kill.

    The others are killed with it, or told to end as a launcher does, which makes them flush. After the last kill the
    job is started once more.
    """
    draw = random.Random(seed)
    done: list[tuple[str, int]] = []
    for index in range(kills + 1):
        (run_dir / "board").write_bytes(bytes(_BOARD_BYTES))
        phase = PHASES[index % len(PHASES)]
        target = 0 if phase in ("commit", "rename") else draw.randrange(RANKS)  # the manifest writer's
        began = [len(lines(run_dir, rank)) for rank in range(RANKS)]
        with own_ranks(RANKS, train_for_ever, run_dir, timeout=_DEADLINE_S) as ranks:
            await_start(run_dir, ranks, began)
            if index:
                done.append((PHASES[(index - 1) % len(PHASES)], start_of(run_dir, began)))
            if index == kills:
                break
            await_phase(run_dir, target, phase, waits=2 if index == 0 else draw.randrange(3))
            end = time.monotonic() + draw.random() * 0.002
            while time.monotonic() < end:
                pass
            kill(ranks, target, gently=draw.random() < 0.5)
    return done


def await_start(run_dir: Path, ranks: Ranks, began: list[int]) -> None:
    """Until every rank has written where it takes the job up."""
    deadline = time.monotonic() + _DEADLINE_S
    while late := [rank for rank in range(RANKS) if len(lines(run_dir, rank)) <= began[rank]]:
        assert time.monotonic() < deadline and not ranks.wait(0.02, ranks=late)[late[0]].failure, f"no start of {late}"


def await_phase(run_dir: Path, target: int, phase: str, waits: int) -> None:
    """Until `target` enters `phase` for the last of `waits` more times."""
    deadline = time.monotonic() + _DEADLINE_S
    with (run_dir / "board").open("r+b") as file:
        board = mmap.mmap(file.fileno(), _BOARD_BYTES)
    place = target * len(PHASES) + PHASES.index(phase)
    inside = bool(board[place])
    while waits >= 0:
        assert time.monotonic() < deadline, f"rank {target} never came to {phase}"
        inside, before = bool(board[place]), inside
        waits -= inside and not before


def kill(ranks: Ranks, target: int, *, gently: bool) -> None:
    """SIGKILL the target; the others with it, or SIGTERM for them and a moment to flush."""
    pids = ranks.pids
    os.kill(pids[target], signal.SIGKILL)
    others = [rank for rank in range(RANKS) if rank != target]
    for rank in others:
        with suppress(ProcessLookupError):
            os.kill(pids[rank], signal.SIGTERM if gently else signal.SIGKILL)
    ranks.wait(5.0, ranks=range(RANKS))


def lines(run_dir: Path, rank: int) -> list[tuple[str, int, int]]:
    """`(word, step, digest)` that a rank wrote; a last line that a kill cut short is left out."""
    path = run_dir / f"digests-{rank}"
    whole = path.read_text().split("\n")[:-1] if path.exists() else []
    found = [line.split() for line in whole]
    return [(word, int(step), int(value)) for word, step, value in found]


def start_of(run_dir: Path, began: list[int]) -> int:
    """The step at which all ranks took up the job again; the same on all, with the same bits of what they share."""
    started = [lines(run_dir, rank)[began[rank]] for rank in range(RANKS)]
    assert {word for word, _, _ in started} == {"start"} and len({step for _, step, _ in started}) == 1, started
    return started[0][1]
