"""Hangs and desyncs that cross process groups: tensor, pipeline and data parallelism in one job of four ranks."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from scout_core.oob.records import Call, GroupView, ProcessView, RankView
from scout_core.oob.verdict import judge
from tests.oob.jobs import TinyJob, first_report, idle, reports, running, say

WORLD = (0, 1, 2, 3)
TP = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
DP = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}


def group(members: tuple[int, ...], calls: str, steps: str) -> GroupView:
    """Calls as letters, with the step of each."""
    ring = tuple(
        Call(sequence=i + 1, fingerprint=ord(c), text=f"{c}()", state="returned", step=int(s))
        for i, (c, s) in enumerate(zip(calls, steps, strict=True))
    )
    return GroupView(key=hash(members), members=members, issued=len(calls), calls=ring)


def rank(number: int, tp: tuple[str, str], dp: tuple[str, str], where: str = "", **changes: Any) -> RankView:
    """A rank that has long been in the last call of its `tp` or `dp` group, or in none."""
    groups = {"tp": group(TP[number], *tp), "dp": group(DP[number], *dp)}
    view = RankView(rank=number, quiet_s=9.0, threshold_s=3.0, step=3, groups=tuple(groups.values()))
    if where:
        inside = groups[where]
        view = replace(view, activity="collective", group=inside.key, sequence=inside.issued)
    return replace(view, **changes)


def verdict(*views: RankView) -> tuple[str, tuple[int, ...]] | None:
    found = judge(views, WORLD)
    return None if found is None else (found.kind, found.ranks)


def test_a_pair_that_differs_is_decided_by_the_pair_beside_it() -> None:
    """Rank 1 left the first of two calls out; its group of two alone could not say which of them is right."""
    fine, dp = ("ababa", "00112"), ("gg", "01")
    views = [rank(0, fine, dp, "tp"), rank(1, ("ababb", "00112"), dp, "tp"), *(rank(r, fine, dp, "tp") for r in (2, 3))]
    assert verdict(*views) == ("collective_desync", (1,))


def test_half_of_two_pairs_is_no_majority() -> None:
    """Rank 3 has yet to come to the call on which ranks 0 and 1 part: rank 2 makes it two against one, of four."""
    fine, dp = ("ab", "01"), ("g", "0")
    views = [rank(0, fine, dp, "tp"), rank(1, ("ac", "01"), dp, "tp"), rank(2, fine, dp, "tp")]
    assert verdict(*views, rank(3, ("a", "0"), dp, threshold_s=60.0)) == ("collective_desync", ())
    assert verdict(*views, rank(3, fine, dp, "tp")) == ("collective_desync", (1,))


def test_a_pair_beside_it_that_runs_another_program_decides_nothing() -> None:
    views = [rank(0, ("aba", "001"), ("g", "0"), "tp"), rank(1, ("abb", "001"), ("g", "0"), "tp")]
    views += [rank(r, ("xya", "001"), ("g", "0"), "tp") for r in (2, 3)]
    assert verdict(*views) == ("collective_desync", ())


def test_equal_calls_that_pair_up_across_steps_are_traced_when_the_ranks_wait_in_a_circle() -> None:
    """Rank 1 left one call of step 1 out: it now waits for rank 0 elsewhere, which waits for its last call."""
    behind = rank(0, ("aaaa", "0123"), ("ggg", "012"), "tp")
    ahead = rank(1, ("aaa", "023"), ("gggg", "0123"), "dp")
    last = Call(sequence=1, fingerprint=5, text="end()", state="inside", step=4)
    end = GroupView(key=99, members=WORLD, issued=1, calls=(last,))
    views = [behind]
    for view in (ahead, *(rank(r, ("aaaa", "0123"), ("gggg", "0123")) for r in (2, 3))):
        views.append(replace(view, activity="collective", group=99, sequence=1, groups=(*view.groups, end)))
    found = judge(views, WORLD)
    assert found is not None and (found.kind, found.ranks, found.step) == ("collective_desync", (1,), 1)


def test_the_first_to_come_is_not_alone_in_its_call() -> None:
    """Rank 0 came early and is the only one whose patience is over; rank 2 never comes."""
    views = [rank(r, ("a", "0"), ("g", "0"), "dp") for r in WORLD]
    world = [GroupView(key=5, members=WORLD, issued=n, calls=views[0].groups[0].calls[:n]) for n in (0, 1)]
    late = replace(views[2], activity="none", group=None, sequence=0, groups=(world[0],))
    waiting = [
        replace(views[r], quiet_s=9.0 if r == 0 else 2.0, group=5, sequence=1, groups=(world[1],)) for r in (0, 1, 3)
    ]
    assert verdict(*waiting, late) == ("process_stall", (2,))


def test_two_that_hang_together_while_the_others_wait_for_them_are_not_blamed() -> None:
    views = [rank(r, ("ab", "00"), ("", ""), "tp") for r in (0, 1)]
    views += [rank(r, ("ab", "00"), ("g", "0"), "dp") for r in (2, 3)]
    assert verdict(*views) == ("collective_hang", ())


@pytest.mark.parametrize(
    ("late", "expected"),
    [
        ({}, ("process_stall", (2,))),
        ({"process": ProcessView(state="T")}, ("process_stall", (2,))),
        ({"activity": "dataloader", "activity_name": "train"}, ("dataloader_stall", (2,))),
    ],
)
def test_a_stage_that_the_others_wait_for_is_found_through_point_to_point(
    late: dict[str, Any], expected: tuple[str, tuple[int, ...]]
) -> None:
    """Stages {0, 1} and {2, 3}; rank 0 wants its gradient from rank 2, the rest is in its reduction."""
    dp = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    base = RankView(rank=0, quiet_s=9.0, threshold_s=3.0, step=3)
    views = [replace(base, activity="point_to_point", activity_name="recv at a.py:1", receives=(2,))]
    for r in (1, 3):
        seen = group(dp[r], "g", "3")
        views.append(replace(base, rank=r, activity="collective", group=seen.key, sequence=1, groups=(seen,)))
    assert verdict(*views, replace(base, rank=2, **late)) == expected


def test_both_ends_of_a_transfer_that_does_not_end_are_not_blamed() -> None:
    base = RankView(rank=0, quiet_s=9.0, threshold_s=3.0, activity="point_to_point", activity_name="recv")
    assert verdict(replace(base, receives=(1,)), replace(base, rank=1, sends=(0,))) == ("collective_hang", ())
    assert verdict(replace(base, receives=(1,)), replace(base, rank=1, receives=(0,))) == ("collective_desync", ())


def tensor_parallel(run_dir: str, how: str) -> None:
    """Two reductions over the tensor pair and one over the data pair in each step; rank 1 does something else."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
    job = TinyJob(run_dir, mesh=mesh)
    tp, dp = mesh.get_group("tp"), mesh.get_group("dp_replicate")
    for step in range(5):
        job.compute()
        culprit = job.rank == 1 and step == 3
        if culprit and how == "idle":
            idle()
        if not (culprit and how in ("skip", "skip other")):
            dist.all_reduce(torch.ones(4), group=tp)
        dist.all_reduce(torch.ones(6 if how == "skip other" else 4), group=tp)
        dist.all_reduce(torch.ones(4), group=dp)
        job.update()
    dist.barrier()
    idle()


@pytest.mark.parametrize(
    ("how", "kind"), [("idle", "process_stall"), ("skip", "collective_desync"), ("skip other", "collective_desync")]
)
def test_a_tensor_parallel_partner_is_named(tmp_path: Path, how: str, kind: str) -> None:
    with running(tensor_parallel, tmp_path, how):
        report = first_report(tmp_path)
    assert (report["kind"], report["ranks"]) == (kind, [1]), report["message"]
    assert kind != "collective_desync" or report["step"] == 3, report["message"]


def pipeline(run_dir: str, how: str) -> None:
    """Two stages of two replicas: forward to the next stage, gradient back, one reduction over the replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_replicate"))
    job = TinyJob(run_dir, mesh=mesh)
    first, other, values = job.rank < 2, (job.rank + 2) % 4, torch.ones(4)
    for step in range(5):
        if first:
            dist.send(values, other)
        else:
            dist.recv(values, other)
        job.compute()
        if job.rank == 2 and step == 3:
            if how == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            idle()
        back = dist.irecv if first else dist.isend
        works = [back(values, other)] if how == "idle" else dist.batch_isend_irecv([dist.P2POp(back, values, other)])
        for work in works:
            work.wait()
        dist.all_reduce(torch.ones(4), group=mesh.get_group("dp_replicate"))
        job.update()


@pytest.mark.parametrize("how", ["idle", "stop"])
def test_a_pipeline_stage_that_stands_still_is_named(tmp_path: Path, how: str) -> None:
    with running(pipeline, tmp_path, how):
        report = first_report(tmp_path)
    assert (report["kind"], report["ranks"]) == ("process_stall", [2]), report["message"]
    assert ("waits in irecv" if how == "idle" else "batch_isend_irecv") in report["exonerating"]["0"], report[
        "exonerating"
    ]


def silently(run_dir: str) -> None:
    """Calls of equal shape that pair up wrongly and go on: in a tensor pair, then in a data pair."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "tp"))
    job = TinyJob(run_dir, mesh=mesh, check_interval=2)
    tp, dp, others = mesh.get_group("tp"), mesh.get_group("dp_replicate"), dist.new_group([1, 2])
    swaps = {3: tp, 7: dp}  # by step, on rank 1
    for step in range(10):
        job.compute()
        for group in (tp, dp):
            swapped = job.rank == 1 and swaps.get(step) is group
            ops = (dist.ReduceOp.SUM, dist.ReduceOp.MAX)
            for op in reversed(ops) if swapped else ops:
                dist.all_reduce(torch.ones(1), op=op, group=group)
        if job.rank in (1, 2):  # legal: a group of ranks that are neither replicas nor partners of each other
            dist.barrier(group=others)
        job.update()
        result = job.scout.last_result
        if result is not None and result.step == step + 1:
            fields = sorted({reason.field for reason in result.inconclusive_reasons})
            say(run_dir, f"check{job.rank}-{result.step}", json.dumps([fields, len(result.checked_recipe_ids)]))
    job.scout.close()


def test_a_silent_desync_in_a_group_of_partners_is_found_at_the_next_check(tmp_path: Path) -> None:
    with running(silently, tmp_path) as ranks:
        ranks.wait(100)
    found = sorted(reports(tmp_path), key=lambda report: report["step"])
    assert [(r["kind"], r["ranks"], r["step"], r["evidence"]["group"]) for r in found] == [
        ("collective_desync", [1], 3, [0, 1]),
        ("collective_desync", [1], 7, [1, 3]),
    ]
    assert [r["evidence"]["how"] for r in found] == ["wrong order"] * 2
    for rank in WORLD:  # all four decide alike, so that none waits in a replay for one that stays out of it
        checks = {step: json.loads((tmp_path / f"check{rank}-{step}").read_text()) for step in (2, 4, 6, 8, 10)}
        assert checks[4] == checks[8] == [["collective_digest"], 0]
        assert all(checks[step][0] == [] and checks[step][1] > 0 for step in (2, 6, 10)), checks
