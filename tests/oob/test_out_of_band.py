"""The out-of-band parts of the handle on one rank with its observer: threads beside training, and after `close()`."""

from __future__ import annotations

import threading
from collections.abc import Iterator

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
