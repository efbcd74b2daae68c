"""Where observers meet: the choice, and a job on two hosts, which are two loopback addresses here."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import distributed_c10d as c10d

from scout_core.config import OobConfig
from scout_core.oob.rendezvous import Run, meeting_of, this_run
from tests.oob.jobs import TinyJob, reports, running, say

HERE, THERE = "127.0.0.1", "127.0.0.2"
RUN = Run(run="a", attempt=0, address="master")


def meet(peers: tuple[int, ...] = (0, 1), torchrun: bool = True, run: Run = RUN, **options: Any) -> tuple[Any, ...]:
    meeting = meeting_of(OobConfig(**options), run, peers, 1, torchrun)
    return meeting.address, meeting.port, meeting.file


def test_torchruns_port_follows_from_run_attempt_and_peers() -> None:
    address, port, file = meet()
    assert (address, file) == ("master", None) and 20_000 <= port < 32_000
    assert meet() == (address, port, file)
    others = [meet(run=Run(run="b", attempt=0)), meet(run=Run(run="a", attempt=1)), meet(peers=(0, 2))]
    assert port not in [other[1] for other in others]
    assert meet(torchrun=False)[1] == 0


def test_an_address_or_a_port_selects_tcp_even_with_a_state_folder(tmp_path: Path) -> None:
    assert meet(hang_master_port=7, hang_state_dir=tmp_path) == ("master", 7, None)
    assert meet(hang_master_addr="other", hang_state_dir=tmp_path)[0] == "other"


def test_a_state_folder_alone_selects_a_file_of_this_attempt_and_these_peers(tmp_path: Path) -> None:
    files = {
        meet(run=Run(run="../x", attempt=attempt), peers=peers, hang_state_dir=tmp_path)[2]
        for attempt in (0, 1)
        for peers in ((0, 1), (2, 3))
    }
    assert len(files) == 4 and {file.parent for file in files} == {tmp_path}


def test_peers_without_the_first_rank_do_not_meet_at_its_address() -> None:
    assert meet(peers=(2, 3), hang_master_addr="other", hang_master_port=7) == (HERE, 0, None)
    assert meet(peers=(2, 3))[0] == HERE


@pytest.mark.parametrize(
    ("environment", "run", "attempt"),
    [
        ({"TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_RESTART_COUNT": "2"}, "r", 2),
        ({"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "none-a-1", 0),
        ({"SLURM_JOB_ID": "9"}, "9", 0),
        ({}, "run--", 0),
    ],
)
def test_the_run_is_what_the_launcher_says(environment: dict[str, str], run: str, attempt: int) -> None:
    found = this_run(environment)
    assert (found.run, found.attempt) == (run, attempt)


def on_two_hosts(run_dir: str, options: dict[str, Any]) -> None:
    """Ranks 0 and 1 on one host, 2 and 3 on another: the master's address is not the one they would guess."""
    os.environ.update(LOCAL_WORLD_SIZE="2", MASTER_ADDR=THERE, TORCHELASTIC_RUN_ID=f"hosts-{os.path.basename(run_dir)}")
    job = TinyJob(run_dir, **options)
    for _ in range(3):
        job.step()
    where = c10d.PrefixStore("scout-oob/0/0/1", c10d._get_default_store()).get("where").decode()
    say(run_dir, f"watched{job.rank}-{job.scout.observer_pid is not None}-{where.split('|')[0]}")
    job.scout.close()


@pytest.mark.parametrize(
    ("options", "address"),
    [({}, THERE), ({"hang_master_addr": THERE, "hang_master_port": 0}, THERE), ({"hang_master_addr": HERE}, "name")],
    ids=["torchrun", "given", "given as local"],
)
def test_two_hosts_meet_at_an_address_that_both_reach(tmp_path: Path, options: dict[str, Any], address: str) -> None:
    with running(on_two_hosts, tmp_path, options) as ranks:
        ranks.wait(150)
    expected = socket.gethostname() if address == "name" else address
    assert sorted(path.name for path in tmp_path.glob("watched*")) == [f"watched{r}-True-{expected}" for r in range(4)]
    assert reports(tmp_path) == []
