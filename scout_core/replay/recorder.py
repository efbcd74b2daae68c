"""What this rank has in hand for a check, and what it states about it in the readiness contract."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from scout_core.adapter import FrameworkAdapter, OptimizerSlice, Surfaces
from scout_core.config import ReplayHarnessConfig
from scout_core.consensus.readiness import Readiness, RecipeContract
from scout_core.consensus.structure import structure_signature
from scout_core.replay.at_rest import AtRest, Rest
from scout_core.replay.capture import Invocation, ModuleCapture, RootInput, recompute
from scout_core.replay.guard import attempt, logger
from scout_core.replay.isolation import preserved_state
from scout_core.replay.schedule import Piece, Plan, Recipe, window

_MIB = 1 << 20


@dataclass(kw_only=True)
class Prepared:
    """Material of one check. Recipe classes without a ready contract are not executed."""

    contracts: dict[str, RecipeContract] = field(default_factory=dict)
    invocations: dict[str, Invocation] = field(default_factory=dict)
    slice: OptimizerSlice | None = None
    own_slice: OptimizerSlice | None = None
    state: list[tuple[str, str, torch.Tensor]] = field(default_factory=list)
    rest: Rest | None = None
    manual: bool = False


class Recorder:
    """Arms the due modules for one step and hands over what was recorded. Local to the rank.

    Nothing stands on the model outside an armed step but one pre-hook on its root, which keeps a reference to the last
    input for checks off schedule.
    """

    def __init__(self, adapter: FrameworkAdapter, surfaces: Surfaces, config: ReplayHarnessConfig) -> None:
        self._adapter = adapter
        self._surfaces = surfaces
        self._config = config
        self._captures: dict[str, ModuleCapture] = {}
        self._running: defaultdict[str, dict[bool, frozenset[str]]] = defaultdict(dict)
        self._root = RootInput(surfaces.root, self._next_pass)
        self._slice: OptimizerSlice | str | None = None
        self._slice_failed = False
        self._warned: set[str] = set()
        self._rest: AtRest | None = None

    def module(self, recipe: Recipe) -> tuple[str, nn.Module]:
        """Dotted name and module a recipe replays."""
        found = (
            self._surfaces.hidden.get(recipe.layer)
            if recipe.layer is not None
            else getattr(self._surfaces, recipe.recipe_class)
        )
        if found is None:
            raise KeyError(f"this model has no module for {recipe.recipe_id}")
        name, module = found
        return str(name), module

    def arm(self, plan: Plan, *, keep: bool) -> None:
        """Hook the modules due after the coming step; none of a compiled model, whose code a hook would change."""
        self.disarm()
        if self._surfaces.compiled:
            return
        for recipe in plan.recipes:
            if recipe.recipe_class in ("embedding", "hidden", "output"):
                module = self.module(recipe)[1]
                self._captures[recipe.recipe_id] = ModuleCapture(
                    module, step=plan.step, keep=keep, running=self._running[recipe.recipe_id]
                )

    def _next_pass(self) -> None:
        for capture in self._captures.values():
            capture.next_pass()

    def disarm(self) -> None:
        """Take all hooks of `arm` off; what they recorded is dropped."""
        for capture in self._captures.values():
            capture.remove()
        self._captures = {}
        self._slice = None
        self._slice_failed = False

    def capture_slice(self, plan: Plan) -> None:
        """Copy the optimizer slice: while gradients are final and nothing is updated yet, or as it stands for a manual
        check, with drawn gradients where training has already dropped them."""
        budget = self._config.optimizer_slice_elements
        outcome = attempt(
            "capturing the optimizer slice",
            lambda: self._adapter.capture_optimizer_slice(
                plan.optimizer_ordinal * budget, budget, draw_missing_gradients=plan.manual
            ),
        )
        self._slice, self._slice_failed = outcome.value, outcome.failure is not None

    def recomputes(self, plan: Plan) -> bool:
        """Whether the invocations of `plan` come from a forward pass of their own, as for a compiled model."""
        return plan.manual or self._surfaces.compiled

    @property
    def has_input(self) -> bool:
        """Whether there is a training input to run a forward pass on."""
        return self._root.call is not None

    def prepare(self, plan: Plan, *, keep: bool, together: bool = True) -> Prepared:
        """Everything this rank has for `plan`. Never raises: a failure becomes part of the contract.

        Without `together` no forward pass is run where one would be needed: not all whom it communicates with can.
        """
        prepared = Prepared(manual=plan.manual)
        if self.recomputes(plan) and not together:
            recorded: dict[str, Invocation | None] = {}
            failed = False
        elif self.recomputes(plan):
            outcome = attempt("recomputing the last forward pass", lambda: self._recompute(plan, keep))
            recorded, failed = outcome.value or {}, outcome.failure is not None
        else:
            recorded = {key: capture.invocation for key, capture in self._captures.items()}
            failed = any(capture.failed for capture in self._captures.values())
        for name in plan.classes:
            recipes = [recipe for recipe in plan.recipes if recipe.recipe_class == name]
            if name in ("optimizer", "owner_update"):
                if plan.manual:
                    self.capture_slice(plan)
                prepared.contracts[name] = self._slice_contract(prepared, owned_once=name == "owner_update")
            elif name == "at_rest":
                prepared.contracts[name] = self._rest_contract(plan, prepared)
            elif name == "state":
                prepared.contracts[name] = self._state_contract(plan, prepared)
            elif failed:
                prepared.contracts[name] = RecipeContract(readiness=Readiness.FAILED)
            else:
                invocations = {recipe.recipe_id: recorded.get(recipe.recipe_id) for recipe in recipes}
                contract = attempt(
                    f"describing the {name} invocation", partial(self._module_contract, recipes, invocations)
                )
                prepared.contracts[name] = contract.value or RecipeContract(readiness=Readiness.FAILED)
                prepared.invocations |= {key: value for key, value in invocations.items() if value is not None}
        return prepared

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("SCOUT %s", message)

    def close(self) -> None:
        """Remove every hook."""
        self.disarm()
        self._root.remove()

    def _recompute(self, plan: Plan, keep: bool) -> dict[str, Invocation | None]:
        recipes = [recipe for recipe in plan.recipes if recipe.recipe_class in ("embedding", "hidden", "output")]
        if not recipes:
            return {}
        modules = [self.module(recipe)[1] for recipe in recipes]
        running = [self._running[recipe.recipe_id] for recipe in recipes]
        with preserved_state():
            found = recompute(
                self._surfaces.plain_root,
                self._root,
                modules,
                running,
                step=plan.step,
                keep=keep,
                forward_only=self._adapter.forward_only(),
            )
        return {recipe.recipe_id: invocation for recipe, invocation in zip(recipes, found, strict=True)}

    def _module_contract(self, recipes: list[Recipe], invocations: dict[str, Invocation | None]) -> RecipeContract:
        present = [invocation for invocation in invocations.values() if invocation is not None]
        problems = [invocation.problem for invocation in present if invocation.problem is not None]
        if problems:
            self._warn_once(f"cannot replay {', '.join(invocations)}: {problems[0]}")
            return RecipeContract(readiness=Readiness.UNAVAILABLE)
        if len(present) < len(invocations) or not all(invocation.complete for invocation in present):
            return RecipeContract(readiness=Readiness.NO_CAPTURE)
        return RecipeContract(
            readiness=Readiness.READY,
            identity=structure_signature([(r.recipe_id, self._description(*self.module(r))) for r in recipes]),
            capture_step=present[0].step,
            structure=structure_signature([invocation.structure() for invocation in present]),
            shape=structure_signature([invocation.shape() for invocation in present]),
        )

    def _description(self, name: str, module: nn.Module) -> str:
        """What two peers' modules must have alike to be replayed against each other. As text, quick to sign."""
        whole = self._adapter.whole_shape
        parameters = [(n, whole(p), p.dtype, p.requires_grad) for n, p in module.named_parameters()]
        return repr((name, parameters, [(n, b.shape, b.dtype) for n, b in module.named_buffers()]))

    def begin_rest(self) -> None:
        """Right after an optimizer step: watch the next window of owned state until the following step."""
        state = self._adapter.state_tensors()
        if self._rest is None:
            self._rest = AtRest(_MIB * (self._config.state_budget_mib or default_state_budget_mib(state)))
        self._rest.begin(state)

    def end_rest(self) -> None:
        """Right before an optimizer step: see whether anything changed."""
        if self._rest is not None:
            self._rest.end()

    def _rest_contract(self, plan: Plan, prepared: Prepared) -> RecipeContract:
        rest = self._rest
        outcome = attempt("reading what was found at rest", lambda: None if rest is None else rest.take())
        prepared.rest = outcome.value
        if outcome.failure is not None:
            return RecipeContract(readiness=Readiness.FAILED)
        if prepared.rest is None or not prepared.rest.watched:
            return RecipeContract()  # no watch has ended since the last check
        return RecipeContract(readiness=Readiness.READY, capture_step=plan.step)

    def _slice_contract(self, prepared: Prepared, *, owned_once: bool) -> RecipeContract:
        if self._slice_failed:
            return RecipeContract(readiness=Readiness.FAILED)
        if isinstance(self._slice, str):
            self._warn_once(f"cannot replay the optimizer update: {self._slice}")
            return RecipeContract(readiness=Readiness.UNAVAILABLE)
        if self._slice is None:
            return RecipeContract(readiness=Readiness.NO_CAPTURE)
        prepared.slice = self._slice
        if owned_once:  # every rank has other elements in its slice; those of the source will be carried
            groups = [sorted(group) for group in self._slice.hyperparameters]
            return RecipeContract(
                readiness=Readiness.READY, identity=structure_signature(groups), capture_step=self._slice.step
            )
        sizes = [tuple(part.parameter.shape) for part in self._slice.parts]
        return RecipeContract(
            readiness=Readiness.READY,
            identity=self._slice.identity,
            capture_step=self._slice.step,
            structure=structure_signature([str(part.parameter.dtype) for part in self._slice.parts]),
            shape=structure_signature(sizes),
        )

    def _state_contract(self, plan: Plan, prepared: Prepared) -> RecipeContract:
        outcome = attempt("listing the live state", self._adapter.state_tensors)
        if outcome.value is None:
            return RecipeContract(readiness=Readiness.FAILED)
        tensors = outcome.value
        sizes = [(t.numel(), t.element_size()) for _, _, t in tensors]
        budget = _MIB * (self._config.state_budget_mib or default_state_budget_mib(tensors))
        if plan.manual:  # the whole catalog: a window would call state clean that nobody looked at
            budget = max(budget, sum(count * width for count, width in sizes))
        pieces = window(sizes, plan.ordinal, budget)
        prepared.state = [_cut(tensors, piece) for piece in pieces]
        return RecipeContract(
            readiness=Readiness.READY,
            identity=structure_signature(",".join(f"{surface}/{name}" for surface, name, _ in tensors)),
            capture_step=plan.step,
            structure=structure_signature(",".join(str(t.dtype) for _, _, t in prepared.state)),
            shape=structure_signature(",".join(f"{piece.index}:{piece.start}:{piece.stop}" for piece in pieces)),
        )


def default_state_budget_mib(tensors: Sequence[tuple[str, str, torch.Tensor]]) -> int:
    """Live state compared per check by default: 256 MiB on a GPU, 16 MiB on the CPU.

    Each is read in a few milliseconds at most: at 4 TB/s of an H200, and at 10 GB/s of one CPU core.
    """
    return 256 if any(t.is_cuda for _, _, t in tensors) else 16


def _cut(tensors: Sequence[tuple[str, str, torch.Tensor]], piece: Piece) -> tuple[str, str, torch.Tensor]:
    surface, name, tensor = tensors[piece.index]
    whole = piece.start == 0 and piece.stop == tensor.numel()
    return surface, name, tensor if whole else tensor.detach().reshape(-1)[piece.start : piece.stop]
