"""Small jobs of real ranks with their observers: bodies by case, and what the event log says about them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import scout_core
from tests.distributed.pool import Ranks, own_ranks

STALL_S = 2.0
WORLD = 4
WIDTH = 8


def fast(**overrides: Any) -> dict[str, Any]:
    """Options for tests: short thresholds in training, startup and compilation as patient as ever."""
    options = {
        "oob_enabled": True,
        "oob_failure": "warn",
        "check_interval": 0,
        "stall_train_s": STALL_S,
        "stall_eval_s": 6 * STALL_S,
        "stall_startup_s": 60.0,
        "stall_compile_s": 60.0,
        "stall_checkpoint_s": 6 * STALL_S,
        "dataloader_stall_s": STALL_S,
        "checkpoint_stall_s": STALL_S,
    }
    return options | overrides


class TinyJob:
    """Four layers without DDP: a step is a forward, a backward and one explicit reduction."""

    def __init__(self, run_dir: str, *, wrap: Callable[[nn.Module], nn.Module] | None = None, **options: Any) -> None:
        self.rank = dist.get_rank()
        layers = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(3)])
        self.model: nn.Module = nn.Sequential(layers, nn.Linear(WIDTH, WIDTH))
        if wrap is not None:
            self.model = wrap(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.scout = scout_core.attach(self.model, self.optimizer, run_dir=run_dir, **fast(**options))

    def compute(self) -> None:
        self.model(torch.ones(2, WIDTH)).sum().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, size: int = 4) -> None:
        self.compute()
        reduce(size)
        self.update()


def reduce(size: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.ones(size, dtype=dtype)
    dist.all_reduce(values)
    return values


def idle(seconds: float = 120.0) -> None:
    """Stay alive outside any collective: the test ends the process."""
    time.sleep(seconds)


def as_script(body: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Run `body` as the main program of this process: it ends with it, on an exception as Python does."""
    code = 0
    try:
        body(*args, **kwargs)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001
        sys.excepthook(*sys.exc_info())
        code = 1
    os._exit(code)


@contextmanager
def running(body: Callable[..., Any], run_dir: Path, *args: Any, timeout: float = 180.0) -> Iterator[Ranks]:
    """Four ranks that run `body(run_dir, ...)` as scripts."""
    with own_ranks(WORLD, as_script, body, str(run_dir), *args, timeout=timeout) as ranks:
        yield ranks


def records(run_dir: Path) -> list[dict[str, Any]]:
    """What the event log holds so far."""
    path = run_dir / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def reports(run_dir: Path) -> list[dict[str, Any]]:
    """The fault reports of the event log that are no consequence of an earlier one."""
    found = [r for r in records(run_dir) if r["type"] == "SCOUTFaultReport"]
    return [r for r in found if "secondary_to" not in r["evidence"]]


def first_report(run_dir: Path, deadline_s: float = 120.0) -> dict[str, Any]:
    """The first report, once there is one."""
    return wait_reports(run_dir, 1, deadline_s)[0]


def wait_reports(run_dir: Path, count: int, deadline_s: float = 120.0) -> list[dict[str, Any]]:
    """The reports, once there are `count`."""
    return wait_until(lambda: found if len(found := reports(run_dir)) >= count else None, deadline_s)


def wait_until(look: Callable[[], Any], deadline_s: float = 120.0, poll_s: float = 0.05) -> Any:
    """What `look` gives, once it is something."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        time.sleep(poll_s)
    raise AssertionError(f"nothing within {deadline_s:g} s")


def say(run_dir: str, name: str, text: str = "") -> None:
    """Leave a mark for the test, with a text or else the time."""
    Path(run_dir, name).write_text(text or str(time.time()))
