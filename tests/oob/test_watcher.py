"""The observer's loop in this process: a fake link to the training, no peers."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scout_core.config import OobConfig
from scout_core.oob.channel import Channel, Scope, start_ticks
from scout_core.oob.seat import Seat
from scout_core.oob.watcher import Watcher
from scout_core.oob.writer import Publisher

THRESHOLD_S = 0.2
LOOK_S = 0.1  # the shortest pause between two looks


class FakeLink:
    """The training process's end: answers nothing, notes when a report is said, and hangs up then."""

    def __init__(self) -> None:
        self.descriptor, self._far = os.pipe()
        self.closed = False
        self.reported_at: float | None = None

    def say(self, record: dict[str, Any]) -> None:
        if "report" in record and self.reported_at is None:
            self.reported_at = time.monotonic()
            os.write(self._far, b"x")

    def hear(self) -> list[dict[str, Any]]:
        os.read(self.descriptor, 1)
        return [{"bye": True}]


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[Channel]:
    made = Channel.create(Scope(run="t", attempt=0, pid=1, peers=(0,), rank=0), world=1, folder=tmp_path)
    yield made
    made.close(unlink=True, folder=tmp_path)


@pytest.mark.parametrize("persistence", [1, 8])
def test_as_many_looks_confirm_a_stall_as_are_asked_for(persistence: int, channel: Channel, tmp_path: Path) -> None:
    config = OobConfig(stall_train_s=THRESHOLD_S, stall_startup_s=THRESHOLD_S, stall_persistence=persistence)
    link, parent, (wake, _) = FakeLink(), os.pidfd_open(os.getpid()), os.pipe()
    seat = Seat(
        rank=0, peers=(0,), pid=os.getpid(), thread=threading.get_native_id(),
        start_ticks=start_ticks(os.getpid()) or 0, channel=channel.name,
        token=channel.token.hex(), run="t", attempt=0, state_dir=tmp_path, stacks=tmp_path / "stacks", config=config,
    )  # fmt: skip
    Publisher(channel.memory, (0,))
    published = time.monotonic()
    watcher = Watcher(seat, channel, None, link, parent, wake, host="here")
    loop = threading.Thread(target=watcher.run, daemon=True)
    loop.start()
    loop.join(30)
    assert link.reported_at is not None, "no report"
    quiet = link.reported_at - published
    assert quiet >= THRESHOLD_S + (persistence - 1) * LOOK_S
    if persistence == 1:
        assert quiet < THRESHOLD_S + 7 * LOOK_S + 5, "far from never"


def test_an_observer_loads_little_beside_torch() -> None:
    """Its memory is that of what it imports: neither what attach() needs, nor sympy behind torch's DTensor."""
    program = "import sys, scout_core.oob.observer; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert not {"scout_core.session", "torch.distributed.tensor", "sympy"} & set(run.stdout.split())
