"""A small GPT under Lightning on several ranks of one machine, watched by SCOUT; resumes from what may be trusted.

    python examples/lightning_gpt.py                    # 4 ranks on the CPU
    python examples/lightning_gpt.py --corrupt 2        # a weight of rank 2 flips a bit after step 12

Run the first again: it goes on from the newest certified checkpoint under `lightning_gpt/`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from scout_core.faults import corrupt_weight
from scout_lightning import ScoutCallback

TEXT = ("the quick brown fox jumps over the lazy dog. " * 200).encode()
CONTEXT, WIDTH = 32, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norms[1](x))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class Training(L.LightningModule):
    def __init__(self, corrupt: int | None) -> None:
        super().__init__()
        self.net, self.corrupt = Gpt(), corrupt

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.corrupt == self.global_rank and self.global_step == 12:
            corrupt_weight(self.net.blocks[1].out.weight, element=7, bit=20)
        ids = batch[0]
        loss = nn.functional.cross_entropy(self.net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:  # here, since the process that starts `ddp_spawn` never trains
            print(f"ended at step {self.trainer.global_step}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--strategy", default="ddp", choices=["ddp", "ddp_fork", "ddp_spawn"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--corrupt", type=int, default=None, metavar="RANK")
    parser.add_argument("--folder", type=Path, default=Path("lightning_gpt"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    L.seed_everything(0)
    text = torch.tensor(list(TEXT)).unfold(0, CONTEXT + 1, 8)
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(text), batch_size=8)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=given.devices,
        strategy=given.strategy,
        max_steps=given.steps,
        logger=False,
        callbacks=[
            ScoutCallback(every_n_train_steps=5, dirpath=given.folder / "scout", on_fault="stop", prog_bar=True),
            ModelCheckpoint(
                given.folder, filename="{step}", every_n_train_steps=5, save_top_k=2, monitor="step", mode="max"
            ),
        ],
    )
    trainer.fit(Training(given.corrupt), data, ckpt_path="scout-verified")


if __name__ == "__main__":
    main()
