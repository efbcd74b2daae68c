"""The boundary that keeps training alive: the one place, besides `close()`, where any exception is caught."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")
logger = logging.getLogger("scout")
_told: set[tuple[str, str]] = set()
_MOST_TOLD = 1024


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What went wrong in SCOUT's own work on this rank."""

    what: str
    error: str


@dataclass(frozen=True, kw_only=True)
class Outcome(Generic[T]):
    """A value, or the failure that took its place."""

    value: T | None = None
    failure: Failure | None = None


def attempt(what: str, function: Callable[[], T]) -> Outcome[T]:
    """Run `function`; an exception becomes a logged `Failure` instead of reaching the training loop.

    The traceback of a failure is logged the first time in a process, its text each time. `KeyboardInterrupt` and
    `SystemExit` pass: they are the user's.
    """
    try:
        return Outcome(value=function())
    except Exception as error:  # training must go on whatever SCOUT ran into
        text = f"{type(error).__name__}: {error}"
        known = (what, text) in _told or len(_told) >= _MOST_TOLD
        _told.add((what, text))
        logger.error("SCOUT failed %s (%s); training goes on", what, text, exc_info=not known)
        return Outcome(failure=Failure(what=what, error=text))
