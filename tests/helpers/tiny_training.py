"""A tiny model and batches in memory: what the tests of training train."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unspool.model.config import ModelConfig, Rotary
from unspool.model.files.checkpoint import save_weights
from unspool.model.layers.transformer import Transformer
from unspool.train.learning.objectives import next_token
from unspool.train.learning.optimizers import Rates, make_optimizers
from unspool.train.running.loop import Trainer, TrainSettings
from unspool.train.running.runs import Run

CONFIG = ModelConfig(
    family="qwen3", vocab_size=29, width=32, layers=2, heads=4, kv_heads=2, head_width=8,
    ff_width=48, context=64, rotary=Rotary(width=8), qk_norm="head", tied=True,
)  # fmt: skip


@dataclass
class Batch:
    ids: Tensor
    loss_mask: Tensor | None = None
    document_ids: Tensor | None = None


@dataclass
class CountingBatches:
    """Rows that count up from anywhere, modulo a prime: quick to learn, different each step."""

    batch_size: int = 4
    length: int = 16
    rank: int = 0
    world: int = 1

    def batch(self, step: int) -> Batch:
        rng = torch.Generator().manual_seed(step)
        rows = self.batch_size * self.world
        start = torch.randint(0, 29, (rows, 1), generator=rng)
        stride = torch.randint(1, 4, (rows, 1), generator=rng)
        ids = (start + stride * torch.arange(self.length + 1)) % 29
        return Batch(ids[self.rank :: self.world])


def tiny_model(seed: int = 0, **changes: Any) -> Transformer:
    torch.manual_seed(seed)
    return Transformer(replace(CONFIG, **changes))


def save_model(weights: Any, folder: Path) -> None:
    save_weights(CONFIG, weights, folder)


def tiny_trainer(folder: Path | None = None, steps: int = 30, **changes: Any) -> Trainer:
    """A trainer of the tiny model; resumes the run if the folder has one."""
    run = None
    if folder is not None:
        if (folder / "run.json").exists():
            run = Run.open(folder)
            run.resume_here()
        else:
            run = Run.create(folder, "new", steps=steps)
    chosen = {"save_every": 7, "warmup": 3, **changes}
    outside = {name: chosen.pop(name) for name in ("evaluate", "sampler") if name in chosen}
    model = tiny_model()
    settings = TrainSettings(steps=steps, **chosen)
    optimizers = make_optimizers(model, Rates())
    return Trainer(
        model, CountingBatches(), next_token, optimizers, settings, run,
        save_model=save_model, **outside,
    )  # fmt: skip
