"""What trust says between all ranks of a job: rows, small JSON values, and state in bounded chunks, over Gloo."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

CHUNK_BYTES = 16 << 20


class JobChannel:
    """One Gloo group over every rank of the job, SCOUT's own. Made by every rank; a job of one rank needs none."""

    def __init__(self, timeout_s: float, purpose: str) -> None:
        ready = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if ready else 0
        self.size = dist.get_world_size() if ready else 1
        self._group: dist.ProcessGroup | None = None
        if self.size > 1:
            self._group = dist.new_group(
                backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc=f"scout_trust_{purpose}"
            )

    def gather(self, row: list[int]) -> list[list[int]]:
        """Every rank's row of equal length, by rank. Every rank calls; one all-gather."""
        if self._group is None:
            return [row]
        out = torch.empty(self.size, len(row), dtype=torch.int64)
        dist.all_gather(list(out.unbind(0)), torch.tensor(row, dtype=torch.int64), group=self._group)
        rows: list[list[int]] = out.tolist()
        return rows

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value, by rank. Every rank calls; two all-gathers. No pickle."""
        data = json.dumps(value, allow_nan=False).encode()
        lengths = [row[0] for row in self.gather([len(data)])]
        if self._group is None:
            return [value]
        mine = torch.zeros(max(lengths), dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        out = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(out, mine, group=self._group)
        return [json.loads(bytes(part[:length].numpy())) for part, length in zip(out, lengths, strict=True)]

    def exchange(self, buffer: torch.Tensor, to: int, into: torch.Tensor, source: int) -> None:
        """Send uint8 `[n]` to one rank while receiving uint8 `[m]` from another, chunk by chunk.

        Every rank in the ring calls. Raises `RuntimeError` when a partner is gone or late.
        """
        sends = _chunks(buffer)
        receives = _chunks(into)
        for index in range(max(len(sends), len(receives))):
            works = []
            if index < len(sends):
                works.append(dist.isend(sends[index], dst=to, group=self._group))
            if index < len(receives):
                works.append(dist.irecv(receives[index], src=source, group=self._group))
            for work in works:
                assert work is not None
                work.wait()

    def send(self, buffer: torch.Tensor, to: int) -> None:
        """Send uint8 `[n]`, chunk by chunk; the receiver calls `receive`."""
        for part in _chunks(buffer):
            dist.send(part, dst=to, group=self._group)

    def receive(self, buffer: torch.Tensor, source: int) -> None:
        """Fill uint8 `[n]` from what `source` sends."""
        for part in _chunks(buffer):
            dist.recv(part, src=source, group=self._group)


def partners(hosts: list[str], rank: int) -> tuple[int, int]:
    """Ranks to which this one's state is sent, and from which it receives. Pure.

    A ring shifted by the smallest offset that puts the most copies on another host; ties go to the smaller offset.
    """
    size = len(hosts)
    best = max(range(1, size), key=lambda o: (sum(hosts[r] != hosts[(r + o) % size] for r in range(size)), -o))
    return (rank + best) % size, (rank - best) % size


def _chunks(buffer: torch.Tensor) -> list[torch.Tensor]:
    return [buffer[start : start + CHUNK_BYTES] for start in range(0, buffer.numel(), CHUNK_BYTES)]
