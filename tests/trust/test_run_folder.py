"""One run folder, one job: a second attach is refused on every rank, a dead or closed one is in nobody's way."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import scout_core
from scout_core.config import ConfigError
from scout_core.trust.run_record import RunFolder
from tests.distributed.pool import RankPool
from tests.trust.job import build


def attach_twice(run_dir: Path, gemini: bool) -> list[Any]:
    _, ddp, optimizer = build(int(os.environ["RANK"]))
    said: list[Any] = []
    with scout_core.attach(ddp, optimizer, run_dir=run_dir, gemini=gemini):
        try:
            scout_core.attach(ddp, optimizer, run_dir=run_dir, gemini=gemini).close()
            said.append("shared")
        except ConfigError as error:
            said.append(str(error))
    with scout_core.attach(ddp, optimizer, run_dir=run_dir, gemini=gemini):
        said.append("again")
    return said


@pytest.mark.distributed
def test_a_second_attach_is_refused_on_every_rank_until_the_first_is_closed(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        for refused, again in pool.run(attach_twice, tmp_path / "trust", True):
            assert "already in use" in refused and "run_dir of its own" in refused and again == "again"
        assert pool.run(attach_twice, tmp_path / "events", False) == [["shared", "again"]] * 2


def test_another_live_process_is_respected_and_a_killed_one_with_children_is_not(tmp_path: Path) -> None:
    out, into = os.pipe()
    owner = os.fork()
    if owner == 0:
        kept = RunFolder(tmp_path)  # in a name: the claim goes with the folder that nobody refers to
        assert kept.claim() is None or os._exit(1)
        heir = os.fork()  # as a loader's worker: it outlives its parent for a moment
        if heir:
            os.write(into, f"{heir}\n".encode())
        signal.pause()
    heir = int(os.read(out, 64))
    refusal = RunFolder(tmp_path).claim()
    assert refusal is not None and str(owner) in refusal
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    mine = RunFolder(tmp_path)
    assert mine.claim() is None
    os.kill(heir, signal.SIGKILL)
    mine.release()
    assert RunFolder(tmp_path).claim() is None


def test_a_folder_that_nobody_refers_to_is_free(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).claim() is None
    assert RunFolder(tmp_path).claim() is None
