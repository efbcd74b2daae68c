"""The job of the demo: a byte-level GPT that learns English from the text every Python ships."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 128
LAYERS = 4
HEADS = 4
CONTEXT = 64
BATCH = 4
BYTES = 256
DROPOUT = 0.1


class Block(nn.Module):
    """Causal self-attention and a two-layer network, each on a normalized residual stream `[batch, time, width]`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.network_norm = nn.LayerNorm(WIDTH)
        self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x_btw: torch.Tensor) -> torch.Tensor:
        batch, time, width = x_btw.shape
        joint = self.query_key_value(self.attention_norm(x_btw)).view(batch, time, 3, HEADS, width // HEADS)
        query, key, value = joint.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_btw = x_btw + self.dropout(self.mix(mixed.transpose(1, 2).reshape(batch, time, width)))
        out: torch.Tensor = x_btw + self.dropout(self.network(self.network_norm(x_btw)))
        return out


class GPT(nn.Module):
    """Bytes `[batch, time]` in, logits `[batch, time, 256]` of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTES, bias=False)

    def forward(self, ids_bt: torch.Tensor) -> torch.Tensor:
        x_btw = self.embedding(ids_bt) + self.position[: ids_bt.shape[1]]
        for block in self.blocks:
            x_btw = block(x_btw)
        logits: torch.Tensor = self.head(self.norm(x_btw))
        return logits


def read_text() -> torch.Tensor:
    """The language reference behind Python's `help()`, as bytes: uint8 `[n]`, about 460 kB."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The training state of one rank, copied."""

    model: dict[str, torch.Tensor]
    optimizer: dict[str, Any]


class Job:
    """One rank of the job. Every rank builds one: DDP broadcasts the first rank's weights."""

    def __init__(self, rank: int, device: torch.device, *, repeatable: bool = False) -> None:
        """`repeatable`: keep DDP from laying its buckets out anew after the first step of a process, which would give
        a restarted job other last bits than an uninterrupted one."""
        torch.manual_seed(0)
        self.rank = rank
        self.model = GPT().to(device)
        on_gpu = device.type == "cuda"
        self.ddp = DistributedDataParallel(
            self.model, device_ids=[device.index] if on_gpu else None, find_unused_parameters=repeatable
        )
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-3)
        self._device = device
        self._text = read_text()
        self._draw = torch.Generator()
        self.seed(0)

    @property
    def text_bytes(self) -> int:
        """Bytes of text to learn from."""
        return len(self._text)

    def seed(self, number: int) -> None:
        """Start this rank's own stream of batches and dropout masks."""
        self._draw.manual_seed(1000 * number + self.rank)
        torch.manual_seed(1000 * number + self.rank)

    def step(self, starts: Sequence[int] | None = None) -> float:
        """Train on one batch of this rank's; every rank calls. Returns this rank's loss in nats a byte.

        `starts` are the places in the text where its sequences begin, drawn here if they are not given.
        """
        if starts is None:
            starts = torch.randint(0, len(self._text) - CONTEXT, (BATCH,), generator=self._draw).tolist()
        ids = torch.stack([self._text[start : start + CONTEXT + 1] for start in starts]).long().to(self._device)
        loss = F.cross_entropy(self.ddp(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Input position: where this rank's stream of batches stands."""
        return {"draw": self._draw.get_state()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Put the input position back."""
        self._draw.set_state(state["draw"])

    def snapshot(self) -> Snapshot:
        """Copy this rank's model and optimizer state."""
        return Snapshot(
            model=copy.deepcopy(self.model.state_dict()), optimizer=copy.deepcopy(self.optimizer.state_dict())
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Put this rank's model and optimizer state back, bit for bit."""
        self.model.load_state_dict(snapshot.model)
        self.optimizer.load_state_dict(copy.deepcopy(snapshot.optimizer))
        self.optimizer.zero_grad()
