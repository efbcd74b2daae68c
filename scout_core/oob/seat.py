"""What an observer is told at its start, and the lines it exchanges with its training process."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from scout_core.config import OobConfig


class Seat(BaseModel):
    """One observer's place. `thread` is the kernel's id of the training thread, `peers` are the ranks that are watched
    together, `absent` those of them without an observer from the start, `role` is equal for those that hold the same
    layers.

    `launcher` is the process that started this one and is to outlive it; 0 where none is known. `port` is set for the
    first rank under TCP rendezvous, `file` under file rendezvous.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rank: int
    peers: tuple[int, ...]
    absent: tuple[int, ...] = ()
    role: int = 0
    pid: int
    thread: int
    start_ticks: int
    launcher: int = 0
    channel: str
    token: str
    run: str
    attempt: int
    port: int | None = None
    file: Path | None = None
    run_dir: Path | None = None
    state_dir: Path
    stacks: Path
    config: OobConfig

    @property
    def present(self) -> tuple[int, ...]:
        """The ranks whose observers confer."""
        return tuple(rank for rank in self.peers if rank not in self.absent)
