"""Find a model by what the user wrote: its name, path and size."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """A model on this machine; or the default model, downloaded when it is loaded (path None)."""

    name: str
    path: str | None
    size: int  # bytes of its files


def locate(model: str | None, *, offline: bool = False) -> ModelLocation:
    """Locate `NAME=PATH`, a path, or a repo id; None: the default model."""
    from unspool.model.files.gguf import part_paths
    from unspool.model.hub.catalogue import display_name
    from unspool.model.hub.download import DEFAULT, needs_download
    from unspool.model.hub.find import find_model, is_default

    name, _, source = (model or "").rpartition("=")
    if is_default(source or None) and not offline and needs_download():
        return ModelLocation(name or Path(DEFAULT.file_name).stem, None, DEFAULT.size)
    path = find_model(source or None, offline=offline)
    folder = [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    size = sum(file.stat().st_size for file in (part_paths(path) if path.is_file() else folder))
    return ModelLocation(name or display_name(source, path), str(path), size)
