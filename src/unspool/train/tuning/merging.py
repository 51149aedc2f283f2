"""Merge an adapter into its base model."""

from __future__ import annotations

from pathlib import Path

from unspool.errors import ModelFileError
from unspool.loading import open_tokenizer
from unspool.model.adapters import base_model_of, read_adapter
from unspool.model.checkpoint import load_transformer, open_checkpoint, save_checkpoint
from unspool.model.hub import find_model


def merge_adapter(
    adapter: Path,
    folder: Path,
    model: str | None = None,
    *,
    dtype: str = "float32",
    offline: bool = False,
) -> None:
    """Save an adapter merged into its base model (or `model`), as a folder for transformers."""
    import torch

    from unspool.train.learning.lora import merge

    name = model or base_model_of(adapter)
    if not name:
        raise ModelFileError(f"{adapter}: does not name its base model; give --model")
    checkpoint = open_checkpoint(find_model(name, offline=offline))
    merged = load_transformer(checkpoint)
    merge(merged, read_adapter(adapter, merged.config))
    save_checkpoint(merged.to(getattr(torch, dtype)), folder)
    tokenizer = open_tokenizer(checkpoint)
    if tokenizer is not None:
        tokenizer.save(folder)
