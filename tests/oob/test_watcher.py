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
from tests.oob.jobs import wait_until

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


class FakeMesh:
    """The other observers: all ask at once, and note when they are answered."""

    bytes_sent = bytes_received = 0

    def __init__(self, wake: int) -> None:
        self._wake = wake
        self._inbox: list[dict[str, Any]] = []
        self.answered_at: dict[int, float] = {}
        self.exceptions: set[str] = set()

    def ask(self, ranks: range) -> None:
        self._inbox = [{"type": "probe", "round": 1, "from": rank} for rank in ranks]
        os.write(self._wake, b"x")

    def take(self) -> list[dict[str, Any]]:
        found, self._inbox = self._inbox, []
        return found

    def send(self, rank: int, message: dict[str, Any]) -> bool:
        if message["type"] == "view":
            self.answered_at[rank] = time.monotonic()
            self.exceptions.add(message["view"]["exception"])
        return True


class SlowLink(FakeLink):
    """A training process that answers a question, or never does, and hangs up when it is told to."""

    def __init__(self, answers: bool) -> None:
        super().__init__()
        self._answers = answers
        self.questions = 0
        self._lines: list[dict[str, Any]] = []

    def say(self, record: dict[str, Any]) -> None:
        if record.get("ask") == "exception":
            self.questions += 1
            if self._answers:
                self.tell({"exception": "ValueError"})

    def tell(self, line: dict[str, Any]) -> None:
        self._lines.append(line)
        os.write(self._far, b"x")

    def hear(self) -> list[dict[str, Any]]:
        os.read(self.descriptor, 1)
        return [self._lines.pop(0)]


def seat_of(channel: Channel, folder: Path, config: OobConfig, ranks: int = 1) -> Seat:
    return Seat(
        rank=0, peers=tuple(range(ranks)), pid=os.getpid(), thread=threading.get_native_id(),
        start_ticks=start_ticks(os.getpid()) or 0, channel=channel.name,
        token=channel.token.hex(), run="t", attempt=0, state_dir=folder, stacks=folder / "stacks", config=config,
    )  # fmt: skip


@pytest.mark.parametrize("answers", [False, True], ids=["interpreter lock held", "answers"])
def test_probes_that_come_at_once_do_not_wait_for_each_other(answers: bool, channel: Channel, tmp_path: Path) -> None:
    """Whoever asks waits 1 s: 15 answers one after the other would take almost four."""
    config = OobConfig(stall_train_s=THRESHOLD_S, stall_startup_s=THRESHOLD_S)
    link, parent, (wake, awake) = SlowLink(answers), os.pidfd_open(os.getpid()), os.pipe()
    mesh = FakeMesh(awake)
    Publisher(channel.memory, (0,))
    time.sleep(THRESHOLD_S)
    watcher = Watcher(seat_of(channel, tmp_path, config, 16), channel, mesh, link, parent, wake, host="here")  # type: ignore[arg-type]
    loop = threading.Thread(target=watcher.run, daemon=True)
    asked = time.monotonic()
    mesh.ask(range(1, 16))
    loop.start()
    wait_until(lambda: len(mesh.answered_at) == 15, 30)
    link.tell({"bye": True})
    loop.join(30)
    assert max(mesh.answered_at.values()) - asked < 1.5, "seconds to the last answer"
    assert mesh.exceptions == {"ValueError" if answers else ""}
    assert link.questions <= 2, "one for each second at most, on a busy machine"


@pytest.mark.parametrize("persistence", [1, 8])
def test_as_many_looks_confirm_a_stall_as_are_asked_for(persistence: int, channel: Channel, tmp_path: Path) -> None:
    config = OobConfig(stall_train_s=THRESHOLD_S, stall_startup_s=THRESHOLD_S, stall_persistence=persistence)
    link, parent, (wake, _) = FakeLink(), os.pidfd_open(os.getpid()), os.pipe()
    seat = seat_of(channel, tmp_path, config)
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
