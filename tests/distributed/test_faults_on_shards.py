"""Faults in tensors that are spread over ranks change what the calling rank holds, and nothing on the other."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW

from scout_core import faults
from scout_core.faults.bits import own_part
from tests.distributed.pool import RankPool

FAULTY = 1


def on_faulty() -> bool:
    return dist.get_rank() == FAULTY


def flipped(before: torch.Tensor, after: torch.Tensor) -> list[int]:
    """Flat places whose sign bit changed; nothing else may have."""
    changed = before.view(torch.int32) ^ after.view(torch.int32)
    assert set(changed.flatten().tolist()) <= {0, -(1 << 31)}
    return changed.flatten().nonzero().flatten().tolist()


def two_layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False))


def state() -> dict[str, list[int]]:
    model = fully_shard(two_layers(), mesh=init_device_mesh("cpu", (2,)))
    optimizer = AdamW(model.parameters())
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    weight = model[0].weight
    watched = {"weight": weight, "moment": optimizer.state[weight]["exp_avg"]}
    before = {name: own_part(tensor).clone() for name, tensor in watched.items()}
    if on_faulty():
        faults.corrupt_weight(weight, 5, 31)
        faults.corrupt_optimizer_state(optimizer, weight, "exp_avg", 7, 31)
    return {name: flipped(before[name], own_part(tensor)) for name, tensor in watched.items()}


def test_state(ranks2: RankPool) -> None:
    assert ranks2.run(state) == [{"weight": [], "moment": []}, {"weight": [5], "moment": [7]}]


def compute() -> dict[str, list[int]]:
    """A gradient of the own columns, and a product that is summed only afterwards."""
    model = two_layers()
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    products: list[DTensor] = []
    model[1].register_forward_hook(lambda *call: products.append(call[2]), prepend=True)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        model.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        assert products[-1].placements == (Partial(),)
        return own_part(model[0].weight.grad).clone(), own_part(products[-1]).clone()

    gradient, product = both()
    found = {}
    if on_faulty():
        faults.corrupt_parameter_gradient(model[0], "weight", 3, 31, times=1)
    found["gradient"] = flipped(gradient, both()[0])
    if on_faulty():
        faults.corrupt_output(model[1], 2, 31, times=1)
    found["product"] = flipped(product, both()[1])
    return found


def test_compute(ranks2: RankPool) -> None:
    assert ranks2.run(compute) == [{"gradient": [], "product": []}, {"gradient": [3], "product": [2]}]


def update() -> list[list[int]]:
    """The first parameter has one element, which lives on rank 0: rank 1 has to flip in the second."""
    model = nn.ParameterDict({"scale": torch.ones(1), "rows": torch.ones(4, 2)})
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    results = []
    for faulty in (False, True):
        optimizer = AdamW(model.parameters())
        saved = [own_part(p).clone() for p in model.parameters()]
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        with faults.corrupt_optimizer_update(optimizer, 1, 31) if faulty and on_faulty() else faults.Fault():
            optimizer.step()
        results.append([own_part(p).clone() for p in model.parameters()])
        for p, values in zip(model.parameters(), saved, strict=True):
            own_part(p).copy_(values)
    return [flipped(healthy, faulty) for healthy, faulty in zip(*results, strict=True)]


def test_update(ranks2: RankPool) -> None:
    healthy, faulty = ranks2.run(update)
    assert healthy == [[], []]
    assert sorted(map(len, faulty)) == [0, 1] and [1] in faulty
