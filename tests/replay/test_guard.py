"""The boundary that keeps training alive."""

import logging

import pytest

from scout_core.replay.guard import Failure, attempt


def test_a_value_passes() -> None:
    outcome = attempt("counting", lambda: 3)
    assert (outcome.value, outcome.failure) == (3, None)


def test_an_exception_becomes_a_failure_that_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> int:
        raise MemoryError("no room")

    with caplog.at_level(logging.ERROR, logger="scout"):
        outcome = attempt("recording an invocation", broken)
    assert outcome.value is None and outcome.failure == Failure(
        what="recording an invocation", error="MemoryError: no room"
    )
    assert "recording an invocation; training goes on" in caplog.text and "in broken" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_the_users_own_end_passes(error: type[BaseException]) -> None:
    def end() -> None:
        raise error

    with pytest.raises(error):
        attempt("counting", end)
