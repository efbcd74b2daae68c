"""Trust on real ranks: captures, votes, durable checkpoints, and coming back with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from scout_core.trust.manifest import ManifestStore, verify
from tests.distributed.pool import RankPool
from tests.trust.ranks import resume_from, train, train_with

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def healthy(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return pool.run(train, tmp_path_factory.mktemp("healthy"), 10, gemini=False)


def same(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    pairs = [(x, y) for one, two in zip(a, b, strict=True) for x, y in zip(one["weights"], two["weights"], strict=True)]
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)


@pytest.mark.parametrize("where", ["own", "peer", "disk"])
def test_a_resume_from_gemini_ends_in_the_same_bits(
    pool: RankPool, healthy: list[dict[str, Any]], tmp_path: Path, where: str
) -> None:
    ended = pool.run(resume_from, tmp_path, 5, 10, where=where)
    assert [one["start"] for one in ended] == [4] * 4, ended[0]["reports"]
    assert same(ended, healthy)


@pytest.mark.parametrize("how", ["save", "dcp"])
def test_a_resume_from_a_durable_checkpoint_ends_in_the_same_bits(
    pool: RankPool, healthy: list[dict[str, Any]], tmp_path: Path, how: str
) -> None:
    pool.run(train_with, tmp_path, 5, how, gemini=False)
    manifests, bad = ManifestStore(tmp_path / "manifests").all()
    assert not bad and [(m.step, m.state) for m in manifests] == [(4, "RECOVERY_VERIFIED"), (2, "RECOVERY_VERIFIED")]
    assert verify(manifests[0]) == []
    ended = pool.run(train_with, tmp_path, 10, how, gemini=False)
    assert [one["start"] for one in ended] == [4] * 4
    assert same(ended, healthy)


def test_after_a_hardware_fault_that_taints_on_one_rank_nothing_is_certified(pool: RankPool, tmp_path: Path) -> None:
    ended = pool.run(train_with, tmp_path, 7, "save", fault="hardware", at=3, gemini=False)
    manifests, _ = ManifestStore(tmp_path / "manifests").all()
    assert [(m.step, m.state) for m in manifests] == [(2, "RECOVERY_VERIFIED")]
    decision = ended[2]["decision"]
    assert (decision["mode"], decision["step"], decision["exclude_ranks"]) == ("RECOVERY_VERIFIED", 2, [2])
    assert decision["exclude_hosts"] == ["a host"] and all(one["active"] for one in ended)


def test_corruption_on_one_rank_rejects_on_every_rank_and_the_decision_comes_first(
    pool: RankPool, tmp_path: Path
) -> None:
    ended = pool.run(train_with, tmp_path, 6, "save", fault="sdc", at=5)
    for one in ended:
        decision = one["decision"]
        assert (decision["mode"], decision["step"], decision["exclude_ranks"]) == ("RECOVERY_VERIFIED", 4, [2])
        assert decision["exclude_hosts"] and ("save", 6) not in one["calls"]
    assert ended[0]["delivered"][:2] == ["RecoveryDecision", "SCOUTFaultReport"]
    states = {m.step: m.state for m in ManifestStore(tmp_path / "manifests").all()[0]}
    assert states == {2: "RECOVERY_VERIFIED", 4: "RECOVERY_VERIFIED"}


@pytest.mark.parametrize(
    ("how", "word"), [("sibling", "outside"), ("empty", "empty"), ("tmp", "cannot be read"), ("raise", "File exists")]
)
def test_e05_e09_e10_a_save_that_went_wrong_is_rejected_at_once_by_rank(
    pool: RankPool, tmp_path: Path, how: str, word: str
) -> None:
    ended = pool.run(train_with, tmp_path, 5, how, gemini=False)
    for one in ended:
        bad = [report for report in one["reports"] if report[0] == "checkpoint_bad"]
        assert len(bad) == 1 and bad[0][1] == [2] and word in bad[0][2]
        assert one["active"]
    states = {m.step: m.state for m in ManifestStore(tmp_path / "manifests").all()[0]}
    assert states == {2: "RECOVERY_VERIFIED", 4: "REJECTED"}


def test_a_collective_in_commit_is_an_error_and_certifies_nothing(pool: RankPool, tmp_path: Path) -> None:
    ended = pool.run(train_with, tmp_path, 2, "collective", gemini=False)
    assert any("barrier" in report[2] for report in ended[3]["reports"])
    assert [m.state for m in ManifestStore(tmp_path / "manifests").all()[0]] == ["CANDIDATE"]
    assert [len([c for c in one["calls"] if c[0] == "commit"]) for one in ended] == [1, 0, 0, 0]
