"""What the adapter captures when the optimizer is handed the whole training step as a closure. One process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scout_core.adapter import OptimizerSlice
from scout_core.config import ReplayHarnessConfig
from scout_lightning.adapter import LightningAdapter, _only_network


def test_the_slice_holds_the_gradients_of_this_step_not_those_left_from_the_last() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    adapter = LightningAdapter(model, optimizer, ReplayHarnessConfig())
    captured: list[Any] = []
    adapter.on_boundary(lambda: captured.append(adapter.capture_optimizer_slice(0, 100)), lambda applied: None)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.randn(2, 3)).square().sum()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        return loss

    for _ in range(3):
        optimizer.step(closure)
        part = captured[-1]
        assert isinstance(part, OptimizerSlice)
        gradients = [piece.gradient for piece in part.parts]
        assert all(map(torch.equal, gradients, [p.grad.flatten() for p in model.parameters()]))
        recomputed = adapter.apply_optimizer_slice(part)[: len(gradients)]
        assert all(map(torch.equal, recomputed, [p.detach().flatten() for p in model.parameters()]))
    assert len(captured) == 3
    adapter.close()
    optimizer.step(closure)
    assert len(captured) == 3


def test_the_root_is_the_one_network_that_holds_everything() -> None:
    inside = nn.Module()
    inside.net = nn.Linear(2, 2)
    assert _only_network(inside) is inside.net
    inside.bias = nn.Parameter(torch.zeros(2))
    assert _only_network(inside) is None
