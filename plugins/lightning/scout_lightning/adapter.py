"""The adapter for Lightning: the plain PyTorch one, with boundaries where Lightning has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from scout_core.adapter import Surfaces
from scout_core.config import ReplayHarnessConfig
from scout_core.pytorch import PyTorchAdapter
from scout_core.pytorch.discovery import unwrap
from scout_core.replay.isolation import is_compiled

_ALL_COMPILED = (
    "the LightningModule itself is compiled, so its layers are not replayed; optimizer updates and live state are "
    "compared; compile the network inside it, as self.net.compile() does, to have layers replayed"
)


class LightningAdapter(PyTorchAdapter):
    """Of one `LightningModule`, as its strategy wrapped it, and its first optimizer, whose steps are the boundaries.

    Automatic optimization hands the whole forward, backward and clipping to the optimizer as a closure. One that torch
    runs once, before anything is updated, is followed here by `before_update`: gradients are final then.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, config: ReplayHarnessConfig, *, first_step: int = 0
    ) -> None:
        super().__init__(model, optimizer, config)
        self._first_step = first_step

    def first_step(self) -> int:
        return self._first_step

    def surfaces(self) -> Surfaces:
        """The network inside the `LightningModule` is the root where it is the only child: its call is one pass.

        The call of a `LightningModule` stands for `training_step` under some strategies and for `forward` otherwise.
        Where `training_step` itself is compiled, hooks on what it calls change its code, or never run: there are none.
        """
        found = super().surfaces()
        if getattr(found.plain_root, "_compiler_ctx", None) is not None:  # Lightning 2.0 to 2.6
            return Surfaces(root=found.root, plain_root=found.plain_root, notes=(_ALL_COMPILED,))
        network = _only_network(found.plain_root)
        if network is None:
            return found
        return replace(found, root=network, plain_root=unwrap(network), compiled=is_compiled(network))

    def on_boundary(self, before_update: Callable[[], None], boundary: Callable[[Callable[[], bool]], None]) -> None:
        once = self._slices.elementwise

        def before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            closures = [value for value in (*args[1:], *kwargs.values()) if callable(value)]
            self._closure = bool(closures) and not once
            if not closures or not once:
                before_update()
                return None

            def followed(closure: Callable[[], Any]) -> Callable[[], Any]:
                def run() -> Any:
                    loss = closure()
                    before_update()
                    return loss

                return run

            swapped = [followed(value) if callable(value) else value for value in args[1:]]
            named = {key: followed(value) if callable(value) else value for key, value in kwargs.items()}
            return (args[0], *swapped), named

        def after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._steps += 1
            found_inf = getattr(optimizer, "found_inf", None)  # set by a gradient scaler on a fused optimizer
            boundary(lambda: found_inf is None or not bool(found_inf.item()))

        self._handles += [
            self._optimizer.register_step_pre_hook(before),
            self._optimizer.register_step_post_hook(after),
        ]


def _only_network(module: nn.Module) -> nn.Module | None:
    """The one child that holds every parameter of `module`; None where parameters lie elsewhere too."""
    own = {id(p) for p in module.parameters()}
    for child in module.children():
        if own and {id(p) for p in child.parameters()} == own and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            return child
    return None
