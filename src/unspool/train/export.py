"""Export a model: a folder for transformers or MLX, a GGUF file for llama.cpp.

    export_folder("runs/speeches", "speeches-hf", dtype="bfloat16")
    export_folder("runs/speeches", "speeches-mlx", dtype="mlx8")
    export_gguf("runs/speeches", "speeches.gguf", type="Q8_0")

The target is replaced atomically: a reader never sees a partial model.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from unspool.backends.placement import DTYPES, check_torch
from unspool.errors import ModelFileError, SettingsError, UnspoolError
from unspool.loading import open_tokenizer
from unspool.model.adapters import base_model_of, read_adapter
from unspool.model.files.checkpoint import (
    Checkpoint,
    GGUFCheckpoint,
    load_transformer,
    open_checkpoint,
    save_checkpoint,
)
from unspool.model.files.export import check_writable, quantize_folder, save_gguf
from unspool.model.hub.find import find_model
from unspool.model.weights import weight_shapes
from unspool.progress import progress_bar

MLX_BITS = {"mlx8": 8, "mlx4": 4}


def export_folder(
    model: str | Path, target: str | Path, *, dtype: str = "float32", force: bool = False
) -> Path:
    """Write config.json, safetensors and the tokenizer for transformers (or mlx-lm)."""
    check_torch()
    if dtype not in (*DTYPES, *MLX_BITS):
        raise SettingsError(
            f"dtype must be one of {', '.join((*DTYPES, *MLX_BITS))}, got {dtype!r}"
        )
    checkpoint, target = open_checkpoint(find_model(model)), Path(target)
    _check_target(target, force)
    tokenizer = open_tokenizer(checkpoint)
    part = target.with_name(f"{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    try:
        with _write_errors(target):
            load_dtype = "float32" if dtype in MLX_BITS else dtype
            save_checkpoint(load_transformer(checkpoint, dtype=load_dtype), part)
            if dtype in MLX_BITS:
                quantize_folder(part, MLX_BITS[dtype])
            if tokenizer is not None:
                tokenizer.save(part)
            if target.exists():
                shutil.rmtree(target)
            part.replace(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def export_gguf(
    model: str | Path,
    target: str | Path,
    *,
    type: str = "Q8_0",
    name: str | None = None,
    force: bool = False,
    progress: bool = True,
) -> Path:
    """Write one GGUF file with config, vocabulary, chat template and weights.

    Args:
        type: F32, F16, or quantized: Q8_0, Q4_1, Q4_0.
        name: Model name in the file; by default the file name.
    """
    check_torch()
    checkpoint, target = open_checkpoint(find_model(model)), Path(target)
    check_writable(checkpoint.config, type)
    _check_target(target, force)
    vocabulary = _vocabulary(checkpoint)
    target.parent.mkdir(parents=True, exist_ok=True)
    total = len(weight_shapes(checkpoint.config))
    with (
        progress_bar("writing tensors", total, show=progress) as on_progress,
        _write_errors(target),
    ):
        save_gguf(
            load_transformer(checkpoint),
            target,
            type=type,
            vocabulary=vocabulary,
            name=name or target.stem,
            on_tensor=on_progress,
        )
    return target


def _vocabulary(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The vocabulary as GGUF metadata; that of a GGUF file is copied."""
    if isinstance(checkpoint, GGUFCheckpoint):
        metadata = checkpoint.file.metadata
        return {key: value for key, value in metadata.items() if key.startswith("tokenizer.")}
    tokenizer = open_tokenizer(checkpoint)
    if tokenizer is None:
        raise ModelFileError(
            f"{checkpoint.path}: has no tokenizer.json, which a GGUF file needs; put the model's "
            "tokenizer.json beside its weights"
        )
    return tokenizer.gguf_metadata(checkpoint.config.vocab_size)


def _check_target(target: Path, force: bool) -> None:
    if target.exists() and not force:
        raise UnspoolError(f"{target} already exists; give another name, or --force")


@contextmanager
def _write_errors(target: Path) -> Iterator[None]:
    """Turn an error of the disk into one sentence."""
    try:
        yield
    except OSError as error:
        raise UnspoolError(
            f"{target} cannot be written: {error.strerror or error}; nothing was changed"
        ) from error


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
