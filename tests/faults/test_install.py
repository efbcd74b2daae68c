"""Faults described in a line of text: parsed strictly, checked against the model at once, begun on time."""

import pytest
import torch
from torch import nn

from scout_core import ConfigError, faults
from scout_core.faults import FaultSpec, install

X = torch.ones(1, dtype=torch.int64)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 3)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def job() -> tuple[Model, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    out = model(X)
    out.sum().backward()
    optimizer.step()
    return out.detach()


def test_every_key_is_read() -> None:
    spec = FaultSpec.parse("rank=2, kind=corrupt_output,module=blocks.1,step=30,element=7,bit=20,every=3,times=4")
    assert spec == FaultSpec(
        rank=2, kind="corrupt_output", module="blocks.1", step=30, element=7, bit=20, every=3, times=4
    )
    assert FaultSpec.parse("rank=all,kind=nondeterministic_kernel,module=a").rank == "all"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rank=0,kind=melt,module=a", "corrupt_output"),
        ("kind=corrupt_output,module=a", "rank=... is missing"),
        ("rank=0,kind=corrupt_output", "also needs module=..."),
        ("rank=0,kind=corrupt_output,module=a,layer=3", "unknown key 'layer'"),
        ("rank=-1,kind=corrupt_output,module=a", "greater than or equal to 0"),
        ("rank=0,kind=corrupt_output,module=a,every=0", "greater than or equal to 1"),
        ("rank=0,corrupt_output", "not of the form key=value"),
        ("rank=0,kind=slow_module,module=a", "also needs seconds=..."),
    ],
)
def test_a_bad_line_says_what_to_change(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
        FaultSpec.parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rank=5,kind=corrupt_output,module=blocks.9", "blocks.0"),
        ("rank=5,kind=corrupt_weight,parameter=blocks.0.scale", "blocks.0.weight"),
        ("rank=5,kind=corrupt_weight,parameter=blocks.0.bias,element=3", "has 3 elements"),
        ("rank=5,kind=corrupt_weight,parameter=blocks.0.bias,bit=32", "bits 0..31"),
        ("rank=5,kind=corrupt_rows,module=blocks.0,row=1", "needs an Embedding"),
    ],
)
def test_a_spec_that_does_not_fit_the_model_is_refused_on_every_rank(
    job: tuple[Model, torch.optim.Optimizer], text: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says.replace(".", r"\.")):
        install(text, *job)


def test_the_fault_begins_after_its_step_and_ends(job: tuple[Model, torch.optim.Optimizer]) -> None:
    clean = step(*job)
    fault = install("rank=0,kind=corrupt_output,module=blocks.1,step=2,bit=31", *job)
    wrong = [not torch.equal(step(*job), clean) for _ in range(4)]
    assert wrong == [False, False, True, True]
    assert fault.fired == 2
    fault.remove()
    assert torch.equal(step(*job), clean)


def test_another_rank_is_left_alone(job: tuple[Model, torch.optim.Optimizer]) -> None:
    clean = step(*job)
    install("rank=1,kind=corrupt_output,module=blocks.1,bit=31", *job)
    assert torch.equal(step(*job), clean)


def test_a_removed_fault_never_begins(job: tuple[Model, torch.optim.Optimizer]) -> None:
    clean = step(*job)
    install("rank=0,kind=corrupt_weight,parameter=blocks.1.weight,step=1,bit=31", *job).remove()
    step(*job)
    assert torch.equal(step(*job), clean)


def test_the_environment_counts_only_when_install_is_called(
    job: tuple[Model, torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    clean = step(*job)
    monkeypatch.delenv("SCOUT_FAULT", raising=False)
    assert install(None, *job).fired == 0
    monkeypatch.setenv("SCOUT_FAULT", "rank=all,kind=corrupt_rows,module=table,row=1,bit=31")
    assert torch.equal(step(*job), clean)
    assert install(None, *job).fired == 1
    assert not torch.equal(step(*job), clean)


@pytest.mark.parametrize(
    "text",
    [
        "kind=corrupt_output,module=blocks.0",
        "kind=corrupt_input_gradient,module=blocks.0",
        "kind=corrupt_parameter_gradient,parameter=blocks.0.weight",
        "kind=corrupt_weight,parameter=blocks.0.weight",
        "kind=corrupt_rows,module=table,row=1",
        "kind=corrupt_optimizer_state,parameter=blocks.0.weight,key=exp_avg",
        "kind=corrupt_optimizer_update",
        "kind=slow_module,module=blocks.0,seconds=0.001",
        "kind=nondeterministic_kernel,module=blocks.0",
    ],
)
def test_every_kind_can_be_installed_and_fires(job: tuple[Model, torch.optim.Optimizer], text: str) -> None:
    fault: faults.Fault = install(f"rank=0,step=1,{text}", *job)
    step(*job)
    step(*job)
    assert fault.fired == 1
    fault.remove()
    step(*job)
    assert fault.fired == 1
