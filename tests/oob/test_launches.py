"""Launches by the hundred: the right rank is named in time, nothing is left behind, exit codes are the job's own.

`SCOUT_LAUNCHES` (60; 1,000 in the campaign), `SCOUT_LAUNCHES_AT_ONCE` (6; one for each core in the campaign),
`SCOUT_LAUNCHES_FRESH_EVERY` (20: every twentieth launch starts its observers as fresh Pythons) and
`SCOUT_LAUNCHES_SEED` (0) say how many; `SCOUT_LAUNCHES_SHARE=2/4` runs the second quarter of them, at once with the
others if need be. One line of JSON sums up: launches, problems, and seconds from the stall threshold to the report.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.oob.endings import BY_KILL, ENDS, FAULTS, NOBODY
from tests.oob.launches import Outcome, Plan, launch, plans, without_scout


def setting(name: str, default: int) -> int:
    return int(os.environ.get(f"SCOUT_LAUNCHES{name}", default))


def share() -> tuple[int, int]:
    part, _, parts = os.environ.get("SCOUT_LAUNCHES_SHARE", "1/1").partition("/")
    return int(part), int(parts)


def run_campaign(count: int, at_once: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Launch, compare with launches without SCOUT, and complain of every one that is not as it should be."""
    chosen = list(plans(count, folder, setting("_FRESH_EVERY", 20), setting("_SEED", 0), share()))
    bare = {key(plan): plan for plan in reversed(chosen) if plan.end not in BY_KILL}
    with ThreadPoolExecutor(at_once) as pool:
        codes = dict(zip(bare, pool.map(without_scout, bare.values()), strict=True))
        outcomes = list(pool.map(launch, chosen))
    problems = [text for outcome in outcomes for text in complain(outcome, codes.get(key(outcome.plan)))]
    with capsys.disabled():
        print("\n" + json.dumps(summary(outcomes, problems)))
    assert not problems, f"{len(problems)} in {len(chosen)} launches:\n" + "\n".join(problems)
    assert set(Counter(outcome.plan.end for outcome in outcomes)) == set(ENDS) or share()[1] > 1


def summary(outcomes: Sequence[Outcome], problems: Sequence[str]) -> dict[str, object]:
    """The campaign in one line, with the time from threshold to report where a fault stalls."""
    late = sorted(outcome.late_s for outcome in outcomes if outcome.late_s is not None)
    found: dict[str, object] = {"launches": len(outcomes), "share": share(), "problems": len(problems)}
    found["kinds"] = dict(Counter(outcome.plan.end for outcome in outcomes))
    if late:
        found["late_s"] = {
            "of": len(late),
            "median": round(statistics.median(late), 2),
            "p99": round(late[min(len(late) * 99 // 100, len(late) - 1)], 2),
            "most": round(late[-1], 2),
        }
    return found


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
    expected, named = FAULTS.get(plan.end), () if plan.end in NOBODY else (plan.culprit,)
    if expected is not None and outcome.said[:1] != ((expected, named),):
        found.append(f"said {outcome.said} instead of {expected} of {named or 'nobody'}")
    if plan.end in ("clean", "closed", "terminate") and outcome.said:
        found.append(f"said {outcome.said} of a job that ended by itself or was asked to")
    return [f"launch {plan.number} ({plan.end}, rank {plan.culprit}, step {plan.step}): {text}" for text in found]


def test_launches_name_the_right_rank_and_leave_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_campaign(setting("", 60), setting("_AT_ONCE", 6), tmp_path, capsys)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_launches_name_the_right_rank_and_leave_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_campaign(setting("", 1000), setting("_AT_ONCE", os.cpu_count() or 4), tmp_path, capsys)
