"""The GEMINI tier of one rank: what is under way, what it offers, and what it puts on disk."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import scout_core
from scout_core.trust.gemini import Gemini
from scout_core.trust.holdings import LocalHoldings, complete_steps
from scout_core.trust.memory import Copy, HostMemory
from scout_core.trust.shard import Shards
from scout_core.trust.states import TrustState


class LateCapture:
    """Copies as a device does whose queue is long: when the next update waits for it, or at the very end."""

    def __init__(self, source: torch.Tensor) -> None:
        self.source = source
        self.data: torch.Tensor | None = None

    def hold(self) -> None:
        if self.data is None:
            self.data = self.source.detach().clone()


@pytest.mark.parametrize("how", ["stops", "closes"])
def test_an_update_after_checks_have_stopped_does_not_reach_into_a_capture(tmp_path: Path, how: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scout = scout_core.attach(model, optimizer, run_dir=tmp_path, gemini=True, oob_enabled=False)
    assert scout._trust._gemini is not None
    weight = model[0].weight
    before = weight.detach().clone()
    capture = LateCapture(weight)
    scout._trust._gemini._capture = capture  # type: ignore[assignment]
    if how == "stops":
        scout._stop_checks()
    else:
        scout.close()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    capture.hold()
    assert capture.data is not None and torch.equal(capture.data, before) and not torch.equal(weight, before)
    scout.close()


class Line:
    """What two ranks exchange, in one process; a rank whose partner is lost is told so."""

    def __init__(self) -> None:
        self.boxes = [queue.Queue[torch.Tensor](), queue.Queue[torch.Tensor]()]
        self.lost = False

    def end(self, rank: int) -> Any:
        return LineEnd(self, rank)


class LineEnd:
    size = 2

    def __init__(self, line: Line, rank: int) -> None:
        self.line, self.rank = line, rank

    def exchange(self, buffer: torch.Tensor, to: int, into: torch.Tensor, source: int) -> None:
        if self.line.lost:
            raise RuntimeError("the partner is lost")
        self.line.boxes[to].put(buffer.clone())
        into.copy_(self.line.boxes[self.rank].get(timeout=10))


def pair(folder: Path) -> tuple[Line, list[Gemini], list[Shards]]:
    """The tiers of two ranks on hosts with a disk each."""
    line = Line()
    disks = [Shards(folder / str(rank), run_id="run", topology_digest="t", world_size=2) for rank in range(2)]
    tiers = [
        Gemini(HostMemory(rank), disks[rank], line.end(rank), rank=rank, attempt=0, hosts=["a", "b"], flush_interval=0)
        for rank in range(2)
    ]
    return line, tiers, disks


def capture(tiers: list[Gemini], step: int) -> None:
    for rank, tier in enumerate(tiers):
        tier.begin(step, TrustState.RECOVERY_VERIFIED, {"w": torch.full((9,), 10.0 * step + rank)})
    assert all(tier.settle(10) for tier in tiers)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_host_lost_while_a_step_is_replicated_leaves_the_one_before_complete(tmp_path: Path, where: str) -> None:
    line, tiers, disks = pair(tmp_path)
    capture(tiers, 2)
    capture(tiers, 4)
    line.lost = True
    capture(tiers, 6)
    tiers[0].flush()
    memory = [(0, copy) for copy in tiers[0].copies()]
    left = LocalHoldings(0, 2, None, memory) if where == "memory" else LocalHoldings(0, 2, disks[0], [])
    assert [one.step for one in complete_steps(left.list(), 2)] == [4], "rank 1 is gone, and its step 6 with it"
    for owner in range(2):
        copy = left.take(owner, 4, 0)
        assert isinstance(copy, Copy) and copy.load()["w"].tolist() == [40.0 + owner] * 9


def test_ranks_that_end_while_only_some_have_the_newest_copy_leave_the_one_before_on_disk(tmp_path: Path) -> None:
    line, tiers, disks = pair(tmp_path)
    capture(tiers, 2)
    line.lost = True  # the other has not come to it yet
    capture(tiers[:1], 4)
    for tier in tiers:
        tier.flush()
    parts = [one for rank in range(2) for one in LocalHoldings(rank, 2, disks[rank], []).list()]
    assert [one.step for one in complete_steps(parts, 2)] == [2] and tiers[0].kept == 2


def test_no_more_than_two_copies_of_a_rank_are_kept(tmp_path: Path) -> None:
    _, tiers, _ = pair(tmp_path)
    for step in (2, 4, 6, 8):
        capture(tiers, step)
    assert sorted((copy.owner, copy.step) for copy in tiers[0].copies()) == [(0, 6), (0, 8), (1, 6), (1, 8)]
    assert all(copy.load()["w"][0] == 10 * copy.step + copy.owner for copy in tiers[0].copies())
