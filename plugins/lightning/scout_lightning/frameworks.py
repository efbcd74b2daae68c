"""Which Lightning the job uses: `lightning.pytorch` or `pytorch_lightning`, of which one is enough."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

__all__ = ["Callback"]

NAMES = ("lightning.pytorch", "pytorch_lightning")


def _chosen() -> str:
    """What the job has imported; where it has none or both, the first that is installed."""
    imported = [name for name in NAMES if name in sys.modules]
    installed = [name for name in NAMES if find_spec(name.partition(".")[0]) is not None]
    candidates = imported if len(imported) == 1 else installed
    if not candidates:
        raise ImportError("scout_lightning needs Lightning: pip install lightning (or pytorch-lightning)")
    return candidates[0]


if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    Callback = import_module(_chosen()).Callback
