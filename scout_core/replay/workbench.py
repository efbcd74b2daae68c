"""Executing the recipes of one check on this rank and turning what comes out into evidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from scout_core.adapter import FrameworkAdapter
from scout_core.consensus.signature import signatures
from scout_core.consensus.structure import structure_signature
from scout_core.replay.attention import DeterministicAttention
from scout_core.replay.collective_tap import CollectiveTap
from scout_core.replay.evidence import (
    COLLECTIVE_INPUT,
    SHARED_STATE,
    SURFACES,
    Collectives,
    EvidenceBatch,
    Presigned,
    Signed,
    surfaces_of,
)
from scout_core.replay.execute import Execution, Received, execute
from scout_core.replay.guard import attempt
from scout_core.replay.isolation import (
    Elapsed,
    Stopwatch,
    deterministic_kernels,
    preserved_state,
    seed_everything,
    strict_determinism_possible,
)
from scout_core.replay.local_tensors import local_part
from scout_core.replay.lockstep import Lockstep
from scout_core.replay.recorder import Prepared
from scout_core.replay.reference import ModuleSubject, SliceSubject, Subject
from scout_core.replay.schedule import MODULE_CLASSES, Recipe

Tensors = Sequence[torch.Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Material:
    """Tensors behind each surface of one execution, with names, and where their signatures are.

    `listing` is a word over what the shared state consists of.
    """

    tensors: Mapping[str, Tensors]
    names: Mapping[str, Sequence[str]]
    signed: Mapping[str, Signed]
    listing: int = 0


@dataclass(frozen=True, kw_only=True)
class _Ran:
    """What a module's replay left: signatures of gathered parameters and buffers where these are what is compared, the
    random state it began with, its results."""

    whole: Presigned | None
    random_state: list[torch.Tensor] = field(default_factory=list)
    done: Execution | None = None


class Workbench:
    """Runs recipes on what was prepared and received. Local to the rank, unless a module communicates itself.

    `sizes` has, by recipe class, a word over the sizes of the invocations that this rank and its partners replay.
    `lenient` collects recipes with an operation that has no deterministic kernel; it outlives a single check. `owned`:
    parameter state is compared as each rank holds it, and not as gathered for the replay.
    """

    def __init__(
        self,
        adapter: FrameworkAdapter,
        prepared: Prepared,
        received: Mapping[str, Received],
        modules: Mapping[str, tuple[str, nn.Module]],
        *,
        seed: int,
        sizes: Mapping[str, int],
        deterministic: bool,
        lenient: set[str],
        lockstep: Lockstep,
        owned: bool,
    ) -> None:
        self._adapter = adapter
        self._prepared = prepared
        self._received = received
        self._modules = modules
        self._seed = seed
        self._sizes = sizes
        self._deterministic = deterministic
        self._lenient = lenient
        self._lockstep = lockstep
        self._owned = owned
        self.taps: dict[str, CollectiveTap] = {}
        self._strict = strict_determinism_possible()

    def observe(self, batch: EvidenceBatch, recipe: Recipe, *, compute: bool) -> Material | None:
        """Queue the evidence of one execution of `recipe`; None if it raised, which the evidence then says.

        Without `compute` only what stands before the execution is compared: the recipe is known not to repeat itself.
        """
        run = {
            "optimizer": self._optimizer,
            "owner_update": self._optimizer,
            "state": self._state,
            "at_rest": self._at_rest,
        }.get(recipe.recipe_class, self._module)
        outcome = attempt(f"replaying {recipe.recipe_id}", lambda: run(batch, recipe, compute))
        if outcome.failure is not None:
            batch.add([0] * len(self._surfaces(recipe)), failed=True)
        return outcome.value

    def _module(self, batch: EvidenceBatch, recipe: Recipe, compute: bool) -> Material:
        name, module = self._modules[recipe.recipe_id]
        invocation, received = self._prepared.invocations[recipe.recipe_id], self._received[recipe.recipe_id]
        constant = [(n, b) for n, b in module.named_buffers() if n not in received.buffers]
        parameters = list(module.named_parameters())
        owned = [local_part(tensor) for _, tensor in (*parameters, *constant)]
        ran, tap = self._together(recipe, module, received, constant, compute)
        done = ran.done
        tensors: dict[str, Tensors] = {
            "invocation": received.tensors(),
            "rng": ran.random_state,
            "parameter_state": owned if ran.whole is None else [None] * len(owned),
            "output": done.outputs if done else [],
            "input_gradient": done.input_gradients if done else [],
            "parameter_gradient": done.parameter_gradients if done else [],
        }
        names: dict[str, Sequence[str]] = {
            "parameter_state": [f"{name}.{n}" for n, _ in (*parameters, *constant)],
            "parameter_gradient": [f"{name}.{n}" for n, p in parameters if p.requires_grad],
        }
        surfaces: list[Tensors | Presigned | Collectives] = list(tensors.values())
        if ran.whole is not None:
            surfaces[list(tensors).index("parameter_state")] = ran.whole
        if self._lockstep.partners.size > 1:
            inputs = tap.collectives() if tap is not None else Collectives()
            surfaces.insert(list(tensors).index("output"), inputs)
            tensors[COLLECTIVE_INPUT] = [None] * len(inputs.labels)
            names[COLLECTIVE_INPUT] = [f"{recipe.recipe_id}.{label}" for label in inputs.labels]
        elapsed = None
        if done:
            elapsed = partial(_less_collectives, done.stopwatch, tap) if tap else done.stopwatch.read
        signed = batch.add(
            surfaces,
            elapsed=elapsed,
            local=invocation.finite,
            replayed=[*done.outputs, *done.input_gradients] if done else [],
            nondeterministic_op=recipe.recipe_id in self._lenient and self._strict,
        )
        return self._material(recipe, tensors, names, signed)

    def _together(
        self,
        recipe: Recipe,
        module: nn.Module,
        received: Received,
        constant: Sequence[tuple[str, torch.Tensor]],
        compute: bool,
    ) -> tuple[_Ran, CollectiveTap | None]:
        """Gather the parameters and run the module, with its collectives watched if it may have any."""

        def work(tap: CollectiveTap | None) -> _Ran:
            with self._adapter.materialize(module), preserved_state():
                whole = self._gathered_state(module, constant)
                if tap is not None:
                    tap.begin()
                if not compute:
                    return _Ran(whole=whole)
                with self._kernels(recipe):
                    random_state, done = self._execute(recipe, module, received, tap)
                    return _Ran(whole=whole, random_state=random_state, done=done)

        if self._lockstep.alone:
            return work(None), None
        # not this rank's own sizes: partners may have others, and would not know the sequence when this rank does
        sizes = structure_signature((self._sizes[recipe.recipe_class], compute))
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        ran, tap = self._lockstep.run((recipe.recipe_id, sizes), device, signatures, work)
        self.taps[recipe.recipe_id] = tap
        return ran, tap

    def _gathered_state(self, module: nn.Module, constant: Sequence[tuple[str, torch.Tensor]]) -> Presigned | None:
        """Signatures of parameters that are whole only for the moment."""
        if self._owned:
            return None
        whole = [local_part(tensor) for tensor in (*module.parameters(), *(buffer for _, buffer in constant))]
        return Presigned(vector=signatures(whole))

    def _execute(
        self, recipe: Recipe, module: nn.Module, received: Received, tap: CollectiveTap | None
    ) -> tuple[list[torch.Tensor], Execution]:
        """Run under strict determinism; without a deterministic kernel the recipe becomes lenient for good."""
        invocation = self._prepared.invocations[recipe.recipe_id]
        seed = structure_signature((self._seed, recipe.recipe_id))
        end_forward = tap.end_forward if tap is not None else lambda: None
        try:
            random_state = seed_everything(seed)
            return random_state, execute(module, invocation, received, seed=seed, end_forward=end_forward)
        except RuntimeError as error:
            if "deterministic" not in str(error) or recipe.recipe_id in self._lenient:
                raise
        self._lenient.add(recipe.recipe_id)
        if tap is not None:
            tap.begin()
        with self._kernels(recipe):
            random_state = seed_everything(seed)
            return random_state, execute(module, invocation, received, seed=seed, end_forward=end_forward)

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
        if recipe.recipe_class == "owner_update":
            # the owner shows what its live step made of the slice, the others what they make of it now
            live = self._prepared.own_slice
            tensors["owner_update"] = updated if live is None else self._adapter.live_slice(live)
            names["owner_update"] = names["updated_state"]
        plain_state = [
            {key: value for key, value in part.state.items() if not isinstance(value, torch.Tensor)}
            for part in captured.parts
        ]
        hyper = structure_signature((list(captured.hyperparameters), plain_state))
        words = [tensors[key] if key in tensors else _signed_word(hyper) for key in SURFACES[recipe.recipe_class]]
        signed = batch.add(words, replayed=updated, state=gradients)
        return self._material(recipe, tensors, names, signed)

    def _state(self, batch: EvidenceBatch, recipe: Recipe, compute: bool) -> Material:
        pieces = self._prepared.state
        tensors = {surface: [t.detach() for kind, _, t in pieces if kind == surface] for surface in SURFACES["state"]}
        names = {surface: [name for kind, name, _ in pieces if kind == surface] for surface in SURFACES["state"]}
        everything = [t for _, _, t in pieces]
        signed = batch.add([tensors[surface] for surface in SURFACES["state"]], state=everything)
        material = self._material(recipe, tensors, names, signed)
        return self._with_shared(material, batch) if self._lockstep.partners.size > 1 else material

    def _at_rest(self, batch: EvidenceBatch, recipe: Recipe, compute: bool) -> Material:
        rest = self._prepared.rest
        assert rest is not None, "readiness only lets a rank take part that watched"
        signed = batch.add([structure_signature(rest.changed) >> 1 if rest.changed else 0])
        return self._material(recipe, {}, {}, signed)

    def _with_shared(self, material: Material, batch: EvidenceBatch) -> Material:
        """Add what of this window lockstep partners hold alike: the same tensors and signatures, picked out."""
        held = [
            (surface, index, name)
            for surface in SURFACES["state"]
            for index, name in enumerate(material.names[surface])
            if self._adapter.is_shared(name)
        ]
        contract = self._prepared.contracts["state"]
        names = [name for _, _, name in held]
        return replace(
            material,
            tensors={**material.tensors, SHARED_STATE: [material.tensors[surface][i] for surface, i, _ in held]},
            names={**material.names, SHARED_STATE: names},
            signed={
                **material.signed,
                SHARED_STATE: Signed(places=tuple(material.signed[surface].places[i] for surface, i, _ in held)),
            },
            listing=_signed_word(structure_signature((names, contract.identity, contract.shape))),
        )

    @property
    def alone(self) -> bool:
        """Whether no recipe communicates with other ranks while it runs."""
        return self._lockstep.alone

    def subject(self, recipe: Recipe) -> Subject:
        """What a reference for `recipe` starts from. Nothing is copied."""
        if recipe.recipe_class not in MODULE_CLASSES:
            assert self._prepared.slice is not None, "readiness only lets an optimizer recipe run with a captured slice"
            return SliceSubject(captured=self._prepared.slice, apply=self._adapter.apply_optimizer_slice)
        return ModuleSubject(
            module=self._modules[recipe.recipe_id][1],
            invocation=self._prepared.invocations[recipe.recipe_id],
            received=self._received[recipe.recipe_id],
            seed=structure_signature((self._seed, recipe.recipe_id)),
        )

    def collective_timings(self) -> list[dict[str, Any]]:
        """Every collective of the last execution of each recipe: operator, group, bytes put in and this rank's time."""
        return [
            {
                "recipe": recipe,
                "operator": "fsdp_parameter_all_gather" if index < tap.begun else call.operator,
                "ranks": list(call.ranks),
                "bytes": call.size,
                "elapsed_ms": call.elapsed_us() / 1e3,
            }
            for recipe, tap in self.taps.items()
            for index, call in enumerate(tap.calls)
        ]

    def _surfaces(self, recipe: Recipe) -> tuple[str, ...]:
        return surfaces_of(recipe.recipe_class, lockstep=self._lockstep.partners.size > 1)

    def _material(
        self,
        recipe: Recipe,
        tensors: Mapping[str, Tensors],
        names: Mapping[str, Sequence[str]],
        signed: Sequence[Signed | int],
    ) -> Material:
        places = {
            surface: place
            for surface, place in zip(self._surfaces(recipe), signed, strict=True)
            if isinstance(place, Signed)
        }
        complete = {
            surface: names[surface]
            if surface in names
            else [f"{recipe.recipe_id}.{surface}[{i}]" for i in range(len(tensors[surface]))]
            for surface in dict.fromkeys((*tensors, *names))
        }
        return Material(tensors=tensors, names=complete, signed=places)

    @contextmanager
    def _kernels(self, recipe: Recipe) -> Iterator[None]:
        strict = self._strict and recipe.recipe_id not in self._lenient
        attention = DeterministicAttention() if self._deterministic and not strict else nullcontext()
        with deterministic_kernels(enabled=self._deterministic, strict=strict), attention:
            yield


def _less_collectives(stopwatch: Stopwatch, tap: CollectiveTap) -> Elapsed:
    """Time of an execution with that of its collectives set apart."""
    return stopwatch.read().without([watch.read() for call in tap.replayed for watch in call.watches])


def _signed_word(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word
