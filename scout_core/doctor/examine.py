"""`examine(model, optimizer)`: the doctor from inside the user's script, where model and settings are real."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from scout_core.adapter import FrameworkAdapter, Surfaces
from scout_core.config import ReplayHarnessConfig, ScoutConfig
from scout_core.doctor.collect import local_facts
from scout_core.doctor.coverage import ModelFacts, ParameterFact, RecipeCoverage, coverage_findings, recipe_coverage
from scout_core.doctor.facts import RankFacts
from scout_core.doctor.findings import Finding, by_severity, exit_code
from scout_core.doctor.job import JobFacts, gather_initialized
from scout_core.doctor.render import fact_lines, finding_lines, table
from scout_core.doctor.rules import diagnose, peer_finding
from scout_core.pytorch import PyTorchAdapter
from scout_core.pytorch.optimizer import SliceableOptimizer
from scout_core.replay.recorder import default_state_budget_mib

_RECIPES = ("embedding", "hidden", "output", "optimizer")


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What `examine` found: the ranks, the model as this rank has it, its coverage, and what to do."""

    facts: tuple[RankFacts, ...]
    model: ModelFacts
    coverage: tuple[RecipeCoverage, ...]
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether there is nothing to repair."""
        return exit_code(self.findings) == 0

    def to_json(self) -> dict[str, Any]:
        """A plain dict for strict JSON."""
        return {
            "type": "examination",
            "ranks": [rank.to_json() for rank in self.facts],
            "peers": list(self.model.peers),
            "coverage": [row.to_json() for row in self.coverage],
            "findings": [finding.to_json() for finding in self.findings],
        }

    def lines(self) -> list[str]:
        """The text that is printed."""
        rows = [
            (row.recipe, str(row.peers), _steps(row.every_steps), _steps(row.whole_after_steps), row.covers)
            for row in self.coverage
        ]
        recipes = table(("recipe", "peers", "every", "all of it after", "covers"), rows)
        return [*fact_lines(self.facts), "", *recipes, "", *finding_lines(self.findings)]


def examine(
    model: nn.Module,
    optimizer: Optimizer,
    config: ScoutConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    adapter: FrameworkAdapter | None = None,
    file: TextIO | None = None,
    timeout_s: float = 60.0,
    **overrides: Any,
) -> Examination:
    """Say what `attach()` with the same arguments would see of this job, before it is called; changes nothing.

    Every rank calls, after the model is wrapped (DDP), the optimizer exists and the script's flags (TF32, determinism)
    are set; best after one optimizer step, since only then the optimizer's state has its size. Collectives: one Gloo
    group of all ranks, one gather. Rank 0 prints, to `file` or standard output.

    Raises `ConfigError` as `attach()` does, and `RuntimeError` from torch.distributed when a rank does not call within
    `timeout_s`.
    """
    settings = ScoutConfig.build(config, **overrides).replay
    adapter = adapter or PyTorchAdapter(model, optimizer, settings)
    found = model_facts(model, optimizer, adapter, settings)
    job = _gather(timeout_s)
    findings = [f for f in diagnose(job.facts) if f.id != "peers"]
    findings += [peer_finding(len(found.peers)), *coverage_findings(found)]
    examination = Examination(
        facts=job.facts, model=found, coverage=recipe_coverage(found), findings=by_severity(findings)
    )
    if job.speaks:
        print("\n".join(examination.lines()), file=file or sys.stdout)
    return examination


def _gather(timeout_s: float) -> JobFacts:
    if dist.is_available() and dist.is_initialized():
        return gather_initialized(timeout_s)
    return JobFacts(speaks=True, facts=(local_facts(in_job=True, in_script=True),))


def model_facts(
    model: nn.Module, optimizer: Optimizer, adapter: FrameworkAdapter, config: ReplayHarnessConfig
) -> ModelFacts:
    """Plain facts of a model, read through its adapter. Every rank may call it alone; no collective of its own."""
    surfaces, layout, state = adapter.surfaces(), adapter.layout(), adapter.state_tensors()
    plain = surfaces.plain_root
    named = dict(plain.named_parameters())
    compared = {name for surface, name, _ in state if surface == "parameter_state"}
    owned = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    inside = _modules_by_parameter(surfaces)
    known = {id(p) for p in named.values()}
    shards, copies = _sharding(named.values())
    budget = config.state_budget_mib or default_state_budget_mib(state)
    return ModelFacts(
        peers=layout.peers,
        embedding=surfaces.embedding[0] if surfaces.embedding else None,
        hidden=tuple(name for name, _ in surfaces.hidden.values()),
        output=surfaces.output[0] if surfaces.output else None,
        notes=surfaces.notes,
        compiled=surfaces.compiled,
        parameters=tuple(
            ParameterFact(
                name=name,
                elements=p.numel(),
                trainable=p.requires_grad,
                stepped=id(p) in owned,
                surfaces=inside.get(id(p), ()),
            )
            for name, p in named.items()
            if name in compared
        ),
        ignored=tuple(name for name in named if name not in compared),
        outer_buffers=_outer_buffers(surfaces),
        optimizer=type(optimizer).__name__,
        whole_updates=not SliceableOptimizer(optimizer, {}).elementwise,
        no_update_replay=_no_update_replay(plain, optimizer),
        foreign_elements=sum(p.numel() for key, p in owned.items() if key not in known),
        shards=shards,
        copies=copies,
        intervals={recipe: config.interval(recipe) for recipe in _RECIPES},
        slice_elements=config.optimizer_slice_elements,
        state_bytes=sum(t.numel() * t.element_size() for _, _, t in state),
        state_budget_bytes=budget << 20,
        compare_parameters=config.compare_parameters,
        deterministic=config.deterministic,
    )


def _replayed(surfaces: Surfaces) -> list[tuple[str, nn.Module]]:
    found = [surfaces.embedding, *surfaces.hidden.values(), surfaces.output]
    return [item for item in found if item is not None]


def _modules_by_parameter(surfaces: Surfaces) -> dict[int, tuple[str, ...]]:
    """Names of the replayed modules by id of their parameters; a tied one belongs to several."""
    inside: dict[int, tuple[str, ...]] = {}
    for name, module in _replayed(surfaces):
        for parameter in module.parameters():
            inside[id(parameter)] = (*inside.get(id(parameter), ()), name)
    return inside


def _outer_buffers(surfaces: Surfaces) -> tuple[str, ...]:
    inside = {id(buffer) for _, module in _replayed(surfaces) for buffer in module.buffers()}
    return tuple(name for name, buffer in surfaces.plain_root.named_buffers() if id(buffer) not in inside)


def _no_update_replay(model: nn.Module, optimizer: Optimizer) -> str | None:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return "step(closure) computes its gradients inside the step"
    sparse = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse
    ]
    if sparse:
        return f"{', '.join(sparse)} has sparse gradients, which have no slice that could be replayed"
    return None


def _sharding(parameters: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Ranks over which a sharded parameter is spread, and ranks that hold equal parts of it; 1, 1 without shards."""
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            shards = copies = 1
            for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
                if isinstance(placement, Replicate):
                    copies *= size
                else:
                    shards *= size
            if shards > 1:
                return shards, copies
    return 1, 1


def _steps(steps: int | None) -> str:
    return f"{steps} steps" if steps else "-"
