"""The training process's end of its observer: starts it, hears it, notices when it is lost."""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from scout_core.oob.flight import write_flight_records
from scout_core.oob.instrument import all_stacks, main_thread_exception
from scout_core.oob.process import read_state
from scout_core.oob.seat import Seat
from scout_core.replay.guard import logger

STACKS_SIGNAL = signal.SIGRTMIN + 9
_LOOK_S = 2.0
_STOPPED_LOOKS = 2
_UNWANTED = ("TORCH_DISTRIBUTED_DEBUG", "TORCH_SHOW_CPP_STACKTRACES", "PYTHONSTARTUP", "PYTHONINSPECT")


class ObserverLost(RuntimeError):
    """The out-of-band observer of this rank is gone and the policy is to stop."""


class Supervisor:
    """One observer process and the daemon thread that listens to it.

    `on_report(record, deliver)` is called in that thread for each report of the mesh; with `deliver` it is this
    process's turn to call the manager. `on_lost(reason)` once, when the observer ends or stops without being asked to.
    """

    def __init__(
        self, seat: Seat, on_report: Callable[[dict[str, Any], bool], None], on_lost: Callable[[str], None]
    ) -> None:
        self.seat = seat
        self._on_report, self._on_lost = on_report, on_lost
        self._thread_id = threading.get_ident()
        self._early: queue.Queue[dict[str, Any]] = queue.Queue()
        self._closing = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "scout_core.oob.observer", seat.model_dump_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment(),
            cwd="/",
        )
        self._thread = threading.Thread(target=self._listen, daemon=True, name="scout-supervisor")
        self._thread.start()

    def hear(self, key: str, timeout_s: float) -> dict[str, Any]:
        """The first line with this key, during start. Raises `ObserverLost` when it does not come in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                line = self._early.get(timeout=max(deadline - time.monotonic(), 0.01))
            except queue.Empty:
                raise ObserverLost(f"the observer did not say '{key}' within {timeout_s:g} s") from None
            if key in line:
                return line
            if "lost" in line:
                raise ObserverLost(f"the observer ended at its start ({line['lost']})")

    def tell(self, record: dict[str, Any]) -> None:
        """One line to the observer; nothing if it is gone."""
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):
            self.process.stdin.write(json.dumps(record).encode() + b"\n")
            self.process.stdin.flush()

    def close(self, timeout_s: float = 2.0) -> None:
        """Say good-bye and see the observer off; it is killed if it stays. A second call does nothing."""
        if self._closing:
            return
        self._closing = True
        self.tell({"bye": True})
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):  # on a machine this busy it ends a little later
                self.process.wait(timeout_s)
        self._thread.join(timeout_s)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        descriptor, buffer, stopped = self.process.stdout.fileno(), b"", 0
        poll = select.poll()  # select() refuses descriptors from 1,024 on
        poll.register(descriptor, select.POLLIN)
        while True:
            ready = poll.poll(_LOOK_S * 1000)
            if self._closing and not ready:
                return
            if not ready:
                stopped = stopped + 1 if read_state(self.process.pid)[0] == "T" else 0
                if stopped == _STOPPED_LOOKS:
                    self._lost("it is stopped")
                continue
            data = os.read(descriptor, 1 << 16)
            if not data:
                break
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        self._early.put({"lost": f"exit code {self.process.poll()}"})
        self._lost(f"it ended with exit code {self.process.poll()}")

    def _lost(self, reason: str) -> None:
        if not self._closing:
            self._on_lost(reason)

    def _take(self, line: dict[str, Any]) -> None:
        if line.get("ask") == "exception":
            self.tell({"exception": main_thread_exception(self._thread_id)})
        elif line.get("ask") == "stacks":
            self.tell({"stacks": all_stacks()})
        elif line.get("ask") == "flight":
            self.tell({"flight": self._write_flight(Path(line["folder"]))})
        elif "report" in line:
            self._on_report(line["report"], False)
        elif "hook" in line:
            self._on_report(line["hook"], True)
            self.tell({"hooked": True})
        else:
            self._early.put(line)

    def _write_flight(self, folder: Path) -> list[str]:
        """Names of the flight records written; what torch or the disk refuses is missing from the evidence."""
        try:
            return list(write_flight_records(folder, self.seat.rank))
        except (OSError, RuntimeError, ValueError) as error:
            logger.warning("SCOUT: no flight record of rank %d: %s", self.seat.rank, error)
            return []


def register_stacks(path: Path) -> Any:
    """Let `STACKS_SIGNAL` write the Python stack of the thread that gets it into `path`; the open file, to be kept.

    Of that thread alone: faulthandler walks the frames of others while they run, and may crash the process by it.
    """
    file = open(path, "w")  # noqa: SIM115  # faulthandler writes to it for as long as the job lives
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=False)
    return file


def _environment() -> dict[str, str]:
    """The training's environment without what an observer must not have: devices, debug wrappers, many threads."""
    env = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
    source = str(Path(__file__).resolve().parents[2])
    paths = [source, *[p for p in env.get("PYTHONPATH", "").split(os.pathsep) if p]]
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return env
