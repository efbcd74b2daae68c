"""Faults of memory and of the optimizer's arithmetic."""

import pytest
import torch
from torch import nn

from scout_core import faults
from scout_core.pytorch.optimizer import SliceableOptimizer

MINUS = 31


def trained(
    kind: type[torch.optim.Optimizer] = torch.optim.AdamW, **options: object
) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    step(model, optimizer)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 3)).square().sum().backward()
    optimizer.step()


def test_a_weight_bit_flips_once_and_stays() -> None:
    model, _ = trained()
    before = model.weight.detach().clone()
    with faults.corrupt_weight(model.weight, element=4, bit=MINUS) as fault:
        assert fault.fired == 1
    assert (model.weight != before).flatten().nonzero().flatten().tolist() == [4]


def test_every_element_of_one_row_changes() -> None:
    table = nn.Embedding(5, 3)
    before = table.weight.detach().clone()
    faults.corrupt_rows(table, row=2, bit=MINUS)
    assert torch.equal(table.weight[2], -before[2])
    assert int((table.weight != before).sum()) == 3


@pytest.mark.parametrize(("row", "bit"), [(5, 0), (0, 32)])
def test_rows_outside_the_table_are_refused(row: int, bit: int) -> None:
    with pytest.raises(IndexError):
        faults.corrupt_rows(nn.Embedding(5, 3), row=row, bit=bit)


def test_an_optimizer_moment_flips() -> None:
    model, optimizer = trained()
    before = optimizer.state[model.weight]["exp_avg"].clone()
    faults.corrupt_optimizer_state(optimizer, model.weight, "exp_avg", element=1, bit=MINUS)
    changed = optimizer.state[model.weight]["exp_avg"] != before
    assert changed.flatten().nonzero().flatten().tolist() == [1]


def test_state_that_is_not_there_is_named() -> None:
    model, optimizer = trained()
    with pytest.raises(KeyError, match="exp_avg_sq"):
        faults.corrupt_optimizer_state(optimizer, model.weight, "momentum", element=0, bit=0)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_a_wrong_update_shows_in_training_in_hooks_and_in_the_replayed_slice(kind: type[torch.optim.Optimizer]) -> None:
    twin, twin_optimizer = trained(kind)
    model, optimizer = trained(kind)
    seen: list[torch.Tensor] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(model.weight.detach().clone()))
    slices = SliceableOptimizer(optimizer, {})
    captured = slices.capture(0, 100, step=1)
    assert not isinstance(captured, str)
    clean = slices.apply(captured)

    with faults.corrupt_optimizer_update(optimizer, element=1, bit=MINUS) as fault:
        assert SliceableOptimizer(optimizer, {}).elementwise
        replayed = slices.apply(captured)
        step(model, optimizer)
        assert fault.fired == 2
    step(twin, twin_optimizer)

    assert sum(int((a != b).sum()) for a, b in zip(clean, replayed, strict=True)) == 1
    assert (model.weight != twin.weight).flatten().nonzero().flatten().tolist() == [1]
    assert torch.equal(seen[0], model.weight)
    assert type(optimizer) is kind
    assert all(torch.equal(a, b) for a, b in zip(clean, slices.apply(captured), strict=True))


def test_a_wrong_update_under_a_learning_rate_scheduler() -> None:
    model, optimizer = trained()
    twin, twin_optimizer = trained()
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1.0) for o in (optimizer, twin_optimizer)]
    step(model, optimizer)
    step(twin, twin_optimizer)
    with faults.corrupt_optimizer_update(optimizer, element=1, bit=MINUS):
        step(model, optimizer)
    step(twin, twin_optimizer)
    assert int((model.weight != twin.weight).sum()) == 1
    faults.flip_bit(model.weight, 1, MINUS)
    for scheduler in schedulers:
        scheduler.step()
    step(model, optimizer)
    step(twin, twin_optimizer)
    assert torch.equal(model.weight, twin.weight)


def test_a_wrong_update_every_other_step() -> None:
    model, optimizer = trained()
    twin, twin_optimizer = trained()
    fault = faults.corrupt_optimizer_update(optimizer, element=0, bit=MINUS, every=2)
    wrong = []
    for _ in range(4):
        model.load_state_dict(twin.state_dict())
        step(model, optimizer)
        step(twin, twin_optimizer)
        wrong.append(not torch.equal(model.weight, twin.weight))
    fault.remove()
    assert wrong == [False, True, False, True]
