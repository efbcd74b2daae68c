"""Random state of every rank inside a checkpoint that one rank writes; Lightning's own checkpoints leave it out."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch

_PYTHON = 625  # words of the Mersenne twister, position included
_NUMPY = 625
_CUDA_BYTES = 16  # seed and offset


def own_state() -> list[int]:
    """This rank's generators (torch CPU, current CUDA device, `random`, numpy) as integers. Local.

    A half-drawn Gaussian that `random` or numpy keep back is not part of it, nor another global generator of numpy's
    than its usual one. The length is the same on every rank, also where CUDA was never used: rows are gathered.
    """
    state = np.random.get_state(legacy=False)
    usual = state["bit_generator"] == "MT19937"
    words = [*map(int, state["state"]["key"]), int(state["state"]["pos"])] if usual else [0] * _NUMPY
    row = [*random.getstate()[1], *words]
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cpu, device = torch.get_rng_state(), torch.cuda.get_rng_state() if cuda else torch.empty(0, dtype=torch.uint8)
    if device.numel() > _CUDA_BYTES:
        device = device[:0]
    for part, room in ((cpu, cpu.numel()), (device, _CUDA_BYTES)):
        padded = torch.zeros(-(-room // 8) * 8, dtype=torch.uint8)
        padded[: part.numel()] = part
        row += [part.numel(), *padded.view(torch.int64).tolist()]
    return row


def restore(row: Sequence[int]) -> None:
    """Put back what `own_state` gave. Local."""
    words = list(row)
    random.setstate((3, tuple(words[:_PYTHON]), None))
    keys, position = words[_PYTHON : _PYTHON + _NUMPY - 1], words[_PYTHON + _NUMPY - 1]
    if any(keys):
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, 0, 0.0))
    rest = words[_PYTHON + _NUMPY :]
    states = []
    for _ in range(2):
        length, rest = rest[0], rest[1:]
        count = -(-length // 8)
        states.append(torch.tensor(rest[:count], dtype=torch.int64).view(torch.uint8)[:length])
        rest = rest[count:]
    torch.set_rng_state(states[0])
    if states[1].numel() and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[1])
