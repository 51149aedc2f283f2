"""LoRA adapters of the first model, served from a folder as `model:adapter`.

    unspool serve --adapters adapters/          # adapters/poet/adapter_config.json, ...
    {"model": "smollm2-135m:poet", ...}

The folder is read with each request, so that new adapters appear and retrained ones replace their
older versions. Names are those of folder entries: no part of a request becomes a path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from unspool.errors import SettingsError
from unspool.model.adapters import WEIGHTS, is_adapter

_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """An adapter that can be requested."""

    name: str  # `model:adapter`
    base: str
    folder: Path
    size: int
    stamp: int  # modification time of its weights

    @property
    def short_name(self) -> str:
        return self.folder.name


class AdapterFolder:
    """The adapters in one folder, each in a subfolder."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise SettingsError(f"{folder}: no such folder of adapters")
        self._folder = folder.resolve()

    def entries(self, base: str) -> dict[str, AdapterEntry]:
        """The current adapters, by `base:name`. Skips links out of the folder, and names that
        would need quoting."""
        entries = {}
        for path in sorted(self._folder.iterdir()):
            is_inside = path.is_dir() and path.resolve().parent == self._folder
            if not (is_inside and _SAFE_NAME.fullmatch(path.name) and is_adapter(path)):
                continue
            weights = path / WEIGHTS
            if weights.is_file():
                stat = weights.stat()
                name = f"{base}:{path.name}"
                entries[name] = AdapterEntry(name, base, path, stat.st_size, stat.st_mtime_ns)
        return entries
