"""Torch's flight records in the evidence: which recorders there are, what is written, and when nothing is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from scout_core.oob.flight import Recorder, recorders, recording, write_flight_records


def fake(name: str, entries: int) -> Recorder:
    text = json.dumps({"entries": [{"record_id": i} for i in range(entries)]})
    return Recorder(name=name, entries=text.encode, dump=lambda: b"dump of " + name.encode())


@pytest.mark.parametrize(
    ("environment", "on"),
    [
        ({}, True),
        ({"TORCH_FR_BUFFER_SIZE": "2000"}, True),
        ({"TORCH_FR_BUFFER_SIZE": "0"}, False),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, False),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "-1"}, False),
        ({"TORCH_FR_BUFFER_SIZE": "20", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}, True),
    ],
)
def test_the_environment_says_whether_torch_records(environment: dict[str, str], on: bool) -> None:
    assert recording(environment) is on


def test_records_with_entries_are_written_as_they_are(tmp_path: Path) -> None:
    written = write_flight_records(tmp_path / "bundle", 3, (fake("nccl", 2), fake("gloo", 0)))
    assert written == ("nccl_flight_3",)
    assert (tmp_path / "bundle" / "nccl_flight_3").read_bytes() == b"dump of nccl"


def test_empty_records_leave_no_folder(tmp_path: Path) -> None:
    assert write_flight_records(tmp_path / "bundle", 0, (fake("nccl", 0),)) == ()
    assert not (tmp_path / "bundle").exists()


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_this_torch_has_the_recorder_of_gloo(alone: None, tmp_path: Path) -> None:
    dist.all_reduce(torch.ones(3))
    (recorder,) = (found for found in recorders() if found.name == "gloo")
    names = [entry["profiling_name"] for entry in json.loads(recorder.entries())["entries"]]
    assert "gloo:all_reduce" in names
    assert "gloo_flight_0" in write_flight_records(tmp_path, 0)
    assert b"all_reduce" in (tmp_path / "gloo_flight_0").read_bytes()
