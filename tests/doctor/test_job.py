"""The doctor on real ranks, and as a command in processes of its own."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scout_core.doctor import examine
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


def start(rank: int, world: int, port: int, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    environ = {**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **variables}
    command = [sys.executable, "-m", "scout_core.doctor", "--json", *arguments]
    return subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def launch(ranks: list[int], world: int, *arguments: str, odd: dict[int, dict[str, str]]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of the doctor on these ranks; the store is the test's, as with torchrun."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    processes = [start(rank, world, store.port, *arguments, **agent, **odd.get(rank, {})) for rank in ranks]
    try:
        texts = [process.communicate(timeout=60) for process in processes]
        return [(p.returncode, out, errors) for p, (out, errors) in zip(processes, texts, strict=True)]
    finally:
        for process in processes:
            process.kill()


def test_the_command_in_a_job_names_the_odd_rank_and_only_rank_0_speaks():
    answers = launch([0, 1, 2], 3, odd={2: {"OMP_NUM_THREADS": "2"}})
    assert [code for code, _, _ in answers] == [1, 1, 1], answers
    told = json.loads(answers[0][1])
    assert {f["id"]: f["ranks"] for f in told["findings"] if f["id"] == "setting-omp-num-threads"} == {
        "setting-omp-num-threads": [2]
    }
    assert told["exit_code"] == 1 and len(told["ranks"]) == 3
    assert [out for _, out, _ in answers[1:]] == ["", ""]


def test_a_rank_that_never_starts_is_named_by_the_lowest_that_came():
    answers = launch([1, 2], 3, "--timeout", "8", odd={})
    assert [code for code, _, _ in answers] == [1, 1], answers
    told = json.loads(answers[0][1])
    (missing,) = [f for f in told["findings"] if f["id"] == "rank-missing"]
    assert missing["ranks"] == [0] and missing["severity"] == "fatal"
    assert answers[1][1] == ""
