"""The adapter for plain PyTorch without a process group: boundaries, skipped updates, closures, live state."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from scout_core import ReplayHarnessConfig
from scout_core.adapter import OptimizerSlice
from scout_core.pytorch import PyTorchAdapter


class Watched:
    """A tiny job whose adapter calls are recorded in the order in which they come."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **options: object) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.optimizer = optimizer(self.model.parameters(), **options)  # type: ignore[call-arg]
        self.adapter = PyTorchAdapter(self.model, self.optimizer, ReplayHarnessConfig())
        self.log: list[object] = []
        self.adapter.on_boundary(self._before, self._boundary)

    def _before(self) -> None:
        part = self.adapter.capture_optimizer_slice(0, 4)
        self.log.append(part if isinstance(part, str) else part.step)

    def _boundary(self, applied: Callable[[], bool]) -> None:
        self.log.append(applied())

    def loss(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss


def test_a_job_without_a_process_group_is_its_own_only_peer() -> None:
    layout = Watched().adapter.layout()
    assert layout.peers == (0,) and layout.data_group is None


def test_each_step_is_told_before_and_after_and_counted() -> None:
    job = Watched()
    for _ in range(2):
        job.loss()
        job.optimizer.step()
    assert job.log == [1, True, 2, True]


def test_a_closure_is_named_as_the_reason_for_no_slice_and_the_next_plain_step_has_one() -> None:
    job = Watched()
    job.optimizer.step(job.loss)
    job.loss()
    job.optimizer.step()
    assert "inside the step" in str(job.log[0]) and job.log[1:] == [True, 2, True]


def test_an_update_that_a_gradient_scaler_skips_is_no_applied_one() -> None:
    job = Watched(torch.optim.AdamW, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (1.0, float("inf")):
        job.optimizer.zero_grad()
        scaler.scale(job.model(torch.ones(1, 2)).sum() * factor).backward()
        scaler.step(job.optimizer)
        scaler.update()
    assert [entry for entry in job.log if isinstance(entry, bool)] == [True, False]


def test_slices_are_taken_off_schedule_when_gradients_are_gone() -> None:
    job = Watched()
    job.optimizer.zero_grad()
    assert job.adapter.capture_optimizer_slice(0, 4) == "no parameter has a gradient"
    drawn = job.adapter.capture_optimizer_slice(0, 4, draw_missing_gradients=True)
    assert isinstance(drawn, OptimizerSlice) and drawn.parts[0].name == "0.weight"
    assert len(job.adapter.apply_optimizer_slice(drawn)) == 1


def test_live_state_holds_every_parameter_and_moment_by_name() -> None:
    job = Watched(torch.optim.Adam)
    job.loss()
    job.optimizer.step()
    listed = {(surface, name) for surface, name, _ in job.adapter.state_tensors()}
    names = [name for name, _ in job.model.named_parameters()]
    wanted = {("parameter_state", name) for name in names}
    wanted |= {("optimizer_state", f"{name}.{key}") for name in names for key in ("step", "exp_avg", "exp_avg_sq")}
    assert listed == wanted


def test_closing_takes_the_hooks_off_and_may_be_repeated() -> None:
    job = Watched()
    job.adapter.close()
    job.adapter.close()
    job.loss()
    job.optimizer.step()
    assert (
        job.log == [] and not job.optimizer._optimizer_step_pre_hooks and not job.optimizer._optimizer_step_post_hooks
    )
