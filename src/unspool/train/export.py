"""A trained model for other programs: a folder for transformers or MLX, a GGUF for llama.cpp.

    export_folder("runs/speeches", "speeches-hf", dtype="bfloat16")
    export_folder("runs/speeches", "speeches-mlx", dtype="mlx8")
    export_gguf("runs/speeches", "speeches.gguf", type="Q8_0")

What is there before the work is done stays; a reader never finds half a model.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from unspool.backends.placement import DTYPES
from unspool.backends.torch.available import check_torch
from unspool.decoding.progress import Tell, progress_bar
from unspool.errors import ModelFileError, SettingsError, UnspoolError
from unspool.loading import open_tokenizer
from unspool.model.checkpoint import (
    Checkpoint,
    GGUFCheckpoint,
    load_transformer,
    open_checkpoint,
    save_checkpoint,
)
from unspool.model.gguf_save import check_writable, save_gguf
from unspool.model.hub import find_model
from unspool.model.mlx_save import quantize_folder
from unspool.model.weights import shapes

MLX = {"mlx8": 8, "mlx4": 4}  # bits of MLX's quantized folders


def export_folder(
    model: str | Path,
    target: str | Path,
    *,
    dtype: str = "float32",
    force: bool = False,
) -> Path:
    """Write config.json, safetensors and the vocabulary, as transformers (or mlx-lm) reads them."""
    check_torch()
    if dtype not in (*DTYPES, *MLX):
        raise SettingsError(f"dtype is {dtype!r}; it may be {', '.join((*DTYPES, *MLX))}")
    checkpoint, target = open_checkpoint(find_model(model)), Path(target)
    _check_target(target, force)
    tokenizer = open_tokenizer(checkpoint)
    beside = target.with_name(f"{target.name}.part")
    shutil.rmtree(beside, ignore_errors=True)
    try:
        with _telling_of_a_full_disk(target):
            floats = "float32" if dtype in MLX else dtype
            save_checkpoint(load_transformer(checkpoint, dtype=floats), beside)
            if dtype in MLX:
                quantize_folder(beside, MLX[dtype])
            if tokenizer is not None:
                tokenizer.save(beside)
            if target.exists():
                shutil.rmtree(target)
            beside.replace(target)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
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
    """Write one GGUF file with settings, vocabulary, chat template and weights.

    type   F32, F16, or packed: Q8_0, Q4_1, Q4_0.
    name   what the file calls the model; by default the file's own name.
    """
    check_torch()
    checkpoint, target = open_checkpoint(find_model(model)), Path(target)
    check_writable(checkpoint.config, type)
    _check_target(target, force)
    vocabulary = _vocabulary(checkpoint)
    target.parent.mkdir(parents=True, exist_ok=True)
    with _bar(checkpoint, progress) as told, _telling_of_a_full_disk(target):
        save_gguf(
            load_transformer(checkpoint),
            target,
            type=type,
            vocabulary=vocabulary,
            name=name or target.stem,
            told=told,
        )
    return target


def _vocabulary(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The vocabulary in GGUF's words; one that came from a GGUF file goes back as it was."""
    if isinstance(checkpoint, GGUFCheckpoint):
        known = checkpoint.file.metadata
        return {key: value for key, value in known.items() if key.startswith("tokenizer.")}
    tokenizer = open_tokenizer(checkpoint)
    if tokenizer is None:
        raise ModelFileError(
            f"{checkpoint.path}: has no tokenizer.json, and a GGUF file without a vocabulary "
            "cannot be run; put the model's tokenizer.json beside its weights"
        )
    return tokenizer.gguf_metadata(checkpoint.config.vocab_size)


def _bar(checkpoint: Checkpoint, show: bool) -> AbstractContextManager[Tell]:
    return progress_bar("writing tensors", len(shapes(checkpoint.config)), show=show)


def _check_target(target: Path, force: bool) -> None:
    if target.exists() and not force:
        raise UnspoolError(f"{target} is there already; give another name, or --force")


class _telling_of_a_full_disk(AbstractContextManager[None]):  # noqa: N801  reads as a sentence
    """An error of the disk as one sentence."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            raise UnspoolError(
                f"{self.target} cannot be written: {error.strerror or error}; nothing was changed"
            ) from error
