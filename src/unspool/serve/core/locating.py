"""From what a person writes of a model to its name, its place and its size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Located:
    """A model that is here; or the default model, fetched when it is loaded (path None)."""

    name: str
    path: str | None
    size: int  # bytes of its files


def locate(given: str | None, *, offline: bool = False) -> Located:
    """`NAME=PATH`, or a path or repo id that gives the name; nothing: the default model."""
    from unspool.model.default_model import DEFAULT, is_to_be_fetched
    from unspool.model.gguf import part_paths
    from unspool.model.hub import find_model, is_default
    from unspool.model.names import display_name

    name, _, where = (given or "").rpartition("=")
    if is_default(where or None) and not offline and is_to_be_fetched():
        return Located(name or Path(DEFAULT.file_name).stem, None, DEFAULT.size)
    path = find_model(where or None, offline=offline)
    folder = [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    size = sum(file.stat().st_size for file in (part_paths(path) if path.is_file() else folder))
    return Located(name or display_name(where, path), str(path), size)
