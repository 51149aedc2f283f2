"""A report: one model's parts, or those of several models side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unspool.costing.part import Part
from unspool.costing.terminal import summary

VERSION = 1  # of the JSON


@dataclass(frozen=True)
class Report:
    """What one model's writing costs."""

    model: str
    machine: Mapping[str, str]
    parts: Sequence[Part]
    seconds: float
    quick: bool = False
    seed: int = 0

    def part(self, name: str) -> Part:
        """The part of this name."""
        return next(one for one in self.parts if one.name == name)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "version": VERSION,
            "model": self.model,
            "machine": dict(self.machine),
            "quick": self.quick,
            "seed": self.seed,
            "seconds": self.seconds,
            "parts": [part.to_dict() for part in self.parts],
        }

    def __str__(self) -> str:
        return summary([self.model], [self.parts])
