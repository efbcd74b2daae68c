"""What ranks tell each other at a boundary: nothing is lost on the way, and what all have is what each has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scout_core.trust.certify import Vote, agree
from scout_core.trust.run_record import RunRecord
from scout_core.trust.states import Outcome, TrustState

votes = st.builds(
    Vote,
    step=st.integers(0, 1 << 40),
    outcome=st.sampled_from(Outcome),
    cycle=st.booleans(),
    busy=st.booleans(),
    broken=st.booleans(),
    nonfinite_alike=st.booleans(),
    trouble=st.booleans(),
    kept=st.integers(-1, 1 << 40),
)


@given(votes)
def test_a_vote_comes_over_as_it_was(vote: Vote) -> None:
    assert Vote.decode(vote.encode()) == vote


@pytest.mark.parametrize(
    ("kept", "expected"), [((6, 6, 6), 6), ((6, 4, 6), None), ((-1, -1, -1), None), ((6, -1, 6), None)]
)
def test_what_the_job_has_on_disk_is_what_every_rank_has(kept: tuple[int, ...], expected: int | None) -> None:
    assert agree([Vote(step=8, outcome=Outcome.CLEAN, kept=step) for step in kept]).kept == expected


def test_one_rank_in_trouble_is_heard() -> None:
    calm = Vote(step=8, outcome=Outcome.CLEAN)
    assert agree([calm, Vote(step=8, outcome=Outcome.CLEAN, trouble=True)]).trouble and not agree([calm, calm]).trouble


def test_judgements_are_of_one_attempt_and_the_newest_stay() -> None:
    record = RunRecord(run_id="r", attempt=1)
    for step in range(200):
        record = record.with_judgement(TrustState.RECOVERY_VERIFIED, [step])
    assert len(record.judged) == 64 and record.judgement(199, 1) is TrustState.RECOVERY_VERIFIED
    assert record.judgement(199, 0) is None and record.judgement(3, 1) is None
    assert RunRecord.model_validate_json(record.model_dump_json()) == record
