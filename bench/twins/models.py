"""Twins and their causal model opened to be measured, and a tiny model to try everything with."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from unspool.model.adapters import is_adapter, read_adapter
from unspool.model.files.checkpoint import load_transformer, open_checkpoint, save_weights
from unspool.model.layers.transformer import Transformer
from unspool.train.data.batches import TrainingBatch
from unspool.train.data.tokenizer import TokenizerSettings, save_tokenizer_files, train_bpe
from unspool.train.learning.lora import LoraConfig, add_lora, load_adapter
from unspool.train.learning.model_size import new_config, new_model
from unspool.train.learning.objectives import token_losses
from unspool.train.running.loop import on_device
from unspool.train.twins.data import CausalModel, Mixture, Sources


@dataclass(frozen=True)
class Pair:
    """A causal model and its twin, in eval mode on one device."""

    clean: Transformer
    twin: Transformer
    mask: int

    @classmethod
    def opened(cls, causal: CausalModel, folder: Path, device: torch.device) -> Pair:
        clean = causal.frozen(device)
        mask = int(json.loads((folder / "twin.json").read_text())["mask_id"])
        if not is_adapter(folder):
            dtype = "bfloat16" if device.type == "cuda" else "float32"
            checkpoint = open_checkpoint(folder)
            return cls(clean, load_transformer(checkpoint, dtype=dtype, device=str(device)), mask)
        twin = causal.frozen(device)
        adapter = read_adapter(folder, twin.config)
        part = next(iter(adapter.parts.values()))
        add_lora(twin, LoraConfig(rank=part.rank, alpha=part.scale * part.rank))
        load_adapter(twin, adapter)
        return cls(clean, twin.requires_grad_(False).eval(), mask)


def held_out_batches(
    sources: Sources, rows: int, length: int, count: int, device: torch.device
) -> dict[str, list[TrainingBatch]]:
    """Batches of each held-out source that is long enough, always the same ones."""
    found = {}
    for name, (packed, _) in sources.items():
        if packed.loss_mask is None and len(packed.ids) <= length:
            continue
        mixture = Mixture({name: (packed, 1.0)}, rows, length, seed=1)
        short = Path(name).stem
        found[short] = [on_device(mixture.batch(number), device) for number in range(count)]
    return found


@torch.no_grad()
def surprises(model: Transformer, x: Tensor, targets: Tensor) -> Tensor:
    """Minus the log-probability of each target, in the shape of the targets."""
    return token_losses(model, x, targets).float()


def best(model: Transformer, x: Tensor, banned: int | None = None) -> Tensor:
    """The likeliest token of each vector."""
    found = []
    for part in x.flatten(0, -2).split(8192):
        logits = model.logits(part)
        if banned is not None:
            logits[:, banned] = -torch.inf
        found.append(logits.argmax(-1))
    return torch.cat(found).view(x.shape[:-1])


def tiny_causal(folder: Path) -> Path:
    """A random model with a vocabulary of bytes, and a text; for trying the bench itself."""
    settings = TokenizerSettings(vocab_size=260)
    model = folder / "model"
    if not (model / "config.json").exists():
        model.mkdir(parents=True, exist_ok=True)
        config = new_config(2, 264, 256, width=32, head_width=8, ff_width=64)
        save_weights(config, new_model(config, 1).state_dict(), model)
        save_tokenizer_files(train_bpe([], settings), settings, model)
        words = "\n\n".join(f"the {n} people of these states go on {n * n}" for n in range(400))
        (folder / "words.txt").write_text(words)
    return model
