"""Settings of a batch, and the seeds of its rows."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Generation settings of rows that do not override them."""

    seed: int
    options: dict[str, Any] = field(default_factory=dict)  # of `LanguageModel.stream`
    chat: bool | None = None  # prompts are chat messages; None: if the model has a chat template
    system: str | None = None
    think: bool | str | None = None
    carry: tuple[str, ...] = ()  # columns to copy from the input to the answers
    any_model: bool = False  # also answer rows that name another model

    def to_dict(self) -> dict[str, Any]:
        """Return the settings for JSON, to compare with those of a later command."""
        return {**asdict(self), "carry": list(self.carry)}


def row_seed(seed: int, key: str) -> int:
    """Return a row's seed: a function of the command's seed and the row's id alone.

    So it depends neither on the worker nor on the order.
    """
    return int.from_bytes(hashlib.blake2b(f"{seed} {key}".encode(), digest_size=4).digest(), "big")
