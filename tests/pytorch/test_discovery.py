"""Which modules are taken for embedding, layers and head, and what is said when one cannot be found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from scout_core import ConfigError
from scout_core.adapter import Surfaces
from scout_core.pytorch.discovery import ModuleNames, find_surfaces, unwrap


class Layer(nn.Module):
    """Four experts inside a layer, which are more than there are layers."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.bias_table = nn.Embedding(64, 4)


class Model(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.positions = nn.Embedding(8, 4)
        self.words = nn.Embedding(32, 4)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.router = nn.Linear(4, 2)
        self.head = nn.Linear(4, 32)


def find(model: nn.Module, **names: str) -> Surfaces:
    return find_surfaces(model, ModuleNames(**names))


def test_a_language_models_parts_are_found_by_structure() -> None:
    model = Model()
    found = find(model)
    assert found.embedding == ("words", model.words) and found.output == ("head", model.head)
    assert found.hidden == {i: (f"decoder.layers.{i}", layer) for i, layer in enumerate(model.decoder.layers)}
    assert found.notes == () and not found.compiled and found.root is found.plain_root is model


def test_experts_of_a_layer_are_not_layers() -> None:
    assert [name for name, _ in find(Model(layers=2)).hidden.values()] == ["decoder.layers.0", "decoder.layers.1"]


def test_the_longest_of_several_stacks_is_taken() -> None:
    model = Model(2)
    model.tower = Model(5).decoder
    assert find(model).hidden[4][0] == "tower.layers.4"


@pytest.mark.parametrize("container", [nn.Sequential, lambda *m: nn.ModuleDict({f"l{i}": x for i, x in enumerate(m)})])
def test_other_containers_of_layers_count_too(container: Callable[..., nn.Module]) -> None:
    found = find(nn.ModuleDict({"stack": container(Layer(), Layer(), Layer())}))
    assert len(found.hidden) == 3 and all(name.startswith("stack.") for name, _ in found.hidden.values())


def test_a_model_that_is_itself_the_stack_has_layers_named_by_number() -> None:
    assert [name for name, _ in find(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))).hidden.values()] == ["0", "1"]


def test_activations_in_a_row_and_different_modules_are_no_layers() -> None:
    model = nn.ModuleDict({"a": nn.Sequential(nn.ReLU(), nn.ReLU()), "b": nn.Sequential(nn.Linear(1, 1), nn.ReLU())})
    assert find(model).hidden == {}


@pytest.mark.parametrize("how", ["whole", "layers", "in place"])
def test_compiled_models_are_seen_through_and_called_so(how: str) -> None:
    model = Model()
    root: nn.Module = model
    if how == "whole":
        root = torch.compile(model, backend="eager")
    elif how == "layers":
        model.decoder.layers = nn.ModuleList(torch.compile(x, backend="eager") for x in model.decoder.layers)
    else:
        model.decoder.layers[1].compile(backend="eager")
    found = find(root)
    assert found.compiled and found.root is root and found.plain_root is model is unwrap(root)
    assert len(found.hidden) == 3 and found.output == ("head", model.head)


def test_explicit_names_go_before_structure() -> None:
    model = Model()
    found = find(model, embedding="positions", hidden="decoder.layers.0.experts", output="router")
    assert found.embedding == ("positions", model.positions) and found.output == ("router", model.router)
    assert found.hidden[3] == ("decoder.layers.0.experts.3", model.decoder.layers[0].experts[3])


@pytest.mark.parametrize(
    ("key", "option"), [("embedding", "embedding_module"), ("hidden", "hidden_modules"), ("output", "output_module")]
)
def test_a_name_that_does_not_exist_is_an_error_that_lists_what_does(key: str, option: str) -> None:
    with pytest.raises(ConfigError, match=rf"{option}='lm_head': the model has no such module.*words.*head"):
        find(Model(), **{key: "lm_head"})


def test_what_cannot_be_found_is_noted_with_what_to_set() -> None:
    notes = find(nn.ModuleDict({"conv": nn.Conv1d(1, 1, 1)})).notes
    assert [
        option for note in notes for option in ("hidden_modules", "embedding_module", "output_module") if option in note
    ] == [
        "hidden_modules",
        "embedding_module",
        "output_module",
    ]
