"""Settings of every test: one thread a process, and `gpu` tests only where there is a GPU."""

import os

# Before torch, numpy or a process that the tests start can read them.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# How long one example takes says more about the host than about the code.
settings.register_profile("scout", deadline=None)
settings.load_profile("scout")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
