"""What the first rank tells the others, as bytes: a line of JSON, then arrays.

A step is one message. It carries what is to be computed, not how tokens are picked: only the first
rank picks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from unspool.backends.step import Look, StepBatch, TableUpdates
from unspool.model.adapters import Adapter, LowRank

Arrays = dict[str, npt.NDArray[Any]]

_LINE = 4  # bytes that say how long the line of JSON is
_STEP = tuple(f.name for f in fields(StepBatch) if f.name not in ("updates", "pick", "look"))
_UPDATES = tuple(f.name for f in fields(TableUpdates))
_LOOK = ("residuals", "attention", "parts")


@dataclass(frozen=True, slots=True)
class Message:
    """What is to be done, with which of the models, and what that needs."""

    kind: str
    model: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)

    def encode(self) -> bytes:
        shapes = {name: [a.dtype.str, a.shape] for name, a in self.arrays.items()}
        line = json.dumps([self.kind, self.model, self.facts, shapes]).encode()
        parts = [np.ascontiguousarray(array).tobytes() for array in self.arrays.values()]
        return b"".join([len(line).to_bytes(_LINE, "little"), line, *parts])

    @classmethod
    def decode(cls, content: bytes) -> Message:
        end = _LINE + int.from_bytes(content[:_LINE], "little")
        kind, model, facts, shapes = json.loads(content[_LINE:end])
        arrays: Arrays = {}
        for name, (dtype, shape) in shapes.items():
            count = int(np.prod(shape))
            array = np.frombuffer(content, dtype, count, end).reshape(shape)
            arrays[name] = array.copy()  # torch wants memory that it may write to
            end += array.nbytes
        return cls(kind, model, facts, arrays)


def of_step(model: int, batch: StepBatch) -> Message:
    arrays = {name: getattr(batch, name) for name in _STEP}
    arrays |= {f"updates.{name}": getattr(batch.updates, name) for name in _UPDATES}
    facts: dict[str, Any] = {}
    if batch.look:
        arrays |= {f"look.{name}": getattr(batch.look, name) for name in _LOOK}
        facts["layers"] = batch.look.layers
    return Message("step", model, facts, arrays)


def step_in(message: Message) -> StepBatch:
    def under(prefix: str) -> Arrays:
        return {
            name.removeprefix(prefix): array
            for name, array in message.arrays.items()
            if name.startswith(prefix)
        }

    arrays: dict[str, Any] = {name: message.arrays[name] for name in _STEP}
    batch = StepBatch(**arrays)
    batch.updates = TableUpdates(**under("updates."))
    if look := under("look."):
        layers = message.facts["layers"]
        batch.look = Look(**look, layers=None if layers is None else tuple(layers))
    return batch


def of_adapter(model: int, number: int, adapter: Adapter | None) -> Message:
    facts: dict[str, Any] = {"number": number, "scales": None}
    if adapter is None:
        return Message("adapter", model, facts)
    facts["scales"] = {name: part.scale for name, part in adapter.parts.items()}
    arrays: Arrays = {}
    for name, part in adapter.parts.items():
        arrays |= {f"{name} down": part.down, f"{name} up": part.up}
    return Message("adapter", model, facts, arrays)


def adapter_in(message: Message) -> Adapter | None:
    scales = message.facts["scales"]
    if scales is None:
        return None
    return Adapter(
        {
            name: LowRank(message.arrays[f"{name} down"], message.arrays[f"{name} up"], scale)
            for name, scale in scales.items()
        }
    )
