"""Random faults in random layouts: no wrong attribution, and every miss explained."""

from __future__ import annotations

from collections import Counter

import pytest

from scout_core.simulate import campaign


def run_campaigns(seeds: range, max_ranks: int) -> Counter[str]:
    """Answers of all campaigns. Each must be sound."""
    found: Counter[str] = Counter()
    for seed in seeds:
        report = campaign(seed, max_ranks=max_ranks)
        assert report.false_alarms == (), f"campaign {seed}"
        unexplained = [outcome for outcome in report.outcomes if not outcome.explained]
        assert unexplained == [], f"campaign {seed}"
        found += report.answers
    return found


def test_two_hundred_campaigns() -> None:
    answers = run_campaigns(range(200), 256)
    assert answers["hit"] > 0.6 * answers.total()


def test_a_campaign_is_the_same_for_the_same_seed() -> None:
    one, other = campaign(7), campaign(7)
    assert (one.model, one.outcomes) == (other.model, other.outcomes)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_campaigns(part: int) -> None:
    answers = run_campaigns(range(1000 * part, 1000 * (part + 1)), 4096)
    print(f"campaigns {1000 * part} to {1000 * part + 999}: {dict(answers)}")
    assert answers["hit"] > 0.6 * answers.total()
