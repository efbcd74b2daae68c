"""Finding the embedding, the repeated layers and the output head of a model by its structure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scout_core.adapter import Surfaces
from scout_core.config import ConfigError
from scout_core.replay.isolation import is_compiled

_MIN_REPEATS = 2


@dataclass(frozen=True, kw_only=True)
class ModuleNames:
    """Explicit names, from the configuration; None asks for the structure."""

    embedding: str | None = None
    hidden: str | None = None
    output: str | None = None


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module inside DDP and `torch.compile` wrappers, in any order of nesting."""
    while True:
        inner = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def find_surfaces(model: nn.Module, names: ModuleNames) -> Surfaces:
    """The surfaces of `model`.

    The layers are the longest container of modules of one class that is not inside another such container (so the
    experts of one layer are not taken for layers). The embedding is the one with the most rows outside the layers; the
    output head is the last linear module after the layers, outside them. Raises `ConfigError` for an explicit name
    that does not exist.
    """
    plain = unwrap(model)
    notes: list[str] = []
    container = _named(plain, names.hidden, "hidden_modules") or _longest_container(plain)
    hidden: dict[int, tuple[str, nn.Module]] = {}
    if container is None:
        notes.append("no repeated layers found; set hidden_modules to the dotted name of their container")
    else:
        prefix = f"{container[0]}." if container[0] else ""
        children = list(container[1].named_children())
        numbered = all(key.isdecimal() for key, _ in children)  # a pipeline stage keeps the numbers its layers had
        hidden = {int(key) if numbered else i: (f"{prefix}{key}", child) for i, (key, child) in enumerate(children)}
    inside = {id(part) for _, layer in hidden.values() for part in layer.modules()}
    embedding = _named(plain, names.embedding, "embedding_module") or _largest_embedding(plain, inside)
    if embedding is None:
        notes.append("no embedding found; set embedding_module to its dotted name")
    output = _named(plain, names.output, "output_module") or _last_linear(plain, inside)
    if output is None:
        notes.append("no output head found; set output_module to its dotted name")
    return Surfaces(
        root=model,
        plain_root=plain,
        embedding=embedding,
        hidden=hidden,
        output=output,
        compiled=is_compiled(model),
        notes=tuple(notes),
    )


def _named(root: nn.Module, name: str | None, key: str) -> tuple[str, nn.Module] | None:
    if name is None:
        return None
    modules = dict(root.named_modules())
    if name not in modules:
        raise ConfigError(
            f"{key}={name!r}: the model has no such module; its top level is {', '.join(dict(root.named_children()))}"
        )
    return name, modules[name]


def _containers(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Containers of repeated layers, outermost only."""
    children = list(module.children())
    repeated = (
        isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))
        and len(children) >= _MIN_REPEATS
        and len({type(unwrap(child)) for child in children}) == 1
        and all(any(True for _ in child.parameters()) for child in children)
    )
    if repeated:
        yield name, module
        return
    for key, child in module.named_children():
        yield from _containers(child, f"{name}.{key}" if name else key)


def _longest_container(root: nn.Module) -> tuple[str, nn.Module] | None:
    return max(_containers(root), key=lambda found: len(list(found[1].children())), default=None)


def _largest_embedding(root: nn.Module, inside: set[int]) -> tuple[str, nn.Module] | None:
    found = [(n, m) for n, m in root.named_modules() if isinstance(m, nn.Embedding) and id(m) not in inside]
    return max(found, key=lambda item: item[1].num_embeddings, default=None)


def _last_linear(root: nn.Module, inside: set[int]) -> tuple[str, nn.Module] | None:
    found = [(n, m) for n, m in root.named_modules() if isinstance(m, nn.Linear) and id(m) not in inside]
    return found[-1] if found else None
