"""Starting `job.py` under the real torchrun, in a session of its own that is ended with the test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def torchrun(run_dir: Path, steps: int, *words: str, restarts: int = 0, ranks: int = 4, timeout: float = 120.0) -> int:
    """Exit code of the launcher; its output is in `run_dir/torchrun.log`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={restarts}", "--monitor-interval=0.1", str(Path(__file__).with_name("job.py"))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # attempts would else share one store, and a rank may read the address that a dead one left in it
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with (run_dir / "torchrun.log").open("a") as log:
        process = subprocess.Popen(
            [*command, str(run_dir), str(steps), *words],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def finals(run_dir: Path, ranks: int = 4) -> list[Any]:
    """How each rank ended."""
    return [json.loads((run_dir / f"final-{rank}.json").read_text()) for rank in range(ranks)]


def starts(run_dir: Path, rank: int = 0) -> list[tuple[int, int]]:
    """`(attempt, step it began at)`, in order."""
    lines = (run_dir / f"starts-{rank}.txt").read_text().splitlines()
    return [(int(a), int(b)) for a, b in (line.split() for line in lines)]


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    """Records of a type in the run's event log, in order."""
    records = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    return [record for record in records if record["type"] == kind]
