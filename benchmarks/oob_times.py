"""How long the out-of-band path takes where somebody waits: from a stall's threshold to its report, and at exit.

`python -m benchmarks.oob_times` on an idle machine; CPU only. Four Gloo ranks on this host for the reports, one process
and its observer for the exits. Times between processes are of this host's monotonic clock.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import scout_core
from scout_core.demo.events import Setup
from scout_core.demo.launch import launch, plan
from scout_core.manager_api import OrchestrationHooks

THRESHOLD_S = 3.0
FAULTY = 2
STEPS = 5
_DEADLINE_S = 60.0
_EXITS = {
    "end of the script": "",
    "scout.close() and end": "scout is not None and scout.close()",
    "sys.exit(3)": "sys.exit(3)",
    "an exception": "raise ValueError('x')",
    "SIGINT": "os.kill(os.getpid(), signal.SIGINT)",
    "SIGTERM": "os.kill(os.getpid(), signal.SIGTERM)",
}
_SCRIPT = """
import os, signal, sys, time, torch, scout_core
from torch import nn
model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scout = {scout}
for _ in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print(time.monotonic(), flush=True)
{end}
"""


def stop(values: torch.Tensor) -> None:
    """The process is stopped."""
    os.kill(os.getpid(), signal.SIGSTOP)


def stay_away(values: torch.Tensor) -> None:
    """Idle outside any collective."""
    time.sleep(_DEADLINE_S)


def other_shape(values: torch.Tensor) -> None:
    """A reduction of another shape."""
    with suppress(RuntimeError):
        dist.all_reduce(torch.ones(len(values) + 2))


def other_call(values: torch.Tensor) -> None:
    """One reduction left out, and on to the next call."""
    dist.barrier()


FAULTS: dict[str, Callable[[torch.Tensor], None]] = {f.__name__: f for f in (stop, stay_away, other_shape, other_call)}


def run_rank(rank: int, setup: Setup, pipe: Connection) -> None:
    """One rank: steps, the fault named by `setup.only` on the faulty one, and a note of the time of each."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", setup.port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=setup.ranks)
    assert setup.run_dir is not None
    folder = setup.run_dir
    model = nn.Sequential(nn.Sequential(*[nn.Sequential(nn.Linear(8, 8)) for _ in range(3)]), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if rank == 0:
        threading.Thread(target=tell, args=(pipe, folder / "reported"), daemon=True).start()
    hooks = OrchestrationHooks(report_fault=lambda report: note(folder / "reported", report.kind.value))
    scout_core.attach(
        model, optimizer, run_dir=folder, check_interval=0, hooks=hooks, stall_train_s=THRESHOLD_S, oob_failure="warn"
    )
    for step in range(STEPS):
        model(torch.ones(2, 8)).sum().backward()
        if rank == FAULTY and step == STEPS - 1:
            note(folder / "began")
            FAULTS[setup.only[0]](torch.ones(4))
        else:
            dist.all_reduce(torch.ones(4))
        optimizer.step()
    dist.barrier()
    time.sleep(_DEADLINE_S)


def tell(pipe: Connection, path: Path) -> None:
    """Say so to the parent once this file is there."""
    while not path.exists():
        time.sleep(0.05)
    pipe.send("reported")


def note(path: Path, text: str = "") -> None:
    """Leave the time there, whole or not at all."""
    scratch = path.with_suffix(".tmp")
    scratch.write_text(f"{time.monotonic()} {text}")
    scratch.replace(path)


def report_s(fault: str) -> tuple[float, str]:
    """Seconds from the threshold after `fault` to the call of the manager's hook, and the kind reported."""
    with tempfile.TemporaryDirectory() as folder:
        setup = replace(plan(4, 0, (fault,)), run_dir=Path(folder))
        with closing(launch(setup, run_rank)) as events:
            next(events)  # rank 0 tells when it knows of the report
        began = float(Path(folder, "began").read_text())
        at, kind = Path(folder, "reported").read_text().split(" ", 1)
    return float(at) - began - THRESHOLD_S, kind


def exit_s(end: str, watched: bool) -> float:
    """Seconds from the last line of a training script to the end of its process, as its parent sees it."""
    scout = "scout_core.attach(model, optimizer, check_interval=0)" if watched else "None"
    script = _SCRIPT.format(scout=scout, end=end)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    began = float(process.stdout.readline())
    process.wait()
    return time.monotonic() - began


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=3, help="repeats of each")
    times = parser.parse_args().times
    for fault in FAULTS:
        found = [report_s(fault) for _ in range(times)]
        seconds = [late for late, _ in found]
        kinds = ", ".join(sorted({kind for _, kind in found}))
        print(f"{fault}: {kinds}, {min(seconds):.2f} to {max(seconds):.2f} s after a threshold of {THRESHOLD_S:g} s")
    for name, end in _EXITS.items():
        without, within = ([exit_s(end, watched) for _ in range(times)] for watched in (False, True))
        extra = statistics.median(within) - statistics.median(without)
        print(f"exit by {name}: {statistics.median(without):.2f} s without SCOUT, {extra:+.2f} s with it")


if __name__ == "__main__":
    main()
