"""Recommended models by short name: `qwen3-0.6b`, `qwen3:0.6b`, `qwen3-0` mean the same.

The data are in catalogue.toml, which is read on first use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from unspool.model.default_model import DEFAULT
from unspool.model.kinds import by_preference, kind_in_name
from unspool.model.memory import free_memory, memory_needed, sequence_memory

_MIN_PREFIX_LENGTH = 3  # letters: a typo must not download gigabytes
_IGNORED_SUFFIX = re.compile(r"[-:](instruct|it|chat|latest)$")


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One model of the catalogue."""

    name: str
    repository: str
    family: str
    parameters: int
    context: int
    kv_bytes: int  # KV cache bytes per token
    size: Mapping[str, float]  # GB of the file, by kind
    licence: str
    use: str
    state_bytes: int = 0  # of a recurrent state

    @property
    def is_default(self) -> bool:
        """Whether it is the default model, which is downloaded in another way."""
        return DEFAULT.name.startswith(self.name)

    @property
    def text_memory(self) -> int:
        return sequence_memory(self.kv_bytes, self.context, self.state_bytes)

    def bytes(self, kind: str) -> int:
        return round(self.size[kind] * 1e9)

    def required_bytes(self, kind: str) -> int:
        """Approximate bytes of memory to run it in this kind."""
        return memory_needed(self.bytes(kind), kind, self.text_memory)

    def best(self, free: int | None = None) -> tuple[str, bool]:
        """The best kind for `free` bytes of memory, and whether it fits."""
        free = free_memory() if free is None else free
        kinds = by_preference({kind: self.bytes(kind) for kind in self.size})
        fitting = [kind for kind in kinds if self.required_bytes(kind) <= free]
        return (fitting or [min(kinds, key=self.required_bytes)])[0], bool(fitting)


@cache
def catalogue() -> dict[str, CatalogueEntry]:
    """All models, by name."""
    import tomllib

    text = Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8")
    return {name: CatalogueEntry(name=name, **facts) for name, facts in tomllib.loads(text).items()}


def find_entries(name: str) -> tuple[list[CatalogueEntry], str | None]:
    """The models that match a name (one if it is unambiguous), and the kind in it.

    Case, separators and suffixes such as `instruct` are ignored, and a prefix is enough.
    """
    kind = kind_in_name(name)
    if kind is not None:
        name = re.sub(rf"[-:.]{re.escape(kind)}$", "", name, flags=re.IGNORECASE)
    key = _normalize_name(_IGNORED_SUFFIX.sub("", name.lower()))
    exact_matches = [entry for entry in catalogue().values() if _normalize_name(entry.name) == key]
    if exact_matches or len(key) < _MIN_PREFIX_LENGTH:
        return exact_matches, kind
    prefix_matches = [
        entry for entry in catalogue().values() if _normalize_name(entry.name).startswith(key)
    ]
    return prefix_matches, kind


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_: ]", "", name.lower())
