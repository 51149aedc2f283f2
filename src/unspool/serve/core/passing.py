"""Ephemeral models: in no list, but requested by name, such as checkpoints of training runs and
models shipped with Unspool. They run short texts; the registry keeps few of them in memory.
"""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from pathlib import Path

from unspool.errors import UnspoolError
from unspool.model.hub import find_model
from unspool.model.shipped import shipped_models
from unspool.serve.core.registry import ModelEntry
from unspool.session import Session

_KV_CACHE_BYTES = 256 << 20  # of each ephemeral model


def ephemeral_entry(name: str, folder: Path, source: str) -> ModelEntry:
    """An ephemeral model by its name and folder."""
    load = partial(_load_ephemeral, folder)
    return ModelEntry(name, load, _weights_bytes(folder), source=source, stamp=_file_stamps(folder))


def shipped_entry(name: str) -> ModelEntry | None:
    """A model shipped with Unspool; None for any other name."""
    folder = shipped_models().get(name)
    return None if folder is None else ephemeral_entry(name, folder, "shipped")


def _file_stamps(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    """A value that changes when a file of the model is rewritten, added or removed."""
    stamps = []
    for file in sorted(folder.glob("*")):
        with suppress(OSError):  # just removed
            stat = file.stat()
            stamps.append((file.name, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(stamps)


def _weights_bytes(model: Path) -> int:
    """Bytes of weights; those of an adapter include its base model."""
    files = [model] if model.is_file() else [*model.glob("*.safetensors"), *model.glob("*.gguf")]
    size = sum(file.stat().st_size for file in files)
    with suppress(OSError, ValueError, KeyError, TypeError, UnspoolError):
        config = json.loads((model / "adapter_config.json").read_text(encoding="utf-8"))
        size += _weights_bytes(
            find_model(config["base_model_name_or_path"], offline=True, progress=False)
        )
    return size


def _load_ephemeral(folder: Path) -> Session:
    from unspool.loading import load

    return load(folder, memory=_KV_CACHE_BYTES, offline=True, progress=False)
