"""Faults of memory: state that is wrong from the call on, until it is reloaded."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from scout_core.faults.bits import bit_width, flip_bit, flip_column, own_part
from scout_core.faults.fault import Fault


def corrupt_weight(parameter: torch.Tensor, element: int, bit: int) -> Fault:
    """Flip one bit of a live parameter or buffer, of a DTensor the part on this rank, now.

    Raises `IndexError` when there is no such element or bit.
    """
    flip_bit(parameter, element, bit)
    return _Done()


def corrupt_rows(embedding: nn.Embedding, row: int, bit: int) -> Fault:
    """Flip the same bit of every element in one row of an embedding table, now.

    Rows of a DTensor are counted on this rank. Raises `IndexError` when there is no such row or bit.
    """
    weight = own_part(embedding.weight).data
    if not 0 <= row < weight.shape[0]:
        raise IndexError(f"row {row} is outside a table of {weight.shape[0]} rows")
    if not 0 <= bit < bit_width(weight):
        raise IndexError(f"bit {bit} is outside 0..{bit_width(weight) - 1} of {weight.dtype}")
    changed = weight[row].clone()
    flip_column(changed, bit)
    weight[row] = changed
    return _Done()


def corrupt_optimizer_state(optimizer: Optimizer, parameter: torch.Tensor, key: str, element: int, bit: int) -> Fault:
    """Flip one bit of one tensor of a parameter's optimizer state, such as `exp_avg` of Adam, now.

    Raises `KeyError` when the parameter has no such state (yet), `IndexError` for no such element or bit.
    """
    state = optimizer.state.get(parameter, {})
    tensor = state.get(key)
    if not isinstance(tensor, torch.Tensor):
        tensors = [name for name, value in state.items() if isinstance(value, torch.Tensor)]
        raise KeyError(
            f"no optimizer state {key!r} for this parameter; it has {tensors or 'none before the first step'}"
        )
    flip_bit(tensor, element, bit)
    return _Done()


class _Done(Fault):
    """Acted once and has nothing to remove."""

    def __init__(self) -> None:
        super().__init__()
        self._fired = 1
