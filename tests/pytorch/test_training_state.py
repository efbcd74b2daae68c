"""Putting a training state back: all of it or nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from scout_core.pytorch.training_state import TrainingState


class Picky:
    """Caller-owned state that refuses some values."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]
        if self.value < 0:
            raise KeyError("half of it is missing")


def trained(steps: int) -> tuple[TrainingState, nn.Module, torch.optim.Optimizer, Picky]:
    torch.manual_seed(steps)
    model, picky = nn.Linear(4, 4), Picky()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + steps)
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    picky.value = steps
    return TrainingState(model, optimizer, {"picky": picky}), model, optimizer, picky


def everything(state: TrainingState) -> Any:
    kept = state.take(0)
    return torch.utils._pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, kept)


@pytest.mark.parametrize("fresh", [0, 1])
@pytest.mark.parametrize("refuses", ["optimizer", "stateful"])
def test_when_a_part_is_refused_nothing_is_changed(refuses: str, fresh: int) -> None:
    saved = everything(trained(3)[0])
    if refuses == "optimizer":
        saved["optimizer"]["param_groups"] = []
    else:
        saved["stateful"]["picky"]["value"] = -1
    live, _, optimizer, picky = trained(fresh)
    before = everything(live)
    with pytest.raises(ValueError, match="refused"):
        live.put_back(saved)
    after = everything(live)
    for part in ("parameters", "optimizer", "stateful"):
        torch.testing.assert_close(after[part], before[part], rtol=0, atol=0)
    assert picky.value == fresh and optimizer.param_groups[0]["lr"] == 0.1 + fresh


def test_otherwise_everything_is() -> None:
    saved = everything(trained(3)[0])
    live, _, optimizer, picky = trained(0)
    live.put_back(saved)
    after = everything(live)
    for part in ("parameters", "optimizer", "stateful"):
        torch.testing.assert_close(after[part], saved[part], rtol=0, atol=0)
    assert picky.value == 3 and optimizer.param_groups[0]["lr"] == 3.1
