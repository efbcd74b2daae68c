"""The event log of a run: whole lines of strict JSON, appended."""

import json
import multiprocessing
from pathlib import Path

import pytest

from scout_core.report.event_log import EventLog
from tests.report.results import result_of


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_records_are_lines_of_json_in_a_folder_that_is_made(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "deep" / "run")
    log.append({"type": "check", "step": 1})
    log.append({"type": "check", "path": Path("x")})
    log.close()
    assert lines(log.path) == [{"type": "check", "step": 1}, {"type": "check", "path": "x"}]


def test_a_second_log_appends(tmp_path: Path) -> None:
    for step in (1, 2):
        log = EventLog(tmp_path)
        log.append({"step": step})
        log.close()
    assert [record["step"] for record in lines(log.path)] == [1, 2]


def test_a_check_with_evidence_is_strict_json(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.append(result_of({"hidden:0": [{"output": {1: -9}}] * 2}).to_json())
    log.close()
    assert lines(log.path)[0]["c3_results"]["hidden:0/output"]["bitmap"] == [False, True, False, False]


def test_a_number_that_json_has_no_word_for_is_refused_and_leaves_no_half_line(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        log.append({"value": float("nan")})
    log.append({"value": 1})
    log.close()
    assert lines(log.path) == [{"value": 1}]


def test_a_closed_log_says_so(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    log.close()
    log.close()
    with pytest.raises(ValueError, match="is closed"):
        log.append({})


def _write(folder: Path, writer: int) -> None:
    log = EventLog(folder)
    for number in range(50):
        log.append({"writer": writer, "number": number, "padding": "x" * 3000})
    log.close()


def test_writers_in_several_processes_do_not_tear_lines(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_write, args=(tmp_path, writer)) for writer in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    seen = {(record["writer"], record["number"]) for record in lines(tmp_path / "events.jsonl")}
    assert len(seen) == 150
