"""Starting `job.py` under the real torchrun, which is ended with all its workers when its time is over."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from scout_core.demo.loop import run_bounded

ROOT = Path(__file__).parents[2]


def torchrun(run_dir: Path, steps: int, *words: str, restarts: int = 0, ranks: int = 4, timeout: float = 240.0) -> int:
    """Exit code of the launcher; its output is in `run_dir/torchrun.log`."""
    run_dir.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [f"--max-restarts={restarts}", "--monitor-interval=0.1", str(Path(__file__).with_name("job.py"))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    # attempts would else share one store, and a rank may read the address that a dead one left in it
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return run_bounded([*command, str(run_dir), str(steps), *words], environment, run_dir / "torchrun.log", timeout)


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
