"""What the recipes cover of one model and what they leave out. Pure: from plain facts to rows and findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from scout_core.doctor.findings import Finding, count

_NAMED = 4


@dataclass(frozen=True, kw_only=True)
class ParameterFact:
    """One parameter. `surfaces` names the replayed modules it belongs to; empty when it is outside all of them."""

    name: str
    elements: int
    trainable: bool = True
    stepped: bool = True
    surfaces: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What was found of a model, its optimizer and the configuration.

    `embedding`, `hidden` and `output` are dotted names (None, empty: not found). `parameters` are those SCOUT compares,
    `ignored` the names of those it does not (DDP's ignore list). `intervals` are optimizer steps by recipe class, 0:
    off. `whole_updates`: the optimizer cannot be replayed in pieces of a parameter. `no_update_replay` says why its
    updates cannot be replayed at all. `foreign_elements` belong to the optimizer and not to the model. `shards` is the
    number of ranks that hold different parts of a parameter (1: none), `copies` that of ranks with equal parts.
    """

    peers: tuple[int, ...]
    embedding: str | None = None
    hidden: tuple[str, ...] = ()
    output: str | None = None
    notes: tuple[str, ...] = ()
    compiled: bool = False
    parameters: tuple[ParameterFact, ...] = ()
    ignored: tuple[str, ...] = ()
    outer_buffers: tuple[str, ...] = ()
    optimizer: str = ""
    whole_updates: bool = False
    no_update_replay: str | None = None
    foreign_elements: int = 0
    shards: int = 1
    copies: int = 1
    intervals: Mapping[str, int] = field(default_factory=dict)
    slice_elements: int = 1 << 20
    state_bytes: int = 0
    state_budget_bytes: int = 1 << 24
    compare_parameters: bool = True
    deterministic: bool = True


@dataclass(frozen=True, kw_only=True)
class RecipeCoverage:
    """One recipe class: what it replays, how many peers compare it, and after how many steps all of it was covered.

    `every_steps` is 0 when the recipe runs in `check_now()` only, or never; `whole_after_steps` is then None.
    """

    recipe: str
    covers: str
    peers: int
    every_steps: int
    whole_after_steps: int | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def recipe_coverage(model: ModelFacts) -> tuple[RecipeCoverage, ...]:
    """A row for each recipe class this model has, in the order in which a check runs them."""
    updated = sum(p.elements for p in model.parameters if p.trainable and p.stepped) + model.foreign_elements
    rows = []
    if model.embedding is not None:
        rows.append(_row(model, "embedding", model.embedding, 1))
    if model.hidden:
        layers = f"{model.hidden[0]} ... {model.hidden[-1]}" if len(model.hidden) > 1 else model.hidden[0]
        rows.append(
            _row(model, "hidden", f"{count(len(model.hidden), 'layer')}, one a check: {layers}", len(model.hidden))
        )
    if model.output is not None:
        rows.append(_row(model, "output", model.output, 1))
    if model.no_update_replay is None:
        slices = -(-updated // model.slice_elements) if updated else 1
        rows.append(
            _row(model, "optimizer", f"{model.optimizer}, {updated:,} elements in {count(slices, 'slice')}", slices)
        )
    if model.compare_parameters:
        windows = max(-(-model.state_bytes // model.state_budget_bytes), 1)
        mib = model.state_bytes / 2**20
        text = f"all parameters and optimizer state, {mib:,.1f} MiB in {count(windows, 'window')}"
        rows.append(_row(model, "state", text, windows))
    return tuple(rows)


def _row(model: ModelFacts, recipe: str, covers: str, turns: int) -> RecipeCoverage:
    if recipe == "state":
        every = min((steps for steps in model.intervals.values() if steps), default=0)
    else:
        every = model.intervals.get(recipe, 0)
    return RecipeCoverage(
        recipe=recipe,
        covers=covers,
        peers=len(model.peers),
        every_steps=every,
        whole_after_steps=every * turns if every else None,
    )


def coverage_findings(model: ModelFacts) -> list[Finding]:
    """What stays uncovered, or is covered in another way than by replaying its module."""
    found = [_missing_surface(note) for note in model.notes]
    found += _outside(model)
    found += _optimizer(model)
    found += _sharding(model)
    found += _switched_off(model)
    if model.ignored:
        message = f"DDP ignores {_names(model.ignored)}: not replicated, so there is no peer to compare them with"
        fix = "see that they really differ by design"
        found.append(Finding(id="parameters-ignored", severity="warning", message=message, fix=fix))
    if model.compiled:
        message = "the model is compiled: replays run eagerly, so kernels that the compiler made are not exercised"
        found.append(Finding(id="compiled", severity="info", message=message))
    return found


def _missing_surface(note: str) -> Finding:
    message, _, fix = note.partition("; ")
    return Finding(id="surface-missing", severity="warning", message=message, fix=fix)


def _outside(model: ModelFacts) -> list[Finding]:
    found = []
    outside = [p for p in model.parameters if not p.surfaces]
    if outside:
        elements = sum(p.elements for p in outside)
        share = elements / max(sum(p.elements for p in model.parameters), 1)
        what = f"{count(len(outside), 'parameter')} ({share:.1%} of elements) outside the replayed modules"
        listed = _names([p.name for p in outside])
        if model.compare_parameters:
            message = (
                f"{what} are not replayed: {listed}; their values and optimizer state are compared bit for bit, so a "
                "wrong result of their computation is seen once it has reached the state"
            )
            found.append(Finding(id="parameters-outside", severity="info", message=message))
        else:
            message = f"{what} are covered by nothing: {listed}"
            fix = "set compare_parameters=True"
            found.append(Finding(id="parameters-outside", severity="warning", message=message, fix=fix))
    if model.outer_buffers:
        message = f"buffers outside the replayed modules are not compared: {_names(model.outer_buffers)}"
        found.append(Finding(id="buffers-outside", severity="info", message=message))
    return found


def _optimizer(model: ModelFacts) -> list[Finding]:
    found = []
    if model.no_update_replay is not None:
        message = f"updates of {model.optimizer} are not replayed: {model.no_update_replay}"
        better = (
            "an optimizer whose step() needs no closure" if "closure" in model.no_update_replay else "dense gradients"
        )
        fix = f"updated state is still compared; to have updates recomputed, use {better}"
        found.append(Finding(id="optimizer-not-replayed", severity="warning", message=message, fix=fix))
    elif model.whole_updates:
        message = (
            f"{model.optimizer} is not known to update each element by itself: a slice holds whole parameters, and may "
            f"exceed optimizer_slice_elements={model.slice_elements:,}"
        )
        found.append(Finding(id="optimizer-whole", severity="info", message=message))
    idle = [p.name for p in model.parameters if p.trainable and not p.stepped]
    if idle:
        message = f"{count(len(idle), 'trainable parameter')} belong to no group of this optimizer: {_names(idle)}"
        fix = "attach with the optimizer that owns them; a second optimizer's updates and state are not seen"
        found.append(Finding(id="parameters-not-stepped", severity="warning", message=message, fix=fix))
    if model.foreign_elements:
        message = (
            f"the optimizer also updates {model.foreign_elements:,} elements that are not in this model: their update "
            "is replayed, their values are not compared"
        )
        fix = "attach with the module that holds all of them"
        found.append(Finding(id="parameters-foreign", severity="warning", message=message, fix=fix))
    return found


def _sharding(model: ModelFacts) -> list[Finding]:
    if model.shards < 2 or model.copies > 1:
        return []
    message = (
        f"parameters are sharded over {model.shards} ranks and held once: corruption of an owner's shard has no live "
        "copy to be compared with"
    )
    fix = "use HSDP: a device mesh with a replicated dimension, best of 3 or more"
    return [Finding(id="single-owner", severity="warning", message=message, fix=fix)]


def _switched_off(model: ModelFacts) -> list[Finding]:
    found = []
    off = [recipe for recipe, steps in model.intervals.items() if steps == 0]
    if off and len(off) == len(model.intervals):
        message = "no recipe has an interval: only check_now() checks"
        found.append(Finding(id="recipes-off", severity="info", message=message, fix="set check_interval"))
    elif off:
        message = f"switched off by interval 0: {', '.join(off)}"
        found.append(Finding(id="recipes-off", severity="info", message=message))
    if not model.deterministic:
        message = "deterministic=False: replays may not repeat themselves, and what does not is never attributed"
        found.append(
            Finding(id="replay-determinism", severity="warning", message=message, fix="set deterministic=True")
        )
    return found


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown
