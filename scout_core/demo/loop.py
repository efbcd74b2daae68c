"""The whole loop: a wrong weight on rank 2, its step rejected, a restart by torchrun, and the bits of a healthy run.

`python -m scout_core.demo.loop` starts torchrun twice; exit code 0 if every claim held, 1 if one did not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

import scout_core
from scout_core.consensus import tensor_signature
from scout_core.demo.job import Job
from scout_core.faults import corrupt_weight

RANKS = 4
STEPS = 12
CHECK_INTERVAL = 2
FAULT_AFTER = 7
FAULTY_RANK = 2
_WEIGHT = "blocks.3.mix.weight"
_DEADLINE_S = 300


def train(run_dir: Path, faulty: bool) -> None:
    """One rank under torchrun: train to the end from wherever the run stands; write the final weights' signatures."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    job = Job(rank, torch.device("cpu"), repeatable=True)
    with scout_core.attach(
        job.ddp,
        job.optimizer,
        run_dir=run_dir,
        check_interval=CHECK_INTERVAL,
        gemini=True,
        flush_interval=1,
        on_fault="restart",
        stateful={"job": job},
    ) as scout:
        first = scout.step_count == 0
        while scout.step_count < STEPS:
            if faulty and first and scout.step_count == FAULT_AFTER and rank == FAULTY_RANK:
                corrupt_weight(job.model.get_parameter(_WEIGHT), element=7, bit=20)
            job.step()
    final = [tensor_signature(p) for p in job.model.parameters()]
    (run_dir / f"final-{rank}.json").write_text(json.dumps(final), encoding="utf-8")
    dist.destroy_process_group()


def main() -> int:
    """Run both jobs and say what happened; returns the exit code."""
    print(f"\nThe whole loop: a bit of {_WEIGHT} flips on rank {FAULTY_RANK} after step {FAULT_AFTER}.")
    with tempfile.TemporaryDirectory(prefix="scout-loop-") as folder:
        healthy, broken = Path(folder, "healthy"), Path(folder, "faulty")
        for run_dir, word in ((healthy, "healthy"), (broken, "faulty")):
            if (code := _torchrun(run_dir, word)) != 0:
                print(f"The {word} run ended with exit code {code}:\n{_tail(run_dir)}")
                return 1
        return _judge(healthy, broken)


def _judge(healthy: Path, broken: Path) -> int:
    lines = (broken / "events.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    faults = [r for r in records if r["type"] == "SCOUTFaultReport" and r["kind"] == "sdc"]
    decisions = [r for r in records if r["type"] == "RecoveryDecision"]
    claims = {
        f"rank {FAULTY_RANK} was named": [r["ranks"] for r in faults] == [[FAULTY_RANK]],
        f"the state of step {FAULT_AFTER + 1} was rejected and step {FAULT_AFTER - 1} chosen": [
            (r["mode"], r["step"]) for r in decisions
        ]
        == [("RECOVERY_VERIFIED", FAULT_AFTER - 1)],
        "torchrun restarted the job, which ended in the bits of the healthy run": all(
            (healthy / f"final-{rank}.json").read_text() == (broken / f"final-{rank}.json").read_text()
            for rank in range(RANKS)
        ),
    }
    for claim, held in claims.items():
        print(f"  {'yes' if held else 'NO '}  {claim}")
    return 0 if all(claims.values()) else 1


def _torchrun(run_dir: Path, word: str) -> int:
    run_dir.mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += ["--max-restarts=1", "--monitor-interval=0.2", "-m", "scout_core.demo.loop", str(run_dir), word]
    # attempts would else share one store, and a rank may read the address that a dead one left in it
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if Path("/sys/class/net/lo").exists():
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with (run_dir / "log.txt").open("w") as log:
        return subprocess.run(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=_DEADLINE_S, check=False
        ).returncode


def _tail(run_dir: Path) -> str:
    return "\n".join((run_dir / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()[-20:])


if __name__ == "__main__":
    if len(sys.argv) == 3:
        train(Path(sys.argv[1]), sys.argv[2] == "faulty")
    else:
        sys.exit(main())
