"""Models that are in no list, but known by name: checkpoints of trainings, and those that came with
Unspool. They are small, or looked at with short texts; the registry keeps few of them in memory.
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

# For keys and values of each of them in memory: texts to look at are short.
_KEYS_MEMORY = 256 << 20


def passing_entry(name: str, folder: Path, source: str) -> ModelEntry:
    """A model by its name and its folder."""
    load = partial(_load, folder)
    return ModelEntry(name, load, _size(folder), source=source, stamp=_file_stamps(folder))


def shipped_entry(name: str) -> ModelEntry | None:
    """A model that came with Unspool; nothing else is ever found here."""
    folder = shipped_models().get(name)
    return None if folder is None else passing_entry(name, folder, "shipped")


def _file_stamps(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    """What changes when one of a model's files is rewritten, added or removed."""
    stamps = []
    for file in sorted(folder.glob("*")):
        with suppress(OSError):  # removed meanwhile
            stat = file.stat()
            stamps.append((file.name, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(stamps)


def _size(model: Path) -> int:
    """Bytes of weights; an adapter is loaded together with the model that it was tuned from."""
    files = [model] if model.is_file() else [*model.glob("*.safetensors"), *model.glob("*.gguf")]
    size = sum(file.stat().st_size for file in files)
    with suppress(OSError, ValueError, KeyError, TypeError, UnspoolError):
        config = json.loads((model / "adapter_config.json").read_text(encoding="utf-8"))
        size += _size(find_model(config["base_model_name_or_path"], offline=True, progress=False))
    return size


def _load(folder: Path) -> Session:
    import unspool

    return unspool.load(folder, memory=_KEYS_MEMORY, offline=True, progress=False)
