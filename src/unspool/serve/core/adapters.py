"""A folder of adapters that a server offers beside its first model, as `model:adapter`.

    unspool serve --adapters adapters/          # adapters/poet/adapter_config.json, ...
    {"model": "smollm2-135m:poet", ...}

The folder is looked at when somebody asks, so an adapter that was just trained is there at once,
and one that was trained anew replaces the old one. A name is one of the folder's own: nothing that
a request says becomes a path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from unspool.errors import SettingsError
from unspool.model.adapters import WEIGHTS, is_adapter

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class AdapterEntry:
    """An adapter that can be asked for."""

    name: str  # `model:adapter`
    base: str
    folder: Path
    size: int
    stamp: int  # when its weights were written

    @property
    def short(self) -> str:
        return self.folder.name


class AdapterFolder:
    """The adapters below one folder, each in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise SettingsError(f"{folder}: there is no such folder of adapters")
        self._folder = folder.resolve()

    def entries(self, base: str) -> dict[str, AdapterEntry]:
        """Those that are there now, by `base:name`. A link that leads out of the folder and a name
        that would need quoting are left out."""
        found = {}
        for each in sorted(self._folder.iterdir()):
            inside = each.is_dir() and each.resolve().parent == self._folder
            if not (inside and _SAFE.fullmatch(each.name) and is_adapter(each)):
                continue
            weights = each / WEIGHTS
            if weights.is_file():
                told = weights.stat()
                name = f"{base}:{each.name}"
                found[name] = AdapterEntry(name, base, each, told.st_size, told.st_mtime_ns)
        return found
