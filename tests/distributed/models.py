"""Tiny models and the ways people train them: one `Case` per configuration that SCOUT must leave no trace in.

A case trains a language model of three blocks on random tokens. What varies is the shape of what blocks take and
return, what they do inside, how the model is wrapped, and how a step is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from scout_core.replay.trees import map_tensors

WIDTH, WORDS, LENGTH, BATCH, LAYERS = 16, 32, 6, 3, 3


class Mixed(NamedTuple):
    """A named tuple that travels from block to block."""

    x: torch.Tensor
    extra: tuple[torch.Tensor, ...]


@dataclass
class Stream:
    """A dataclass that travels from block to block."""

    x: torch.Tensor
    mask: torch.Tensor
    label: str = "stream"


class Block(nn.Module):
    """A residual block with attention, dropout and a parameter of its own; `forward` is `body` for variants to wrap."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.drop = nn.Dropout(dropout)

    def body(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.drop(F.gelu(self.mix(attended))) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class KeywordBlock(Block):
    def forward(self, *, x: torch.Tensor, gain: float, mask: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
        return self.body(x) * gain if mask is None else self.body(x) * mask


class TupleBlock(Block):
    def forward(self, pair: tuple[torch.Tensor, list[Any]]) -> tuple[torch.Tensor, list[Any]]:  # type: ignore[override]
        x, (penalty, note) = pair
        out = self.body(x)
        return out, [penalty + out.square().mean(), note]


class NamedTupleBlock(Block):
    def forward(self, mixed: Mixed) -> Mixed:  # type: ignore[override]
        return Mixed(x=self.body(mixed.x), extra=(*mixed.extra[1:], mixed.extra[0]))


class DictBlock(Block):
    def forward(self, state: dict[str, Any]) -> dict[str, Any]:  # type: ignore[override]
        return {"x": self.body(state["x"]), "nested": {"deep": [state["nested"]["deep"][0] * 0.5]}}


class DataclassBlock(Block):
    def forward(self, stream: Stream) -> Stream:  # type: ignore[override]
        return replace(stream, x=self.body(stream.x) * stream.mask)


class CheckpointInsideBlock(Block):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


class BatchNormBlock(Block):
    """Running statistics changed in forward, one pair in place and one by putting a new tensor in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("level", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.level = 0.9 * self.level + 0.1 * x.detach().mean((0, 1))
        return self.batch_norm(self.body(x).transpose(1, 2)).transpose(1, 2) - 0.01 * self.level


class InplaceBlock(Block):
    """Overwrites its own input, and what it returns is overwritten by the next."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu_(x.clone()) if x.is_leaf else F.relu_(x)
        return self.body(x).add_(0.01)


class ParametrizedBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.mix)
        parametrizations.spectral_norm(self.qkv)


class OldWeightNormBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        torch.nn.utils.weight_norm(self.mix)
        torch.nn.utils.spectral_norm(self.qkv)


class AttributesBlock(Block):
    """Keeps state where SCOUT cannot know of it: counters, lists, plain tensors, generators of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.history: list[int] = []
        self.cache: dict[str, torch.Tensor] = {}
        self.average = torch.zeros(WIDTH)
        self.generator = torch.Generator().manual_seed(7)
        self.numpy_generator = np.random.default_rng(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.history.append(self.calls)
        self.cache["last"] = x.detach().mean()
        self.average.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        noise = torch.rand(WIDTH, generator=self.generator) + float(self.numpy_generator.random())
        return self.body(x) + 0.01 * noise + 1e-3 * self.calls


class BorrowingBlock(Block):
    """Uses a parameter that belongs to another module, which no list of its own parameters shows."""

    def __init__(self) -> None:
        super().__init__()
        self.lender: list[nn.Module] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.lender[0].weight[0]


class LanguageModel(nn.Module):
    """Embedding, blocks, norm, head. `carry` is the shape in which the stream goes from block to block."""

    def __init__(
        self,
        block: Callable[[], nn.Module] = Block,
        *,
        carry: str = "plain",
        around: str = "",
        calls: int = 1,
        tied: bool = False,
        sparse: bool = False,
        frozen: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.position = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.temperature = nn.Parameter(torch.ones(()))
        self.carry, self.around, self.calls = carry, around, calls
        if tied:
            self.head.weight = self.embedding.weight
        for part in self.modules():
            if isinstance(part, BorrowingBlock):
                part.lender.append(self.norm)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen or ("\0",)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids) + self.position[: ids.shape[1]]
        penalty = x.new_zeros(())
        for _ in range(self.calls):
            for block in self.blocks:
                x, penalty = self._step(block, x, penalty)
        return self.head(self.norm(x)) * self.temperature + 0.01 * penalty

    def _step(self, block: nn.Module, x: torch.Tensor, penalty: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.around:
            x = checkpoint(block, x, use_reentrant=self.around == "reentrant")
        elif self.carry == "keyword":
            x = block(x=x, gain=0.9, mask=torch.ones_like(x[:, :1]))
        elif self.carry == "tuple":
            x, (penalty, _) = block((x, [penalty, "note"]))
        elif self.carry == "namedtuple":
            x = block(Mixed(x=x, extra=(penalty, x.detach()))).x
        elif self.carry == "dict":
            x = block({"x": x, "nested": {"deep": [penalty + x.mean()]}})["x"]
        elif self.carry == "dataclass":
            x = block(Stream(x=x, mask=torch.ones_like(x))).x
        else:
            x = block(x)
        return x, penalty


class SignDescent(torch.optim.Optimizer):
    """An optimizer of the user's own: settings on the object, a plain list, state that is no tensor."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})
        self.decay = 0.99
        self.norms: list[float] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                self.norms.append(float(p.grad.norm()))
                p.mul_(self.decay).sub_(p.grad.sign(), alpha=group["lr"])


class StubbornOptimizer(SignDescent):
    """Refuses to run on anything but the parameters it was made for."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr)
        self.known = frozenset(id(p) for group in self.param_groups for p in group["params"])

    def step(self, closure: Any = None) -> None:
        if any(id(p) not in self.known for group in self.param_groups for p in group["params"]):
            raise ValueError("these are not my parameters")
        super().step(closure)


def ddp(model: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(model, **options)


def compiled(model: nn.Module, *, how: str, backend: str = "eager") -> nn.Module:
    """`torch.compile` as people apply it: `inside` DDP, `outside`, `blocks`, or `in_place` on every block."""
    make = functools.partial(torch.compile, backend=backend)
    if how == "inside":
        return ddp(make(model))
    if how == "outside":
        return make(ddp(model))
    assert isinstance(model, LanguageModel)
    for index, block in enumerate(model.blocks):
        if how == "blocks":
            model.blocks[index] = make(block)
        else:
            block.compile(backend=backend)
    return ddp(model)


def replicated_by_hand(model: nn.Module, *, in_place: bool = False) -> nn.Module:
    """No DDP: the loop averages gradients itself. With `in_place` the whole model is compiled by `model.compile()`."""
    if in_place:
        model.compile(backend="eager")
    return model


def wrapped_blocks(impl: CheckpointImpl) -> nn.Module:
    model = LanguageModel()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block, checkpoint_impl=impl)
    return model


Make = functools.partial
_ADAMW = Make(torch.optim.AdamW, lr=1e-2)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One configuration. `reason` is part of what every check says when this configuration cannot be checked whole;
    `whole_off_schedule` if `check_now` can all the same."""

    model: Callable[[], nn.Module] = LanguageModel
    wrap: Callable[[nn.Module], nn.Module] = ddp
    optimizer: Callable[[Any], torch.optim.Optimizer] = _ADAMW
    autocast: bool = False
    accumulate: int = 1
    no_sync: bool = False
    scaler: bool = False
    overflow_at: tuple[int, ...] = ()
    schedule: bool = False
    clip: bool = False
    set_to_none: bool = True
    evaluate: bool = False
    closure: bool = False
    reason: str | None = None
    whole_off_schedule: bool = False
    options: dict[str, Any] = field(default_factory=dict)


class Job:
    """A case being trained on this rank. Both runs of a comparison start from equal seeds."""

    def __init__(self, case: Case) -> None:
        self.case = case
        rank = dist.get_rank()
        torch.manual_seed(0)
        self.model = case.model()
        self.wrapped = case.wrap(self.model)
        self.optimizer = case.optimizer(self.wrapped.parameters())
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4) if case.scaler else None
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50) if case.schedule else None
        self.data = torch.Generator().manual_seed(rank)
        self.attempts = 0
        torch.manual_seed(100 + rank)
        np.random.seed(100 + rank)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        case, self.attempts = self.case, self.attempts + 1
        batches = [torch.randint(0, WORDS, (BATCH, LENGTH + 1), generator=self.data) for _ in range(case.accumulate)]
        if case.closure:
            self.optimizer.step(lambda: self._forward_backward(batches))
        else:
            self._forward_backward(batches)
            if self.scaler is not None and case.clip:
                self.scaler.unscale_(self.optimizer)
            if case.clip:
                nn.utils.clip_grad_norm_(self.wrapped.parameters(), 0.5)
            if self.scaler is not None:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        self.optimizer.zero_grad(set_to_none=case.set_to_none)
        if case.evaluate:
            self._evaluate(batches[0])

    def _forward_backward(self, batches: list[torch.Tensor]) -> torch.Tensor:
        if self.case.closure:
            self.optimizer.zero_grad()
        total = torch.zeros(())
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            quiet = self.case.no_sync and not last
            with self.wrapped.no_sync() if quiet else nullcontext():  # type: ignore[operator]
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.case.autocast):
                    logits = self.wrapped(batch[:, :-1])
                    loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()) / len(batches)
                if last and self.attempts in self.case.overflow_at:
                    loss = loss * float("inf")
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total = total + loss.detach()
        if not any(isinstance(part, DistributedDataParallel) for part in self.wrapped.modules()):
            for p in self.wrapped.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
        return total

    def _evaluate(self, batch: torch.Tensor) -> None:
        self.wrapped.eval()
        with torch.no_grad():
            self.wrapped(batch[:2, :-1])
        self.wrapped.train()

    @property
    def plain(self) -> nn.Module:
        return self.model


CASES: dict[str, Case] = {
    # what goes in and comes out
    "plain": Case(),
    "keyword": Case(model=Make(LanguageModel, KeywordBlock, carry="keyword")),
    "tuple": Case(model=Make(LanguageModel, TupleBlock, carry="tuple")),
    "namedtuple": Case(model=Make(LanguageModel, NamedTupleBlock, carry="namedtuple")),
    "dict": Case(model=Make(LanguageModel, DictBlock, carry="dict")),
    "dataclass": Case(model=Make(LanguageModel, DataclassBlock, carry="dataclass")),
    # how the forward runs
    "autocast": Case(autocast=True),
    "autocast_checkpoint": Case(model=Make(LanguageModel, around="non-reentrant"), autocast=True),
    "checkpoint_around": Case(model=Make(LanguageModel, around="non-reentrant")),
    "checkpoint_around_reentrant": Case(model=Make(LanguageModel, around="reentrant")),
    "checkpoint_inside": Case(model=Make(LanguageModel, Make(CheckpointInsideBlock, reentrant=False))),
    "checkpoint_inside_reentrant": Case(model=Make(LanguageModel, Make(CheckpointInsideBlock, reentrant=True))),
    "checkpoint_wrapper": Case(model=Make(wrapped_blocks, CheckpointImpl.NO_REENTRANT)),
    "checkpoint_wrapper_reentrant": Case(model=Make(wrapped_blocks, CheckpointImpl.REENTRANT)),
    "twice": Case(model=Make(LanguageModel, calls=2)),
    "tied": Case(model=Make(LanguageModel, tied=True)),
    "frozen": Case(model=Make(LanguageModel, frozen=("embedding", "position", "blocks.0", "blocks.1.mix"))),
    "frozen_all_but_head": Case(model=Make(LanguageModel, frozen=("embedding", "position", "blocks", "norm"))),
    # what modules do inside
    "batch_norm": Case(model=Make(LanguageModel, BatchNormBlock)),
    "inplace": Case(model=Make(LanguageModel, InplaceBlock)),
    "parametrized": Case(model=Make(LanguageModel, ParametrizedBlock)),
    "old_weight_norm": Case(model=Make(LanguageModel, OldWeightNormBlock)),
    "attributes": Case(model=Make(LanguageModel, AttributesBlock)),
    "borrowing": Case(model=Make(LanguageModel, BorrowingBlock)),
    # how a step is made
    "accumulate": Case(accumulate=3),
    "accumulate_no_sync": Case(accumulate=3, no_sync=True),
    "scaler": Case(scaler=True, overflow_at=(3, 8), clip=True),
    "scaler_fused": Case(scaler=True, overflow_at=(3, 8), optimizer=Make(torch.optim.AdamW, lr=1e-2, fused=True)),
    "schedule_clip": Case(schedule=True, clip=True, set_to_none=False),
    "evaluate": Case(evaluate=True),
    "bucket_views": Case(wrap=Make(ddp, gradient_as_bucket_view=True, static_graph=True), set_to_none=False),
    "by_hand": Case(wrap=replicated_by_hand),
    # optimizers
    "sgd": Case(optimizer=Make(torch.optim.SGD, lr=0.1, foreach=True)),
    "sgd_momentum": Case(optimizer=Make(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=False)),
    "sgd_fused": Case(optimizer=Make(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True)),
    "adam_foreach": Case(optimizer=Make(torch.optim.Adam, lr=1e-2, foreach=True, amsgrad=True)),
    "adam_loop": Case(optimizer=Make(torch.optim.Adam, lr=1e-2, foreach=False)),
    "adamw_fused": Case(optimizer=Make(torch.optim.AdamW, lr=1e-2, fused=True)),
    "adam_tensor_lr": Case(optimizer=Make(torch.optim.Adam, lr=torch.tensor(1e-2), foreach=False)),
    "rmsprop": Case(optimizer=Make(torch.optim.RMSprop, lr=1e-3, momentum=0.5, centered=True)),
    "adagrad": Case(optimizer=Make(torch.optim.Adagrad, lr=1e-2)),
    "adafactor": Case(optimizer=Make(torch.optim.Adafactor, lr=1e-2)),
    "sign_descent": Case(optimizer=SignDescent),
    "small_slice": Case(options={"optimizer_slice_elements": 37}),
    # what cannot be checked whole, and says so
    "closure": Case(closure=True, reason="optimizer: every rank cannot replay it", whole_off_schedule=True),
    "lbfgs": Case(
        optimizer=Make(torch.optim.LBFGS, lr=0.1, max_iter=2),
        closure=True,
        reason="optimizer: every rank cannot replay it",
    ),
    "sparse": Case(
        model=Make(LanguageModel, sparse=True),
        optimizer=Make(torch.optim.SGD, lr=0.1),
        reason="optimizer: every rank cannot replay it",
        whole_off_schedule=True,  # with dense gradients of its own making
    ),
    "stubborn": Case(optimizer=StubbornOptimizer, reason="optimizer: the replay raised on ranks 0, 1, 2, 3"),
}

COMPILED: dict[str, Case] = {
    "compile_inside": Case(wrap=Make(compiled, how="inside")),
    "compile_outside": Case(wrap=Make(compiled, how="outside")),
    "compile_blocks": Case(wrap=Make(compiled, how="blocks", backend="aot_eager")),
    "compile_blocks_in_place": Case(wrap=Make(compiled, how="in_place")),
    "compile_model_in_place": Case(wrap=Make(replicated_by_hand, in_place=True)),
}

INDUCTOR: dict[str, Case] = {
    "inductor_inside": Case(wrap=Make(compiled, how="inside", backend="inductor")),
    "inductor_blocks": Case(wrap=Make(compiled, how="blocks", backend="inductor")),
}

ALL_CASES = CASES | COMPILED | INDUCTOR


def innermost(module: nn.Module) -> nn.Module:
    """The user's block inside compile and checkpoint wrappers."""
    for name in ("_orig_mod", "_checkpoint_wrapped_module"):
        inner = getattr(module, name, None)
        if isinstance(inner, nn.Module):
            return innermost(inner)
    return module


def break_block(job: Job, layer: int) -> None:
    """From now on one element of the block's first output tensor is wrong by 1e-3, on the calling rank."""
    block = innermost(job.model.blocks[layer])  # type: ignore[index]
    healthy = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        bent: list[bool] = []

        def bend(tensor: torch.Tensor) -> torch.Tensor:
            if bent:
                return tensor
            bent.append(True)
            offset = torch.zeros_like(tensor)
            offset[(*[0] * (tensor.dim() - 1), 1)] = 1e-3 if tensor.dtype is not torch.bfloat16 else 1.0
            return tensor + offset

        return map_tensors(bend, healthy(*args, **kwargs))

    block.forward = forward  # type: ignore[method-assign]
