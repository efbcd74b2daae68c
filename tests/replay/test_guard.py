"""The boundary that keeps training alive."""

import logging

import pytest

from scout_core.replay.guard import Failure, attempt


def test_a_value_passes() -> None:
    outcome = attempt("counting", lambda: 3)
    assert (outcome.value, outcome.failure) == (3, None)


def test_an_exception_becomes_a_failure_that_is_logged_with_one_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> int:
        raise MemoryError("no room")

    with caplog.at_level(logging.ERROR, logger="scout"):
        attempt("recording an invocation", broken)
        outcome = attempt("recording an invocation", broken)
    assert outcome.value is None and outcome.failure == Failure(
        what="recording an invocation", error="MemoryError: no room"
    )
    assert caplog.text.count("recording an invocation (MemoryError: no room); training goes on") == 2
    assert caplog.text.count("in broken") == 1, "one traceback is enough"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_the_users_own_end_passes(error: type[BaseException]) -> None:
    def end() -> None:
        raise error

    with pytest.raises(error):
        attempt("counting", end)
