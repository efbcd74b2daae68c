"""The out-of-band parts of the handle on one rank with its observer: threads beside training, and after `close()`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import TracebackType

import pytest
import torch
from torch import nn

import scout_core
from scout_core.oob.reader import Progress, read_progress


@pytest.fixture
def scout() -> Iterator[scout_core.Scout]:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with scout_core.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), check_interval=0) as made:
        assert made.observer_pid is not None
        yield made


def progress(scout: scout_core.Scout) -> Progress:
    return read_progress(scout._oob._channel.memory)


def test_a_saver_in_a_background_thread_is_not_what_training_does(scout: scout_core.Scout) -> None:
    before, seen = progress(scout), []

    def save() -> None:
        with scout.phase("eval"), scout.checkpoint_io("write", name="later"):
            seen.append(progress(scout))

    saver = threading.Thread(target=save)
    saver.start()
    saver.join()
    assert [*seen, progress(scout)] == [before] * 2
    save()
    assert seen[-1].name == "later", "training's own is seen"


def test_what_training_still_holds_works_on_after_close(scout: scout_core.Scout) -> None:
    loader = iter(scout.instrument_dataloader([1, 2, 3]))
    assert next(loader) == 1
    with scout.phase("teardown"), scout.checkpoint_io("write"):
        scout.close()
    assert list(loader) == [2, 3]
    with scout.phase("eval"), scout.checkpoint_io("read"):
        assert list(scout.instrument_dataloader([4])) == [4]


def test_the_users_traceback_hook_runs_after_close(scout: scout_core.Scout, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that was set after `attach()` calls the one it found, which stays in the chain."""
    ours, shown = sys.excepthook, []

    def users(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ours(kind, error, trace)
        shown.append(error)

    monkeypatch.setattr(sys, "excepthook", users)
    scout.close()
    assert sys.excepthook is users
    error = ValueError("the job's own")
    sys.excepthook(ValueError, error, None)
    assert shown == [error]
