"""What a whole batch is asked for, and the seed that each of its rows gets from that."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How rows are written that do not say otherwise themselves."""

    seed: int
    options: dict[str, Any] = field(default_factory=dict)  # of `LanguageModel.stream`
    chat: bool | None = None  # whether prompts are questions; None: if the model has a template
    system: str | None = None
    think: bool | str | None = None
    carry: tuple[str, ...] = ()  # columns of the input that the answers have too
    any_model: bool = False  # rows that name another model are answered all the same

    def to_dict(self) -> dict[str, Any]:
        """For JSON, to be compared with a later command's."""
        return {**asdict(self), "carry": list(self.carry)}


def row_seed(seed: int, key: str) -> int:
    """A row's own seed. It follows from the command's and from the row's id alone, so that neither
    who writes the row nor when it is written makes a difference."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {key}".encode(), digest_size=4).digest(), "big")
