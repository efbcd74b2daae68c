"""Section A of the case list (hangs and desyncs): four real ranks with their observers, a threshold of 2 s.

Each test makes the fault as the report describes it and asserts what SCOUT says: kind, rank, phase, decision.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from scout_core.trust.states import TrustState
from tests.oob.jobs import (
    STALL_S,
    WIDTH,
    TinyJob,
    first_report,
    idle,
    records,
    reduce,
    reports,
    running,
    say,
    wait_until,
)
from tests.trust.job import settle


def check(report: dict[str, Any], kind: str, ranks: list[int], phase: str = "train", action: str = "stop") -> None:
    seen = (report["kind"], report["ranks"], report["phase"], report["recommended_action"])
    assert seen == (kind, ranks, phase, action), (report["message"], report["evidence"])
    if ranks:
        assert report["status"] == "Attributed" and report["exonerating"]


def say_verified(job: TinyJob, run_dir: str) -> None:
    """Every state that this rank holds to be verified."""
    for step, state in job.scout._trust._book.states.items():
        if state is TrustState.RECOVERY_VERIFIED:
            say(run_dir, f"verified{step}")


def check_rollback(run_dir: Path, to: int) -> None:
    """Back to the state verified before, and nothing is certified later although the peers agree again."""
    decisions = [r for r in records(run_dir) if r["type"] == "RecoveryDecision"]
    assert {(d["mode"], d["step"], tuple(d["exclude_ranks"])) for d in decisions} == {("RECOVERY_VERIFIED", to, ())}
    assert {path.name for path in run_dir.glob("verified*")} == {f"verified{to}"}


def a01_other_keys(run_dir: str) -> None:
    job = TinyJob(run_dir)
    job.step()
    for _ in ("a", "b") if job.rank == 1 else ("a",):
        reduce(1)
    dist.broadcast(torch.ones(3), src=0)
    idle()


@pytest.mark.slow
def test_a01_a_rank_with_one_more_key_to_log(tmp_path: Path) -> None:
    with running(a01_other_keys, tmp_path):
        report = first_report(tmp_path)
    check(report, "collective_desync", [1])
    assert report["evidence"]["sequence"] == 3 and " at jobs.py:" in report["evidence"]["found"]
    assert report["evidence"]["found"].startswith("all_reduce(") and "broadcast" in report["evidence"]["expected"]


def a02_guarded_save(run_dir: str) -> None:
    job = TinyJob(run_dir)
    for _ in range(5):
        job.step()
    if job.rank == 0:
        with job.scout.checkpoint_io("write", name="periodic"):
            dist.barrier()
    job.step()
    idle()


def test_a02_a_collective_save_on_the_first_rank_only(tmp_path: Path) -> None:
    with running(a02_guarded_save, tmp_path):
        report = first_report(tmp_path)
    check(report, "collective_desync", [0], phase="checkpoint")
    assert "barrier" in report["evidence"]["found"] and report["step"] == 5


def a03_uneven_batches(run_dir: str) -> None:
    job = TinyJob(run_dir)
    for _ in range(4 if job.rank == 3 else 5):
        job.step()
    dist.barrier()
    idle()


@pytest.mark.slow
def test_a03_a_rank_that_runs_out_of_batches(tmp_path: Path) -> None:
    with running(a03_uneven_batches, tmp_path):
        report = first_report(tmp_path)
    check(report, "collective_desync", [3])
    assert "barrier" in report["evidence"]["found"] and "all_reduce" in report["evidence"]["expected"]


def a04_swallowed_error(run_dir: str) -> None:
    job = TinyJob(run_dir)
    for step in range(6):
        try:
            job.compute()
            if job.rank == 1 and step == 2:
                raise RuntimeError("bad batch")
            reduce()
            job.update()
        except RuntimeError as error:
            if "bad batch" not in str(error):
                raise


@pytest.mark.slow
def test_a04_a_swallowed_error_on_the_rank_that_ends_cleanly(tmp_path: Path) -> None:
    with running(a04_swallowed_error, tmp_path):
        report = first_report(tmp_path)
    check(report, "collective_desync", [1])
    assert report["step"] == 2 and set(report["exonerating"]) == {"0", "2", "3"}


def a05_drifting_counter(run_dir: str) -> None:
    job = TinyJob(run_dir, check_interval=3, gemini=True)
    local = 0
    for loop in range(1, 10):
        if not (job.rank == 1 and loop == 3):
            local += 1
        job.compute()
        if local % 4 == 0:
            reduce()
        job.update()
        settle(job.scout)
    say_verified(job, run_dir)
    job.scout.close()


@pytest.mark.slow
def test_a05_a_step_counter_that_lags_on_one_rank(tmp_path: Path) -> None:
    with running(a05_drifting_counter, tmp_path) as ranks:
        report = first_report(tmp_path)
        ranks.wait(100)
    check(report, "collective_desync", [1])
    assert report["evidence"]["how"] == "step drift" and report["step"] == 3
    check_rollback(tmp_path, to=3)


SHAPES = {"large": (60000, torch.float32), "small": (6, torch.float32), "dtype": (40000, torch.float64)}


def a07_other_shape(run_dir: str, which: str) -> None:
    size, dtype = SHAPES[which]
    job = TinyJob(run_dir)
    job.step()
    reduce(size, dtype) if job.rank == 2 else reduce(4 if which == "small" else 40000)
    reduce()
    idle()


@pytest.mark.parametrize("which", list(SHAPES))
def test_a07_a_rank_that_reduces_another_shape_or_type(tmp_path: Path, which: str) -> None:
    with running(a07_other_shape, tmp_path, which):
        report = first_report(tmp_path)
    check(report, "collective_desync", [2])
    assert ("float64" in report["evidence"]["found"]) == (which == "dtype")


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.b = nn.Linear(WIDTH, WIDTH)
        self.use_b = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        return self.b(x) if self.use_b else x


def a08_unused_parameter(run_dir: str, find: bool) -> None:
    model = Branches()
    job = TinyJob(run_dir, wrap=lambda _: DistributedDataParallel(model, find_unused_parameters=find))
    for step in range(4):
        model.use_b = not (job.rank == 2 and step == 1)
        job.compute()
        job.update()
    say(run_dir, f"done{job.rank}")
    job.scout.close()


@pytest.mark.slow
def test_a08_a_parameter_that_one_rank_does_not_use(tmp_path: Path) -> None:
    with running(a08_unused_parameter, tmp_path, False):
        report = first_report(tmp_path)
    check(report, "collective_desync", [2])
    assert report["step"] == 1


@pytest.mark.slow
def test_a09_the_same_is_legal_when_ddp_looks_for_unused_parameters(tmp_path: Path) -> None:
    with running(a08_unused_parameter, tmp_path, True) as ranks:
        ranks.wait(150)
    assert len(list(tmp_path.glob("done*"))) == 4 and reports(tmp_path) == []


class WorkerIds(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.02)
        return torch.tensor(os.getpid())


def a10_loader_worker(run_dir: str, number: int) -> None:
    job = TinyJob(run_dir, dataloader_stall_s=8 * STALL_S, stall_eval_s=2 * STALL_S)
    job.step()
    # forked as in a script: a rank of the pool would start a fork server of its own, which outlives it
    loader = DataLoader(WorkerIds(), batch_size=2, num_workers=1, multiprocessing_context="fork")
    job.model.eval()
    for count, ids in enumerate(job.scout.instrument_dataloader(loader, name="valid")):
        worker = int(ids[0])
        with torch.no_grad():
            job.model(torch.ones(1, WIDTH))
        if job.rank == 2 and count == 2:
            os.kill(worker, number)
            say(run_dir, f"worker{worker}")
        reduce()
    idle()


def test_a10_a_stopped_loader_worker_in_evaluation(tmp_path: Path) -> None:
    with running(a10_loader_worker, tmp_path, signal.SIGSTOP):
        report = first_report(tmp_path)
    worker = next(tmp_path.glob("worker*")).name.removeprefix("worker")
    os.kill(int(worker), signal.SIGKILL)  # stopped, it would outlive its rank
    check(report, "dataloader_stall", [2], phase="eval", action="restart")
    assert report["evidence"]["workers"] == {worker: "T"} and report["surface"] == "valid"


@pytest.mark.slow
def test_a11_a_killed_loader_worker(tmp_path: Path) -> None:
    with running(a10_loader_worker, tmp_path, signal.SIGKILL):
        report = first_report(tmp_path)
    check(report, "dataloader_stall", [2], phase="eval", action="restart")
    assert "host memory" in report["message"]


def a12_stalled(run_dir: str, how: str) -> None:
    job = TinyJob(run_dir)
    for step in range(4):
        job.step()
        if job.rank == 2 and step == 2:
            say(run_dir, "stopped")
            if how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            while how == "spinning":
                pass
    idle()


@pytest.mark.parametrize(
    ("how", "state"), [("stopped", "state T"), pytest.param("spinning", "state R", marks=pytest.mark.slow)]
)
def test_a12_a_process_that_lives_and_does_nothing(tmp_path: Path, how: str, state: str) -> None:
    with running(a12_stalled, tmp_path, how):
        report = first_report(tmp_path)
        late = time.time() - float((tmp_path / "stopped").read_text()) - STALL_S
    check(report, "process_stall", [2], action="restart")
    assert state in report["message"] and late < 2.0, "seconds from the threshold to the report"
    folder = Path(report["evidence"]["bundle"])
    healthy = (folder / "stacks-rank0.txt").read_text()
    assert "all_reduce" in healthy and "File" in healthy
    if how == "spinning":
        assert "a12_stalled" in (folder / "stacks-rank2.txt").read_text()


def a13_killed(run_dir: str) -> None:
    job = TinyJob(run_dir)
    for step in range(8):
        job.step()
        if job.rank == 2 and step == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a13_a_killed_rank_is_named_and_not_those_that_report_first(tmp_path: Path) -> None:
    with running(a13_killed, tmp_path):
        report = first_report(tmp_path)
    check(report, "process_exit", [2], action="restart")
    assert report["evidence"]["exit_codes"]["2"] == -9


def a14_other_branch(run_dir: str) -> None:
    job = TinyJob(run_dir)
    with job.scout.phase("checkpoint"):
        if job.rank == 0:
            dist.broadcast_object_list([1, 2], src=0)
        else:
            dist.barrier()
    idle()


@pytest.mark.slow
def test_a14_a_rank_that_alone_sees_a_checkpoint(tmp_path: Path) -> None:
    with running(a14_other_branch, tmp_path):
        report = first_report(tmp_path)
    check(report, "collective_desync", [0], phase=report["phase"])
    assert "broadcast_object_list" in report["evidence"]["found"]


def a15_in_handler(run_dir: str) -> None:
    job = TinyJob(run_dir)
    job.step()
    job.step()
    try:
        if job.rank == 1:
            raise ValueError("a bad sample")
    except ValueError:
        idle()
    job.step()
    idle()


def test_a15_a_rank_that_lingers_in_its_exception_handler(tmp_path: Path) -> None:
    with running(a15_in_handler, tmp_path):
        report = first_report(tmp_path)
    check(report, "process_stall", [1], action="restart")
    assert "ValueError: a bad sample" in report["message"] and "Traceback" in report["evidence"]["exception"]


def a16_quiet_exit(run_dir: str) -> None:
    job = TinyJob(run_dir)
    for step in range(6):
        job.step()
        if job.rank == 2 and step == 2:
            os._exit(1)


@pytest.mark.slow
def test_a16_a_rank_that_ended_while_the_launcher_waits(tmp_path: Path) -> None:
    with running(a16_quiet_exit, tmp_path):
        report = first_report(tmp_path)
    check(report, "process_exit", [2], action="restart")
    assert report["evidence"]["exit_codes"]["2"] == 1


def a17_late_start(run_dir: str) -> None:
    job = TinyJob(run_dir, stall_startup_s=2 * STALL_S)
    say(run_dir, f"attached{job.rank}")
    if job.rank == 1:
        idle()
    reduce()
    idle()


@pytest.mark.slow
def test_a17_a_rank_that_never_comes_to_the_first_collective(tmp_path: Path) -> None:
    with running(a17_late_start, tmp_path):
        wait_until(lambda: len(list(tmp_path.glob("attached*"))) == 4)
        begun = time.time()
        report = first_report(tmp_path)
        waited = time.time() - begun
    check(report, "process_stall", [1], phase="startup", action="restart")
    assert waited > 1.5 * STALL_S, "silent within the grace"


def a18_named_order(run_dir: str) -> None:
    """Reductions of equal size, told apart by operation: the order differs on one rank."""
    job = TinyJob(run_dir, check_interval=2, gemini=True)
    order = [dist.ReduceOp.SUM, dist.ReduceOp.MAX]
    for step in range(6):
        job.compute()
        for op in reversed(order) if job.rank == 2 and step == 2 else order:
            dist.all_reduce(torch.ones(1), op=op)
        job.update()
        settle(job.scout)
    say_verified(job, run_dir)
    job.scout.close()


def test_a18_equal_shapes_in_another_order(tmp_path: Path) -> None:
    with running(a18_named_order, tmp_path) as ranks:
        report = first_report(tmp_path)
        ranks.wait(100)
    check(report, "collective_desync", [2])
    assert report["evidence"]["how"] == "wrong order" and report["step"] == 2
    check_rollback(tmp_path, to=2)


def a20_finalize(run_dir: str) -> None:
    job = TinyJob(run_dir)
    for _ in range(3):
        job.step()
    if job.rank == 0:
        with job.scout.phase("checkpoint"):
            dist.all_gather([torch.zeros(2) for _ in range(4)], torch.ones(2))
    job.step()
    idle()


@pytest.mark.slow
def test_a20_finalizing_a_save_on_the_first_rank_only(tmp_path: Path) -> None:
    with running(a20_finalize, tmp_path):
        report = first_report(tmp_path)
    check(report, "collective_desync", [0], phase="checkpoint")
    assert "all_gather" in report["evidence"]["found"]
