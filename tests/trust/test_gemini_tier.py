"""The GEMINI tier of one rank: what is under way, what it offers, and what it puts on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import scout_core


class LateCapture:
    """Copies as a device does whose queue is long: when the next update waits for it, or at the very end."""

    def __init__(self, source: torch.Tensor) -> None:
        self.source = source
        self.data: torch.Tensor | None = None

    def hold(self) -> None:
        if self.data is None:
            self.data = self.source.detach().clone()


@pytest.mark.parametrize("how", ["stops", "closes"])
def test_an_update_after_checks_have_stopped_does_not_reach_into_a_capture(tmp_path: Path, how: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scout = scout_core.attach(model, optimizer, run_dir=tmp_path, gemini=True, oob_enabled=False)
    assert scout._trust._gemini is not None
    weight = model[0].weight
    before = weight.detach().clone()
    capture = LateCapture(weight)
    scout._trust._gemini._capture = capture  # type: ignore[assignment]
    if how == "stops":
        scout._stop_checks()
    else:
        scout.close()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    capture.hold()
    assert capture.data is not None and torch.equal(capture.data, before) and not torch.equal(weight, before)
    scout.close()
