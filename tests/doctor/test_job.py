"""The doctor on real ranks, and as a command in processes of its own."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scout_core.doctor import examine
from scout_core.doctor.command import Diagnosis, run_doctor
from scout_core.doctor.job import JobError, gather_launched
from tests.distributed.pool import RankPool

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks4() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 8)


def examine_with_tf32_on(odd: int | None) -> tuple[dict[str, object], str]:
    before = torch.get_float32_matmul_precision()
    if dist.get_rank() == odd:
        torch.set_float32_matmul_precision("high")
    told = io.StringIO()
    try:
        model = DistributedDataParallel(Model())
        result = examine(model, torch.optim.AdamW(model.parameters()), file=told, timeout_s=20)
    finally:
        torch.set_float32_matmul_precision(before)
    return result.to_json(), told.getvalue()


def groups_left_by_examine() -> int:
    model = Model()
    before = len(dist.distributed_c10d._world.pg_map)
    examine(model, torch.optim.SGD(model.parameters(), lr=0.1), file=io.StringIO(), timeout_s=20)
    return len(dist.distributed_c10d._world.pg_map) - before


def test_rank_2_with_another_setting_is_named_on_every_rank_and_printed_by_rank_0(ranks4):
    answers = ranks4.run(examine_with_tf32_on, 2)
    for told, _ in answers:
        (found,) = [f for f in told["findings"] if f["id"] == "setting-matmul-precision"]
        assert found["ranks"] == [2] and found["severity"] == "fatal"
        assert "highest on ranks 0-1, 3; high on rank 2" in found["message"]
        assert told["peers"] == [0, 1, 2, 3] and {row["peers"] for row in told["coverage"]} == {4}
        assert [rank["rank"] for rank in told["ranks"]] == [0, 1, 2, 3]
    assert "setting-matmul-precision [rank 2]" in answers[0][1]
    assert [text for _, text in answers[1:]] == ["", "", ""]


def test_equal_ranks_have_no_difference_and_no_group_is_left(ranks4):
    for told, _ in ranks4.run(examine_with_tf32_on, None):
        assert not [f for f in told["findings"] if f["id"].startswith(("setting-", "version-", "kind-"))]
    assert ranks4.run(groups_left_by_examine) == [0, 0, 0, 0]


def diagnose_as_later_ranks_of_five(port: int) -> Diagnosis:
    """Pool ranks 0-3 act as ranks 1-4 of a job whose rank 0 never starts."""
    rank = dist.get_rank() + 1
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "5"}
    launcher = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with mock.patch.dict(os.environ, {**place, **launcher}):
        return run_doctor(in_job=True, timeout_s=3)


def test_a_rank_that_never_starts_is_named_by_the_lowest_that_came(ranks4):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = ranks4.run(diagnose_as_later_ranks_of_five, store.port)
    assert [one.speaks for one in told] == [True, False, False, False]
    assert [one.exit_code for one in told] == [1, 1, 1, 1]
    (missing,) = [f for f in told[0].findings if f.id == "rank-missing"]
    assert missing.ranks == (0,) and missing.severity == "fatal"
    assert [facts.rank for facts in told[0].facts] == [1, 2, 3, 4]


def gather_without_a_store() -> str:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with mock.patch.dict(os.environ, place), pytest.raises(JobError) as caught:
        gather_launched(1)
    return str(caught.value)


def test_a_store_that_does_not_answer_is_named():
    message = gather_without_a_store()
    assert "127.0.0.1:1" in message and "is rank 0 running" in message


def test_the_command_in_a_job_names_the_odd_rank_and_only_rank_0_speaks():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [start(rank, store.port, "2" if rank == 2 else "1") for rank in range(3)]
    try:
        texts = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [1, 1, 1], texts
    told = json.loads(texts[0][0])
    odd = [f for f in told["findings"] if f["id"] == "setting-omp-num-threads"]
    assert [f["ranks"] for f in odd] == [[2]]
    assert told["exit_code"] == 1 and len(told["ranks"]) == 3
    assert [out for out, _ in texts[1:]] == ["", ""]


def start(rank: int, port: int, threads: str) -> subprocess.Popen[str]:
    """The command as rank `rank` of 3, as torchrun starts it: the store is the launcher's, here the test's."""
    environ = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "3",
        "OMP_NUM_THREADS": threads,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    command = [sys.executable, "-m", "scout_core.doctor", "--json", "--timeout", "120"]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
