"""B04 and B12 on four real ranks: a card that is capped, and whether its rank is slow for it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import scout_core
from scout_core import faults
from scout_core.doctor.explain import incidents, read_log
from scout_core.health.fake_nvml import FakeNvml
from scout_core.manager_api import HealthConfig
from tests.cases.test_section_b_c import HeavyBlock
from tests.distributed.models import Case, Job, LanguageModel
from tests.distributed.pool import RankPool

pytestmark = pytest.mark.distributed
CARD = {"name": "NVIDIA L40S", "links": [], "fabric": None}
HOT = {"temperature": 91, "shutdown": 98, "clock_events": 0x40, "sm_mhz": 1365, "sm_max_mhz": 1725}
CAPPED = {"power_limit_w": 150, "power_default_w": 300, "clock_events": 0x04}


def train(run_dir: Path, rank: int, card: dict[str, Any], slow: bool) -> None:
    """Rank r on device r of a host with four. Once the card of `rank` has told of its trouble, some steps more."""
    devices = [{**CARD, **(card if index == rank else {})} for index in range(4)]
    job = Job(Case(model=lambda: LanguageModel(HeavyBlock)))
    own = dist.get_rank()
    with (
        mock.patch.dict(sys.modules, pynvml=FakeNvml({"devices": devices})),
        mock.patch("scout_core.session.own_ordinal", return_value=own),
        scout_core.attach(
            job.wrapped,
            job.optimizer,
            check_interval=1,
            run_dir=run_dir,
            health=HealthConfig(poll_interval_s=0.05, read_deadline_s=60),
        ) as scout,
    ):
        deadline, warned = time.monotonic() + 30, torch.zeros(1)
        while not warned and time.monotonic() < deadline:
            job.step()
            warned.fill_(any(report.kind.value == "hardware_warning" for report in scout.reports))
            dist.all_reduce(warned)
        usual_ms = max(scout.last_result.times_ms["hidden:0"])
        if slow and own == rank:
            for block in job.model.blocks:
                faults.slow_module(block, 2 * usual_ms / 1e3 + 5e-3)
        job.train(6)


@pytest.mark.parametrize(
    ("rank", "card", "slow", "cause"),
    [(1, HOT, True, "thermal"), (1, HOT, False, None), (3, CAPPED, True, "power_cap")],
    ids=["b04 hot and slow", "b04 hot and on par", "b12 capped and slow"],
)
def test_a_card_in_trouble_explains_its_ranks_slowness_and_accuses_nobody_without(
    ranks4: RankPool, tmp_path: Path, rank: int, card: dict[str, Any], slow: bool, cause: str | None
) -> None:
    ranks4.run(train, tmp_path, rank, card, slow, timeout=120)
    told = [incident.report for incident in incidents(read_log(tmp_path / "events.jsonl").reports)]
    hardware = [report for report in told if report.kind.value == "hardware_warning"]
    assert hardware and {(report.ranks, report.recommended_action) for report in hardware} == {((rank,), "observe")}
    # a crowded host may answer late, which is no trouble of the card
    others = [report for report in told if report.kind.value not in ("hardware_warning", "telemetry_lost")]
    assert [(r.kind.value, r.ranks) for r in others] == ([("compute_straggler", (rank,))] if slow else [])
    assert [report.evidence["hardware_cause"] for report in others] == ([cause] if slow else [])
