"""Executing the recipes of one check on this rank and turning what comes out into evidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from scout_core.adapter import FrameworkAdapter
from scout_core.consensus.structure import structure_signature
from scout_core.replay.attention import DeterministicAttention
from scout_core.replay.evidence import SURFACES, EvidenceBatch, Signed
from scout_core.replay.execute import Execution, Received, execute
from scout_core.replay.guard import attempt
from scout_core.replay.isolation import (
    deterministic_kernels,
    preserved_state,
    seed_everything,
    strict_determinism_possible,
)
from scout_core.replay.recorder import Prepared
from scout_core.replay.schedule import Recipe

Tensors = Sequence[torch.Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Material:
    """Tensors behind each surface of one execution, with names, and where their signatures are."""

    tensors: Mapping[str, Tensors]
    names: Mapping[str, Sequence[str]]
    signed: Mapping[str, Signed]


class Workbench:
    """Runs recipes on what was prepared and received. Local to the rank, unless a module communicates itself.

    `lenient` collects recipes with an operation that has no deterministic kernel; it outlives a single check.
    """

    def __init__(
        self,
        adapter: FrameworkAdapter,
        prepared: Prepared,
        received: Mapping[str, Received],
        modules: Mapping[str, tuple[str, nn.Module]],
        *,
        seed: int,
        deterministic: bool,
        lenient: set[str],
    ) -> None:
        self._adapter = adapter
        self._prepared = prepared
        self._received = received
        self._modules = modules
        self._seed = seed
        self._deterministic = deterministic
        self._lenient = lenient
        self._strict = strict_determinism_possible()

    def observe(self, batch: EvidenceBatch, recipe: Recipe, *, compute: bool) -> Material | None:
        """Queue the evidence of one execution of `recipe`; None if it raised, which the evidence then says.

        Without `compute` only what stands before the execution is compared: the recipe is known not to repeat itself.
        """
        run = {"optimizer": self._optimizer, "state": self._state}.get(recipe.recipe_class, self._module)
        outcome = attempt(f"replaying {recipe.recipe_id}", lambda: run(batch, recipe, compute))
        if outcome.failure is not None:
            batch.add([0] * len(SURFACES[recipe.recipe_class]), failed=True)
        return outcome.value

    def _module(self, batch: EvidenceBatch, recipe: Recipe, compute: bool) -> Material:
        name, module = self._modules[recipe.recipe_id]
        invocation, received = self._prepared.invocations[recipe.recipe_id], self._received[recipe.recipe_id]
        with self._adapter.materialize(module), preserved_state():
            constant = [(n, b) for n, b in module.named_buffers() if n not in received.buffers]
            parameters = list(module.named_parameters())
            state = [tensor.detach() for _, tensor in (*parameters, *constant)]
            with self._kernels(recipe):
                random_state, done = self._execute(recipe, module, received) if compute else ([], None)
        tensors: dict[str, Tensors] = {
            "invocation": received.tensors(),
            "rng": random_state,
            "parameter_state": state,
            "output": done.outputs if done else [],
            "input_gradient": done.input_gradients if done else [],
            "parameter_gradient": done.parameter_gradients if done else [],
        }
        trainable = [f"{name}.{n}" for n, p in parameters if p.requires_grad]
        names = {
            "parameter_state": [f"{name}.{n}" for n, _ in (*parameters, *constant)],
            "parameter_gradient": trainable,
        }
        signed = batch.add(
            list(tensors.values()),
            elapsed=done.stopwatch.read if done else None,
            local=invocation.finite,
            replayed=[*done.outputs, *done.input_gradients] if done else [],
            nondeterministic_op=recipe.recipe_id in self._lenient and self._strict,
        )
        return _material(recipe, tensors, names, signed)

    def _execute(self, recipe: Recipe, module: nn.Module, received: Received) -> tuple[list[torch.Tensor], Execution]:
        """Run under strict determinism; without a deterministic kernel the recipe becomes lenient for good."""
        invocation = self._prepared.invocations[recipe.recipe_id]
        seed = structure_signature((self._seed, recipe.recipe_id))
        try:
            random_state = seed_everything(seed)
            return random_state, execute(module, invocation, received, seed=seed)
        except RuntimeError as error:
            if "deterministic" not in str(error) or recipe.recipe_id in self._lenient:
                raise
        self._lenient.add(recipe.recipe_id)
        with self._kernels(recipe):
            random_state = seed_everything(seed)
            return random_state, execute(module, invocation, received, seed=seed)

    def _optimizer(self, batch: EvidenceBatch, recipe: Recipe, compute: bool) -> Material:
        captured = self._prepared.slice
        assert captured is not None, "readiness only lets an optimizer recipe run with a captured slice"
        with preserved_state(), self._kernels(recipe):
            updated = self._adapter.apply_optimizer_slice(captured) if compute else []
        states = [
            (f"{part.name}.{key}", value)
            for part in captured.parts
            for key, value in part.state.items()
            if isinstance(value, torch.Tensor)
        ]
        states += [
            (f"group{index}.{key}", value)
            for index, group in enumerate(captured.hyperparameters)
            for key, value in group.items()
            if isinstance(value, torch.Tensor)
        ]
        gradients = [part.gradient for part in captured.parts]
        tensors: dict[str, Tensors] = {
            "gradient": gradients,
            "parameter_state": [part.parameter for part in captured.parts],
            "optimizer_state": [value for _, value in states],
            "updated_state": updated,
        }
        parameters = [part.name for part in captured.parts]
        names = {
            "gradient": parameters,
            "parameter_state": parameters,
            "optimizer_state": [name for name, _ in states],
            "updated_state": [*parameters, *(name for name, _ in states)],
        }
        plain_state = [
            {key: value for key, value in part.state.items() if not isinstance(value, torch.Tensor)}
            for part in captured.parts
        ]
        hyper = structure_signature((list(captured.hyperparameters), plain_state))
        words = [tensors[key] if key in tensors else _signed_word(hyper) for key in SURFACES["optimizer"]]
        signed = batch.add(words, replayed=updated, state=gradients)
        return _material(recipe, tensors, names, signed)

    def _state(self, batch: EvidenceBatch, recipe: Recipe, compute: bool) -> Material:
        pieces = self._prepared.state
        tensors = {surface: [t.detach() for kind, _, t in pieces if kind == surface] for surface in SURFACES["state"]}
        names = {surface: [name for kind, name, _ in pieces if kind == surface] for surface in SURFACES["state"]}
        everything = [t for _, _, t in pieces]
        signed = batch.add([tensors[surface] for surface in SURFACES["state"]], state=everything)
        return _material(recipe, tensors, names, signed)

    @contextmanager
    def _kernels(self, recipe: Recipe) -> Iterator[None]:
        strict = self._strict and recipe.recipe_id not in self._lenient
        attention = DeterministicAttention() if self._deterministic and not strict else nullcontext()
        with deterministic_kernels(enabled=self._deterministic, strict=strict), attention:
            yield


def _material(
    recipe: Recipe,
    tensors: Mapping[str, Tensors],
    names: Mapping[str, Sequence[str]],
    signed: Sequence[Signed | int],
) -> Material:
    places = {
        surface: place
        for surface, place in zip(SURFACES[recipe.recipe_class], signed, strict=True)
        if isinstance(place, Signed)
    }
    complete = {
        surface: names.get(surface) or [f"{recipe.recipe_id}.{surface}[{i}]" for i in range(len(tensors[surface]))]
        for surface in tensors
    }
    return Material(tensors=tensors, names=complete, signed=places)


def _signed_word(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
