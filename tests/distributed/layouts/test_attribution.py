"""A fault on one rank under every layout: that rank is named, for the right surface, and its partners are not."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

import pytest

import scout_core
from tests.distributed.layouts import CASES, SMALL, LayoutCase
from tests.distributed.layouts.faults import Kind, LayoutFault, inject, kinds_on, layer_on
from tests.distributed.layouts.model import LAYERS
from tests.distributed.layouts.test_clean import QUIET
from tests.distributed.pool import RankPool

ALL_TURNS = LAYERS + 1
"""Checks after which every block has had its turn."""
FIRST_TURNS = 2
"""Checks after which the block of `layer_on` has: the second of its stage."""
OWNER_ALONE: tuple[Kind, ...] = ("weight", "moment", "update")
"""Faults in what pure FSDP holds once: no peer has it too, so only the owner's own evidence shows them."""


def surfaces(case: LayoutCase, fault: LayoutFault) -> tuple[str, ...]:
    """Patterns of `recipe/surface`, one of which has to be among the sources."""
    if fault.kind in OWNER_ALONE and "dp_replicate" not in dict(case.dims):
        return ("*/owner_update",) if fault.kind == "update" else ("*/state_at_rest",)
    by_kind: dict[str, tuple[str, ...]] = {
        "before": (f"{fault.recipe}/output", f"{fault.recipe}/collective_input"),
        "after": (f"{fault.recipe}/output",),
        "gradient": (f"{fault.recipe}/parameter_gradient",),
        "weight": ("*/parameter_state",),
        "moment": ("*/optimizer_state",),
        "update": ("optimizer/updated_state",),
        "embedding": ("embedding/output", "embedding/collective_input"),
        "head": ("output/output", "output/collective_input"),
    }
    return by_kind[fault.kind]


def checked(name: str, fault: LayoutFault, checks: int, seed: int) -> dict[str, Any]:
    """What this rank's checks said before the fault and from it on."""
    job = CASES[name].build(seed)
    settings = {**QUIET, **CASES[name].options}
    with scout_core.attach(job.model, job.optimizer, mesh=job.mesh, check_interval=1, **settings) as scout:
        job.step()
        first = scout.last_result
        handle = inject(fault, job)
        results = []
        for _ in range(checks):
            job.step()
            results.append(scout.last_result)
        handle.remove()
        return {
            "healthy": first.status.value,
            "blamed": sorted({rank for result in results for rank in result.sdc_ranks}),
            "sources": sorted({source for result in results for source in result.sdc_sources}),
            "covered": any(fault.recipe in result.checked_recipe_ids for result in results),
            "trusted": [result.trustworthy for result in results],
            "reasons": sorted({reason.message for result in results for reason in result.inconclusive_reasons}),
            "reports": sorted({rank for report in scout.reports for rank in report.ranks}),
            "kinds": sorted({report.kind.value for report in scout.reports}),
            "active": scout.active,
        }


def campaign(name: str, chosen: list[LayoutFault], checks: int) -> list[dict[str, Any]]:
    return [checked(name, fault, checks, seed) for seed, fault in enumerate(chosen, start=1)]


def complaints(case: LayoutCase, fault: LayoutFault, by_rank: list[dict[str, Any]]) -> list[str]:
    """What was not as it has to be."""
    found = []
    for rank, seen in enumerate(by_rank):
        peer = rank in case.expected_peers(fault.rank)
        if seen["healthy"] != "Agree" or not seen["active"]:
            found.append(f"rank {rank} before the fault: {seen['healthy']}, active {seen['active']}")
        if set(seen["blamed"]) - {fault.rank} or set(seen["reports"]) - {fault.rank}:
            found.append(f"rank {rank} blames {seen['blamed']} and reports {seen['reports']} for {seen['sources']}")
        if not peer:
            continue
        if seen["blamed"] != [fault.rank] or seen["reports"] != [fault.rank]:
            found.append(
                f"rank {rank} names {seen['blamed']}, reports {seen['reports']} {seen['kinds']}: "
                f"{seen['sources']} {seen['reasons']}"
            )
        elif not any(fnmatch(source, pattern) for source in seen["sources"] for pattern in surfaces(case, fault)):
            found.append(f"rank {rank} names the right rank for {seen['sources']}")
        if all(seen["trusted"]):
            found.append(f"rank {rank} trusts every state")
    return found


def judge(pool: RankPool, name: str, chosen: list[LayoutFault], checks: int, timeout: float) -> None:
    told = pool.run(campaign, name, chosen, checks, timeout=timeout)
    wrong = {}
    for index, fault in enumerate(chosen):
        found = complaints(CASES[name], fault, [answers[index] for answers in told])
        if found:
            wrong[fault] = found
    lines = [f"{fault}:\n  " + "\n  ".join(found) for fault, found in wrong.items()]
    assert not wrong, f"{len(wrong)} of {len(chosen)} faults\n" + "\n".join(lines)


FEW: dict[str, tuple[Kind, Kind]] = {
    "ddp": ("after", "weight"),
    "fsdp2": ("after", "gradient"),
    "hsdp": ("gradient", "weight"),
    "tp": ("before", "gradient"),
    "sp": ("before", "moment"),
    "tp_by_hand": ("before", "embedding"),
    "cp": ("before", "after"),
    "pp_gpipe": ("after", "head"),
    "pp_1f1b": ("gradient", "moment"),
    "ep": ("before", "gradient"),
    "fsdp2_tp": ("before", "head"),
}
"""For each layout two faults, one on a rank near the start, one on the last."""


def fault_on(case: LayoutCase, rank: int, kind: Kind) -> LayoutFault:
    return LayoutFault(kind=kind, rank=rank, layer=layer_on(case, rank))


@pytest.mark.parametrize("name", SMALL)
def test_a_fault_is_its_ranks_alone(name: str, request: pytest.FixtureRequest) -> None:
    case = CASES[name]
    chosen = [fault_on(case, rank, kind) for rank, kind in zip((1, case.ranks - 1), FEW[name], strict=True)]
    judge(request.getfixturevalue(f"ranks{case.ranks}"), name, chosen, FIRST_TURNS, timeout=100)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CASES)
def test_every_fault_on_every_rank(name: str, request: pytest.FixtureRequest) -> None:
    case = CASES[name]
    chosen = [fault_on(case, rank, kind) for rank in range(case.ranks) for kind in kinds_on(case, rank)]
    judge(request.getfixturevalue(f"ranks{case.ranks}"), name, chosen, ALL_TURNS, timeout=3000)
