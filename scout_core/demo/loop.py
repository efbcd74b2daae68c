"""The whole loop: a wrong weight on rank 2, its step rejected, a restart by torchrun, and the bits of a healthy run.

`python -m scout_core.demo.loop` starts torchrun twice; exit code 0 if every claim held, 1 if one did not. With
`--run-dir DIR` both runs stay there, to be looked into with `scout trust ls DIR/faulty`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
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
_DEADLINE_S = 300.0
_END_S = 10.0


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
    parser = argparse.ArgumentParser(prog="python -m scout_core.demo.loop", description=__doc__)
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="keep both runs there; a new or empty folder")
    kept: Path | None = parser.parse_args().run_dir
    if kept is not None and kept.exists() and (not kept.is_dir() or any(kept.iterdir())):
        parser.error(f"{kept} is in use; name a new or an empty folder")
    print(f"\nThe whole loop: a bit of {_WEIGHT} flips on rank {FAULTY_RANK} after step {FAULT_AFTER}.", flush=True)
    with tempfile.TemporaryDirectory(prefix="scout-loop-") as folder:
        return _run(kept or Path(folder), kept)


def _run(folder: Path, kept: Path | None) -> int:
    for word in ("healthy", "faulty"):
        print(f"  ...  {RANKS} ranks under torchrun, {STEPS} steps, {word}; half a minute or so", flush=True)
        try:
            end = f"ended with exit code {code}" if (code := _torchrun(folder / word, word)) else ""
        except subprocess.TimeoutExpired:
            end = f"did not end within {_DEADLINE_S:g} s"
        if end:
            print(f"The {word} run {end}:\n{_tail(folder / word)}")
            return 1
    code = _judge(folder / "healthy", folder / "faulty")
    if kept is not None:
        print(f"Look into it: scout trust ls {kept / 'faulty'}, {kept / 'faulty' / 'events.jsonl'}")
    return code


def _judge(healthy: Path, broken: Path) -> int:
    lines = (broken / "events.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    faults = [r for r in records if r["type"] == "SCOUTFaultReport" and r["kind"] == "sdc"]
    decisions = [r for r in records if r["type"] == "RecoveryDecision"]
    claims = {
        f"rank {FAULTY_RANK} was named": [r["ranks"] for r in faults] == [[FAULTY_RANK]],
        f"the state of step {FAULT_AFTER + 1} was rejected and a verified one from before the fault chosen": [
            (r["mode"], r["step"] in range(1, FAULT_AFTER))
            for r in decisions  # a slow disk may have kept the newest back
        ]
        == [("RECOVERY_VERIFIED", True)],
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
    command += ["--max-restarts=1", "--monitor-interval=0.2", "-m", "scout_core.demo.loop", "train"]
    command += [str(run_dir.absolute()), word]
    # attempts would else share one store, and a rank may read the address that a dead one left in it
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if Path("/sys/class/net/lo").exists():
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return run_bounded(command, environment, run_dir / "log.txt", _DEADLINE_S)


def run_bounded(command: Sequence[str], environment: Mapping[str, str], log: Path, deadline_s: float) -> int:
    """Run torchrun with its output appended to `log`; returns its exit code.

    Raises `subprocess.TimeoutExpired` at the deadline. However it returns, torchrun and its workers are gone.
    """
    with log.open("a") as output:
        process = subprocess.Popen(
            list(command), env=dict(environment), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(deadline_s)
        finally:
            _end_family(process)


def _end_family(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL a process and all below it: torchrun's workers have sessions of their own, beyond any group signal."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGSTOP)  # so that it starts no more of them meanwhile
    below = psutil.Process(process.pid).children(recursive=True)
    for one in below:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.kill()
    process.wait()
    psutil.wait_procs(below, timeout=_END_S)


def _tail(run_dir: Path) -> str:
    return "\n".join((run_dir / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()[-20:])


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:  # one of torchrun's ranks
        train(Path(sys.argv[2]), sys.argv[3] == "faulty")
    else:
        sys.exit(main())
