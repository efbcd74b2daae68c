"""What the ranks of the demo are told, and what the first of them tells the parent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from scout_core.demo.judge import Observed

HEALTHY = "healthy"
HEALTHY_STEPS = 12
CHECK_INTERVAL = 2
CLEAN_STEPS = 3
"""Steps before each injection. Odd, so that the step after it is one that checks."""
PATIENCE_S = 60.0
"""How long a rank waits for the others before the demo fails: they share one machine."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What every rank needs to know. `port` is of the parent's store."""

    ranks: int
    backend: str
    gpus: int
    port: int
    only: tuple[str, ...] = ()
    run_dir: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Ready:
    """The ranks have met and the job is built."""

    parameters: int
    text_bytes: int


@dataclass(frozen=True, kw_only=True)
class Progress:
    """One optimizer step of the running scenario; `check` is the status of its check, if it had one."""

    scenario: str
    step: int
    loss: float
    injected: bool
    check: str | None


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A scenario is over. `log` holds what SCOUT logged about failures of its own."""

    scenario: str
    observed: Observed
    loss: float
    injected_after: int | None = None
    log: tuple[str, ...] = ()


Tell = Callable[[object], None]
