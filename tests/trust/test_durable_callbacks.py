"""Whose callbacks write durable checkpoints: the caller's, else the adapter's, else a refusal at attach."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import scout_core
from scout_core.pytorch import PyTorchAdapter
from scout_core.trust.durable import DurableCallbacks, DurableCheckpointConfig, TorchSaveCallbacks


class FrameworkAdapter(PyTorchAdapter):
    """An adapter whose framework has checkpoints of its own."""

    def durable_callbacks(self) -> DurableCallbacks:
        return TorchSaveCallbacks()


def attach(tmp_path: Path, kind: type[PyTorchAdapter]) -> scout_core.Scout:
    model = nn.Sequential(nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = scout_core.ScoutConfig.build(run_dir=tmp_path, oob_enabled=False)
    adapter = kind(model, optimizer, settings.replay)
    durable = DurableCheckpointConfig(folder=tmp_path / "durable")
    return scout_core.attach(model, optimizer, settings, adapter=adapter, durable=durable)


def test_the_adapters_own_are_used_when_the_caller_gives_none(tmp_path: Path) -> None:
    with attach(tmp_path, FrameworkAdapter) as scout:
        assert scout.active


def test_without_any_attach_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(scout_core.ConfigError, match="callbacks=TorchSaveCallbacks"):
        attach(tmp_path, PyTorchAdapter)
