"""The `scout` command line."""

import fcntl
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

import scout_core
from scout_core import ReplayHarnessConfig, ScoutConfig
from scout_core.cli import app
from scout_core.oob.scratch import make_scratch
from scout_core.report import EventLog, SCOUTFaultReport

runner = CliRunner()


@pytest.fixture(autouse=True)
def outside_a_job(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run_dir(tmp_path) -> Path:
    log = EventLog(tmp_path)
    fault = SCOUTFaultReport(
        kind="compute_straggler",
        severity="warning",
        status="Attributed",
        scope="rank",
        ranks=(3,),
        step=20,
        first_seen_step=20,
        basis="majority",
        evidence={"peer_ranks": [0, 3], "times_ms": {"hidden:0": [1.0, 4.0]}},
        exonerating={"not_slow": [0, 1, 2]},
        recommended_action="observe",
        message="rank 3 is slow",
    )
    log.append(fault.model_dump(mode="json"))
    log.close()
    return tmp_path


def test_version():
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"scout {scout_core.__version__}\n")


def test_commands_are_all_there():
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(command in result.stdout for command in ("doctor", "explain", "config", "health"))


def test_doctor_on_this_machine():
    plain = runner.invoke(app, ["doctor"])
    told = json.loads(runner.invoke(app, ["doctor", "--json"]).stdout)
    assert plain.exit_code == told["exit_code"] == any(f["severity"] != "info" for f in told["findings"])
    assert len(told["ranks"]) == 1 and told["ranks"][0]["in_job"] is False
    assert "torch" in plain.stdout and "peers" in plain.stdout


def test_doctor_in_a_job_that_nobody_launched():
    result = runner.invoke(app, ["doctor", "--in-job"])
    assert result.exit_code == 2
    assert "RANK" in result.stderr and "torchrun" in result.stderr


def test_doctor_with_something_to_repair(monkeypatch):
    monkeypatch.setattr("torch.__version__", "2.9.0")
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "torch-old" in result.stdout and "fix: pip install 'torch>=2.10'" in result.stdout


@pytest.mark.parametrize("named", ["folder", "file"])
def test_explain(run_dir, named):
    result = runner.invoke(app, ["explain", str(run_dir if named == "folder" else run_dir / "events.jsonl")])
    assert result.exit_code == 0
    for text in ("compute_straggler", "rank 3 is slow", "rank 3 4 ms", "ranks 0-2 were not slow"):
        assert text in result.stdout


def test_explain_as_json(run_dir):
    told = json.loads(runner.invoke(app, ["explain", str(run_dir), "--json"]).stdout)
    assert [(i["kind"], i["ranks"], i["times"]) for i in told["incidents"]] == [("compute_straggler", [3], 1)]


def test_explain_on_a_terminal(run_dir, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "160")
    result = runner.invoke(app, ["explain", str(run_dir)], color=True)
    assert result.exit_code == 0
    assert "what clears the others" in result.stdout and "rank 3 is slow" in result.stdout


def test_explain_without_incidents_or_without_a_log(tmp_path):
    (tmp_path / "events.jsonl").write_text('{"type":"check","step":5,"trustworthy":true}\n')
    quiet = runner.invoke(app, ["explain", str(tmp_path)])
    assert quiet.exit_code == 0 and "no incidents" in quiet.stdout and "newest trustworthy step 5" in quiet.stdout
    absent = runner.invoke(app, ["explain", str(tmp_path / "elsewhere")])
    assert absent.exit_code == 2 and "events.jsonl" in absent.stderr


def test_config_shows_every_key_and_is_a_configuration(tmp_path):
    told = json.loads(runner.invoke(app, ["config", "--json"]).stdout)
    for name, field in ReplayHarnessConfig.model_fields.items():
        assert told[f"replay.{name}"]["description"] == field.description
    assert told["replay.check_interval"]["default"] == ReplayHarnessConfig().check_interval
    file = tmp_path / "scout.toml"
    file.write_text(runner.invoke(app, ["config"]).stdout)
    assert ScoutConfig.build(file) == ScoutConfig()
    file.write_text(file.read_text().replace("check_interval = 50", "check_interval = 7"))
    assert ScoutConfig.build(file).replay.check_interval == 7


def test_without_the_extra_the_core_works_and_the_command_says_how_to_get_it():
    # one process for all of it; torch itself may bring some of these modules
    code = """
import sys, torch
sys.modules["typer"] = None
before = set(sys.modules)
import scout_core, scout_core.doctor
new = {"rich", "pynvml"} & (set(sys.modules) - before)
assert not new, new
print("the core is there")
from scout_core.cli import main
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (1, "the core is there\n"), done.stderr
    assert "pip install 'scout-suite[cli]'" in done.stderr and "Traceback" not in done.stderr


def test_doctor_clean_removes_what_ended_jobs_left_and_nothing_else(tmp_path):
    program = (
        "import os; from scout_core.oob.channel import Channel, Scope\n"
        "c = Channel.create(Scope(run='left', attempt=0, pid=os.getpid(), peers=(0,), rank=0), world=1)\n"
        "print(c.name, flush=True); os._exit(0)"
    )
    name = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert (Path("/dev/shm") / name).exists()
    result = runner.invoke(app, ["doctor", "--clean"])
    assert result.exit_code == 0 and name in result.output
    assert not (Path("/dev/shm") / name).exists()


def test_doctor_clean_removes_folders_of_the_dead_and_no_others(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = (
        "import os; from scout_core.oob.scratch import make_scratch; print(make_scratch()[0], flush=True); os._exit(0)"
    )
    env = os.environ | {"TMPDIR": str(tmp_path)}
    dead, foreign = (
        Path(
            subprocess.run(
                [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env
            ).stdout.strip()
        )
        for _ in range(2)
    )
    (dead / "stacks-0-1").write_text("a stack")
    live, remove = make_scratch()
    (tmp_path / "scout-oob-notes").mkdir()
    lock = os.open(foreign, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # its owner lives where process ids are others
    result = runner.invoke(app, ["doctor", "--clean"])
    assert result.exit_code == 0 and dead.name in result.output.replace("\n", "")
    assert {path.name for path in tmp_path.iterdir()} == {live.name, foreign.name, "scout-oob-notes"}
    os.close(lock)
    remove()
    assert not live.exists()


def test_explain_says_why_checks_stayed_open(tmp_path):
    log = EventLog(tmp_path)
    for step, rank in ((10, 1), (20, 1)):
        reasons = [f"embedding: shape differs on rank {rank}"]
        log.append({"type": "check", "step": step, "status": "Inconclusive", "inconclusive_reasons": reasons})
    log.close()
    said = runner.invoke(app, ["explain", str(tmp_path)]).stdout
    assert "2 checks inconclusive: embedding: shape differs on rank 1" in " ".join(said.split())
