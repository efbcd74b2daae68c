"""Launches by the hundred: nothing is left behind, ports do not clash, exit codes are the job's own.

`SCOUT_LAUNCHES` (60; 1,000 in the campaign), `SCOUT_LAUNCHES_AT_ONCE` (6; one for each core in the campaign),
`SCOUT_LAUNCHES_FRESH_EVERY` (20: every twentieth launch starts its observers as fresh Pythons) and
`SCOUT_LAUNCHES_SEED` (0) say how many.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.oob.launches import BY_KILL, ENDS, FAULTS, Outcome, Plan, launch, plans, without_scout


def setting(name: str, default: int) -> int:
    return int(os.environ.get(f"SCOUT_LAUNCHES{name}", default))


def run_campaign(count: int, at_once: int, folder: Path) -> None:
    """Launch, compare with launches without SCOUT, and complain of every one that is not as it should be."""
    chosen = list(plans(count, folder, setting("_FRESH_EVERY", 20), setting("_SEED", 0)))
    bare = {key(plan): plan for plan in reversed(chosen) if plan.end not in BY_KILL}
    with ThreadPoolExecutor(at_once) as pool:
        codes = dict(zip(bare, pool.map(without_scout, bare.values()), strict=True))
        outcomes = list(pool.map(launch, chosen))
    problems = [text for outcome in outcomes for text in complain(outcome, codes.get(key(outcome.plan)))]
    assert not problems, f"{len(problems)} in {count} launches:\n" + "\n".join(problems)
    assert set(Counter(outcome.plan.end for outcome in outcomes)) == set(ENDS)


def key(plan: Plan) -> tuple[str, int]:
    return plan.end, plan.culprit


def complain(outcome: Outcome, codes: tuple[int | None, ...] | None) -> list[str]:
    """What is wrong with a launch, by what it left and by what SCOUT said. `codes`: None for a job that was killed."""
    plan = outcome.plan
    found = []
    codes = (-signal.SIGKILL,) * plan.ranks if codes is None else codes
    if outcome.codes != codes:
        found.append(f"exit codes {outcome.codes} instead of {codes}")
    if outcome.unwatched or outcome.orphans or outcome.leaked:
        found.append(f"unwatched {outcome.unwatched}, orphans {outcome.orphans}, leaked {outcome.leaked}")
    expected = {"kill one": "process_exit", **FAULTS}.get(plan.end)
    if expected is not None and outcome.said[:1] != ((expected, (plan.culprit,)),):
        found.append(f"said {outcome.said} instead of {expected} of that rank")
    if plan.end in ("clean", "closed", "terminate") and outcome.said:
        found.append(f"said {outcome.said} of a job that ended by itself or was asked to")
    return [f"launch {plan.number} ({plan.end}, rank {plan.culprit}, step {plan.step}): {text}" for text in found]


def test_launches_leave_nothing_behind(tmp_path: Path) -> None:
    run_campaign(setting("", 60), setting("_AT_ONCE", 6), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_launches_leave_nothing_behind(tmp_path: Path) -> None:
    run_campaign(setting("", 1000), setting("_AT_ONCE", os.cpu_count() or 4), tmp_path)
