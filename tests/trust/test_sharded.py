"""Trust where parameters are DTensors: each rank keeps, certifies and gets back its own parts, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scout_core.trust.manifest import ManifestStore
from tests.distributed.pool import RankPool
from tests.trust.sharded import MESHES, on, resume_elsewhere
from tests.trust.test_loop import same

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module", params=list(MESHES))
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def healthy(pool: RankPool, tmp_path_factory: pytest.TempPathFactory, layout: str) -> list[dict[str, Any]]:
    return pool.run(on, layout, "train", tmp_path_factory.mktemp(layout), 10, gemini=False)


@pytest.mark.parametrize("where", ["own", "peer", "disk"])
def test_a_resume_from_gemini_ends_in_the_same_bits(
    pool: RankPool, healthy: list[dict[str, Any]], tmp_path: Path, layout: str, where: str
) -> None:
    ended = pool.run(on, layout, "resume_from", tmp_path, 5, 10, where=where)
    assert [one["start"] for one in ended] == [4] * 4, ended[0]["reports"]
    assert same(ended, healthy)


@pytest.mark.parametrize("how", ["save", "dcp"])
def test_a_resume_from_a_durable_checkpoint_ends_in_the_same_bits(
    pool: RankPool, healthy: list[dict[str, Any]], tmp_path: Path, layout: str, how: str
) -> None:
    ended = pool.run(resume_elsewhere, layout, tmp_path, 5, 10, how)
    assert [one["start"] for one in ended] == [4] * 4, ended[0]["reports"]
    assert same(ended, healthy)
    states = {m.step: m.state for m in ManifestStore(tmp_path / "manifests").all()[0]}
    assert states == dict.fromkeys((2, 4, 6, 8, 10), "RECOVERY_VERIFIED")
