"""The demo judges SCOUT by what it says, runs where there is a GPU or none, and leaves no process behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest
import torch

from scout_core.demo import __main__ as demo
from scout_core.demo.events import CHECK_INTERVAL, Finished, Ready, Setup
from scout_core.demo.judge import Expected, Observed, judge
from scout_core.demo.launch import RankDied, launch, plan
from scout_core.demo.scenarios import build
from scout_core.demo.stalls import build_stalls
from scout_core.report.fault_report import FaultKind, SCOUTFaultReport

DEADLINE_S = 120

REPORT = SCOUTFaultReport(
    kind=FaultKind.SDC,
    severity="fatal",
    status="Attributed",
    scope="rank",
    ranks=(2,),
    surface="hidden:2/output",
    evidence={"tensors": ["blocks.2.weight"]},
    recommended_action="restart_excluding",
    message="rank 2 differs",
)
EXPECTED = Expected(
    kind=FaultKind.SDC,
    ranks=(2,),
    status="Attributed",
    surfaces=("hidden:2/output", "optimizer/parameter_state"),
    trusted=False,
    tensor="blocks.2.weight",
)
RIGHT = Observed(checks=3, active=True, reports=(REPORT,), steps=1, step=4, trusted=False)


STOPPED = SCOUTFaultReport(
    kind=FaultKind.PROCESS_STALL,
    severity="fatal",
    status="Attributed",
    scope="rank",
    ranks=(2,),
    evidence={"states": {}},
    recommended_action="restart",
    message="rank 2: process 7 is stopped",
)
STALL = Expected(
    kind=FaultKind.PROCESS_STALL, ranks=(2,), status="Attributed", surfaces=(), trusted=None, says="is stopped"
)
STALLED = Observed(checks=None, active=True, reports=(STOPPED,), seconds=2.4)


def test_the_right_verdict_has_no_problem() -> None:
    assert judge(EXPECTED, RIGHT) == ()
    assert judge(STALL, STALLED) == ()
    assert judge(EXPECTED, replace(RIGHT, reports=(REPORT, REPORT))) == ()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ranks": (1,)}, "named rank 1 instead of rank 2"),
        ({"ranks": ()}, "named no rank instead of rank 2"),
        ({"ranks": (1, 2)}, "named rank 1, 2"),
        ({"kind": FaultKind.NUMERIC}, "reported numeric instead of sdc"),
        ({"status": "Inconclusive"}, "status Inconclusive instead of Attributed"),
        ({"surface": "hidden:1/output"}, "found at hidden:1/output instead of"),
        ({"surface": None}, "found at None instead of"),
        ({"evidence": {}}, "does not name blocks.2.weight"),
    ],
)
def test_a_wrong_report_is_wrong(change: dict[str, object], says: str) -> None:
    wrong = REPORT.model_copy(update=change)
    problems = judge(EXPECTED, replace(RIGHT, reports=(wrong,)))
    assert len(problems) == 1 and says in problems[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ranks": (1,)}, "named rank 1 instead of rank 2"),
        ({"kind": FaultKind.PROCESS_EXIT}, "reported process_exit instead of process_stall"),
        ({"message": "rank 2: idle"}, "does not say 'is stopped'"),
    ],
)
def test_a_wrong_report_of_a_stall_is_wrong(change: dict[str, object], says: str) -> None:
    problems = judge(STALL, replace(STALLED, reports=(STOPPED.model_copy(update=change),)))
    assert len(problems) == 1 and says in problems[0]


def test_a_stall_that_nobody_reports_is_wrong() -> None:
    assert judge(STALL, replace(STALLED, reports=(), seconds=None)) == ("SCOUT did not notice the fault",)


def test_a_second_report_that_blames_another_rank_is_wrong() -> None:
    other = REPORT.model_copy(update={"ranks": (0,)})
    assert judge(EXPECTED, replace(RIGHT, reports=(REPORT, other))) == ("named rank 0 instead of rank 2",)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"reports": (), "steps": None}, "did not notice"),
        ({"trusted": True}, "must not be trusted"),
        ({"early": (REPORT,)}, "alarm without a fault: rank 2 differs"),
        ({"untrusted_early": ("the check of healthy step 2 was not trusted",)}, "healthy step 2"),
        ({"active": False}, "stopped"),
        ({"checks": 0}, "no check ran"),
    ],
)
def test_a_wrong_course_is_wrong(change: dict[str, object], says: str) -> None:
    problems = judge(EXPECTED, replace(RIGHT, **change))
    assert any(says in problem for problem in problems)


def test_a_healthy_stretch_must_be_silent_and_checked() -> None:
    assert judge(None, Observed(checks=5, active=True)) == ()
    assert judge(None, Observed(checks=5, active=True, early=(REPORT,))) != ()
    assert judge(None, Observed(checks=5, active=True, reports=(REPORT,))) != ()
    assert judge(None, Observed(checks=0, active=True)) != ()


@pytest.mark.parametrize(
    ("asked", "gpus", "backend", "ranks", "used"),
    [
        (None, 0, "gloo", 4, 0),
        (None, 1, "gloo", 4, 1),
        (None, 2, "gloo", 4, 2),
        (None, 3, "nccl", 3, 3),
        (None, 8, "nccl", 4, 4),
        (4, 3, "gloo", 4, 3),
        (8, 8, "nccl", 8, 8),
        (3, 0, "gloo", 3, 0),
    ],
)
def test_where_the_ranks_run(asked: int | None, gpus: int, backend: str, ranks: int, used: int) -> None:
    setup = plan(asked, gpus)
    assert (setup.backend, setup.ranks, setup.gpus) == (backend, ranks, used)


def test_scenarios_inject_on_ranks_that_exist() -> None:
    for ranks in (3, 4, 8):
        for scenario in (*build(ranks, CHECK_INTERVAL), *build_stalls(ranks)):
            assert set(scenario.ranks) <= set(range(ranks))
            assert set(scenario.expected.ranks) <= set(scenario.ranks)


@pytest.mark.parametrize("arguments", [["--ranks", "2"], ["--only", "meteorite"]])
def test_bad_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        demo.main(arguments)
    assert error.value.code == 2
    assert "take 3 or more" in capsys.readouterr().err or "meteorite" in arguments


def _canned(observed: Observed) -> Callable[[Setup], Iterator[object]]:
    """A launch that only says what its ranks would have said."""

    def events(setup: Setup) -> Iterator[object]:
        yield Ready(parameters=1, text_bytes=1)
        yield Finished(scenario="healthy", observed=Observed(checks=5, active=True), loss=3.0)
        yield Finished(scenario="output-bit", observed=observed, loss=3.0, injected_after=3, log=("it failed",))

    return events


@pytest.mark.parametrize("terminal", [False, True], ids=["pipe", "terminal"])
@pytest.mark.parametrize(
    ("observed", "code"),
    [
        (RIGHT, 0),
        (replace(RIGHT, reports=(REPORT.model_copy(update={"ranks": (1,)}),)), 1),
        (replace(RIGHT, reports=(), steps=None, step=None, trusted=None), 1),
    ],
    ids=["right", "wrong rank", "missed"],
)
def test_the_exit_code_tells_a_wrong_verdict(
    observed: Observed,
    code: int,
    terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(demo, "launch", _canned(observed))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    assert demo.main([]) == code
    printed = capsys.readouterr().out
    assert ("WRONG" in printed) == ("log         it failed" in printed) == (code == 1)
    assert "scout_core.attach(model, optimizer" in printed


def _dies(rank: int, setup: Setup, pipe: Connection) -> None:
    """Rank 1 is gone at once; the others wait for it as they would in a collective."""
    if rank == 1:
        os._exit(3)
    pipe.send(rank)
    signal.pause()


def _raises(rank: int, setup: Setup, pipe: Connection) -> None:
    if rank == 2:
        raise RuntimeError("out of ideas")
    signal.pause()


@pytest.mark.parametrize(
    ("function", "says"), [(_dies, "rank 1 .* exit code 3"), (_raises, "(?s)rank 2 .*out of ideas")]
)
def test_a_dead_rank_is_named_and_takes_the_others_along(
    function: Callable[[int, Setup, Connection], None], says: str
) -> None:
    with pytest.raises(RankDied, match=says):
        for _ in launch(plan(3, 0), function):
            pass
    assert _ranks_of(psutil.Process()) == []


def test_a_few_faults_end_to_end(tmp_path: Path) -> None:
    names = ["wrong-weight", "nondeterministic", "stopped-rank", "skipped-collective"]
    chosen = [word for name in names for word in ("--only", name)]
    with _running(*chosen, "--json", "out.json", cwd=tmp_path) as process:
        printed, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, printed + errors
    lines = printed.splitlines()
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("fault ")) :]
    assert table[2].startswith("none (healthy stretch)") and table[2].split()[-2:] == ["trusted", "right"]
    assert table[3].startswith("wrong weight") and "sdc, rank 1" in table[3] and table[3].endswith("right")
    assert table[4].startswith("nondeterministic") and "no rank blamed" in table[4] and table[4].endswith("right")
    assert table[5].startswith("stopped process") and "process_stall, rank 2" in table[5] and table[5].endswith("right")
    assert table[6].startswith("skipped") and "collective_desync, rank 3" in table[6] and table[6].endswith("right")
    assert "\x1b" not in printed
    outcomes = json.loads((tmp_path / "out.json").read_text())
    assert [outcome["scenario"] for outcome in outcomes] == ["healthy", *names]
    assert all(outcome["right"] for outcome in outcomes)
    assert outcomes[1]["reports"][0]["evidence"]["tensors"] == ["blocks.3.mix.weight"]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL], ids=lambda s: s.name)
def test_nothing_is_left_behind_when_it_is_stopped(sent: signal.Signals, tmp_path: Path) -> None:
    with _running("--only", "wrong-weight", cwd=tmp_path) as process:
        assert process.stdout is not None
        assert "4 ranks" in process.stdout.readline()
        ranks = _ranks_of(psutil.Process(process.pid))
        assert len(ranks) == 4
        process.send_signal(sent)
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == (130 if sent is signal.SIGINT else -sent)
        if sent is signal.SIGINT:
            assert "Interrupted" in errors and "Traceback" not in errors
        gone, alive = psutil.wait_procs(ranks, timeout=DEADLINE_S)
        assert len(gone) == 4 and not alive


@pytest.mark.gpu
def test_every_fault_on_the_gpus(tmp_path: Path) -> None:
    with _running(cwd=tmp_path, hide_gpus=False) as process:
        printed, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, printed + errors
    assert f"on {min(torch.cuda.device_count(), 4)} GPU" in printed


@contextmanager
def _running(*arguments: str, cwd: Path, hide_gpus: bool = True) -> Iterator["subprocess.Popen[str]"]:
    environment = dict(os.environ)
    if hide_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    process = subprocess.Popen(
        [sys.executable, "-m", "scout_core.demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _ranks_of(parent: psutil.Process) -> list[psutil.Process]:
    """The rank processes among the children of a process."""
    return [child for child in parent.children() if any("spawn_main" in word for word in child.cmdline())]
