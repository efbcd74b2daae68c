"""`scout trust`: on a folder alone, without a job."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from typer.testing import CliRunner

import scout_core
from scout_core.cli import app
from scout_core.trust.certify import JobVerdict
from scout_core.trust.durable import DurableCheckpointConfig, TorchSaveCallbacks
from scout_core.trust.files import write_record
from scout_core.trust.manifest import ManifestStore
from scout_core.trust.memory import HostMemory
from scout_core.trust.run_record import RunRecord
from scout_core.trust.states import Change, Outcome, TrustState
from tests.trust.test_files import checkpoint
from tests.trust.test_gemini import shards

RUNNER = CliRunner()
VERIFIED = TrustState.RECOVERY_VERIFIED
VERDICT = {"outcome": Outcome.CLEAN, "cycle": True, "may_capture": True, "broken_ranks": (), "nonfinite_alike": False}


def run_folder(folder: Path) -> Path:
    store = ManifestStore(folder / "manifests")
    for step, state in ((10, "RECOVERY_VERIFIED"), (20, "RECOVERY_VERIFIED"), (30, "REJECTED")):
        store.write(checkpoint(folder / "durable", step, state))
    write_record(folder / "run.json", RunRecord(run_id="run"))
    return folder


def test_ls_show_verify_and_select_on_a_good_folder(tmp_path: Path) -> None:
    folder = str(run_folder(tmp_path))
    listed = json.loads(RUNNER.invoke(app, ["trust", "ls", folder, "--json"]).output)
    assert [row["step"] for row in listed["checkpoints"]] == [30, 20, 10] and listed["refused"] == []
    assert json.loads(RUNNER.invoke(app, ["trust", "show", folder, "step-20"]).output)["step"] == 20
    assert RUNNER.invoke(app, ["trust", "verify", folder]).exit_code == 0
    selected = RUNNER.invoke(app, ["trust", "select", folder])
    assert selected.exit_code == 0 and json.loads(selected.output)["step"] == 20


def test_ls_says_what_became_of_a_memory_copy_after_it_was_written(tmp_path: Path) -> None:
    store = shards(tmp_path / "gemini")
    for step in (4, 8):
        copy = HostMemory(owner=2).begin(step, TrustState.CANDIDATE, {"w": torch.ones(1)}).finish()
        store.write(copy, attempt=1, holder=2)
    record = RunRecord(run_id="run", attempt=1).with_judgement(TrustState.RECOVERY_VERIFIED, [4])
    (tmp_path / "manifests").mkdir()
    write_record(tmp_path / "run.json", record.with_judgement(TrustState.REJECTED, [8]))
    listed = json.loads(RUNNER.invoke(app, ["trust", "ls", str(tmp_path), "--json"]).output)
    assert {row["step"]: row["state"] for row in listed["checkpoints"]} == {4: "RECOVERY_VERIFIED", 8: "REJECTED"}


def test_select_counts_memory_copies_of_which_every_part_is_on_this_disk(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    store = shards(folder / "gemini")
    for step, owners in ((40, range(4)), (50, range(3))):
        for owner in owners:
            copy = HostMemory(owner=owner).begin(step, TrustState.RECOVERY_VERIFIED, {"w": torch.ones(9)}).finish()
            place = store.write(copy, attempt=0, holder=owner)
    shown = json.loads(RUNNER.invoke(app, ["trust", "show", str(folder), str(place)]).output)
    assert (shown["step"], shown["rank"], "structure" in shown) == (50, 2, False)
    select = ["trust", "select", str(folder), "--failure-kind", "straggler"]
    chosen = json.loads(RUNNER.invoke(app, select).output)
    assert (chosen["mode"], chosen["source"], chosen["step"], chosen["lost_steps"]) == ("GEMINI", "gemini", 40, 10)
    data = folder / "gemini" / "rank-00001" / "step-000000040-own" / "state.safetensors"
    data.write_bytes(data.read_bytes()[:-1])
    again = RUNNER.invoke(app, select)
    assert str(data) in again.stderr and json.loads(again.stdout)["step"] == 20


def test_folders_that_lie_elsewhere_are_found_by_what_the_run_wrote_down(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    durable = DurableCheckpointConfig(
        callbacks=TorchSaveCallbacks(), folder=elsewhere / "durable", manifest_folder=elsewhere / "m"
    )
    settings = {"run_dir": folder, "gemini": True, "gemini_dir": elsewhere / "g", "oob_enabled": False}
    with scout_core.attach(model, optimizer, durable=durable, **settings) as scout:
        trust = scout._trust
        trust._apply(5, Change(capture=True, state=VERIFIED), JobVerdict(**VERDICT))
        assert trust._gemini is not None and trust._gemini.settle(10)
        trust._gemini.flush()
    listed = json.loads(RUNNER.invoke(app, ["trust", "ls", str(folder), "--json"]).output)
    assert [(row["source"], row["step"]) for row in listed["checkpoints"]] == [("durable", 5), ("gemini", 5)]
    assert RUNNER.invoke(app, ["trust", "verify", str(folder)]).output.count("ok ") == 2
    assert json.loads(RUNNER.invoke(app, ["trust", "select", str(folder)]).output)["step"] == 5
    shown = RUNNER.invoke(app, ["trust", "show", str(folder), listed["checkpoints"][0]["id"]])
    assert json.loads(shown.output)["step"] == 5
    with scout_core.attach(model, optimizer, run_dir=folder, gemini=True, oob_enabled=False):
        pass  # from now on everything is where it usually is
    listed = RUNNER.invoke(app, ["trust", "ls", str(folder)])
    assert listed.exit_code == 0 and f"no checkpoint is recorded in {folder / 'manifests'} or {folder / 'gemini'}" in (
        listed.output.replace("\n", "")
    )


def test_folders_can_be_named_and_a_damaged_note_of_them_is_refused(tmp_path: Path) -> None:
    elsewhere = run_folder(tmp_path / "elsewhere")
    folder = tmp_path / "run"
    folder.mkdir()
    write_record(folder / "run.json", RunRecord(run_id="run"))
    (folder / "places.json").write_text("{}")
    for command in ("ls", "verify", "select"):
        refused = RUNNER.invoke(app, ["trust", command, str(folder)])
        assert refused.exit_code == 2 and "places.json" in refused.stderr and "--manifests" in refused.stderr
    named = ["--manifests", str(elsewhere / "manifests"), "--gemini", str(tmp_path)]
    assert json.loads(RUNNER.invoke(app, ["trust", "select", str(folder), *named]).output)["step"] == 20
    assert RUNNER.invoke(app, ["trust", "ls", str(folder), *named]).output.count("RECOVERY_VERIFIED") == 2


def test_damage_is_named_and_passed_over(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    (folder / "durable" / "step-20" / "rank-2.pt").write_bytes(b"short")
    verified = RUNNER.invoke(app, ["trust", "verify", str(folder)])
    assert verified.exit_code == 1 and "rank-2.pt" in verified.output
    assert json.loads(RUNNER.invoke(app, ["trust", "select", str(folder)]).output)["step"] == 10


def test_what_cannot_be_read_ends_with_two(tmp_path: Path) -> None:
    assert RUNNER.invoke(app, ["trust", "ls", str(tmp_path / "nothing")]).exit_code == 2
    assert RUNNER.invoke(app, ["trust", "show", str(run_folder(tmp_path)), "step-99"]).exit_code == 2
    assert RUNNER.invoke(app, ["trust", "select", str(tmp_path), "--failure-kind", "x"]).exit_code == 2


def test_ls_of_a_folder_without_checkpoints_says_so(tmp_path: Path) -> None:
    listed = RUNNER.invoke(app, ["trust", "ls", str(tmp_path)])
    assert listed.exit_code == 0 and "no checkpoint is recorded" in listed.output
