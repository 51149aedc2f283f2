"""Models worth running, by short names: `qwen3-0.6b`, `qwen3:0.6b`, `qwen3-0` for the same.

The facts are in catalogue.toml, which is read only when somebody asks for such a name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from unspool.model.default_model import DEFAULT
from unspool.model.kinds import by_preference, kind_in_name
from unspool.model.memory import free_memory, memory_needed, memory_of_text

_SHORTEST = 3  # letters: a slip must not fetch gigabytes
_TAIL = re.compile(r"[-:](instruct|it|chat|latest)$")


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the catalogue."""

    name: str
    repository: str
    family: str
    parameters: int
    context: int
    kv_bytes: int  # that a token leaves in keys and values
    size: Mapping[str, float]  # GB of the file, by its kind
    licence: str
    use: str
    state_bytes: int = 0  # of one recurrent state of a text

    @property
    def is_default(self) -> bool:
        """Whether it is the default model, which is fetched in another way."""
        return DEFAULT.name.startswith(self.name)

    @property
    def text_memory(self) -> int:
        return memory_of_text(self.kv_bytes, self.context, self.state_bytes)

    def bytes(self, kind: str) -> int:
        return round(self.size[kind] * 1e9)

    def needs(self, kind: str) -> int:
        """About how much memory it takes in this kind."""
        return memory_needed(self.bytes(kind), kind, self.text_memory)

    def best(self, free: int | None = None) -> tuple[str, bool]:
        """The kind for a machine with so much free memory, and whether it fits."""
        free = free_memory() if free is None else free
        kinds = by_preference({kind: self.bytes(kind) for kind in self.size})
        fitting = [kind for kind in kinds if self.needs(kind) <= free]
        return (fitting or [min(kinds, key=self.needs)])[0], bool(fitting)


@cache
def catalogue() -> dict[str, Entry]:
    """All models in it, by name."""
    import tomllib

    text = Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8")
    return {name: Entry(name=name, **facts) for name, facts in tomllib.loads(text).items()}


def entries_called(name: str) -> tuple[list[Entry], str | None]:
    """The models that a name may mean (one, if it is clear), and the kind it asks for.

    Capitals, the signs between parts and words such as `instruct` do not matter, and the beginning
    of a name is enough.
    """
    kind = kind_in_name(name)
    if kind is not None:
        name = re.sub(rf"[-:.]{re.escape(kind)}$", "", name, flags=re.IGNORECASE)
    wanted = _squeezed(_TAIL.sub("", name.lower()))
    exact = [entry for entry in catalogue().values() if _squeezed(entry.name) == wanted]
    if exact or len(wanted) < _SHORTEST:
        return exact, kind
    begun = [entry for entry in catalogue().values() if _squeezed(entry.name).startswith(wanted)]
    return begun, kind


def _squeezed(name: str) -> str:
    return re.sub(r"[-_: ]", "", name.lower())
