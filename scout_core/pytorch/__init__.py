"""SCOUT under plain PyTorch."""

from scout_core.pytorch.adapter import PyTorchAdapter

__all__ = ["PyTorchAdapter"]
