"""Messages from rank 0 to the others, as bytes: a line of JSON, then arrays.

A step is one message. It does not include sampling settings: only rank 0 samples.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from unspool.backends.step import ObserveRequest, StepBatch, TableUpdates
from unspool.model.adapters import Adapter, LowRank

Arrays = dict[str, npt.NDArray[Any]]

_HEADER_BYTES = 4  # length of the JSON line
# Fields that are arrays.
_STEP_ARRAYS = tuple(f.name for f in fields(StepBatch) if f.type == "Ints")
_UPDATE_ARRAYS = tuple(f.name for f in fields(TableUpdates))
_LOOK_ARRAYS = tuple(f.name for f in fields(ObserveRequest) if f.type == "Ints")


@dataclass(frozen=True, slots=True)
class RankMessage:
    """A command for all ranks: its kind, the number of the model, and its arguments."""

    kind: str
    model: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    arrays: Arrays = field(default_factory=dict)

    def encode(self) -> bytes:
        shapes = {name: [a.dtype.str, a.shape] for name, a in self.arrays.items()}
        line = json.dumps([self.kind, self.model, self.facts, shapes]).encode()
        parts = [np.ascontiguousarray(array).tobytes() for array in self.arrays.values()]
        return b"".join([len(line).to_bytes(_HEADER_BYTES, "little"), line, *parts])

    @classmethod
    def decode(cls, content: bytes) -> RankMessage:
        end = _HEADER_BYTES + int.from_bytes(content[:_HEADER_BYTES], "little")
        kind, model, facts, shapes = json.loads(content[_HEADER_BYTES:end])
        arrays: Arrays = {}
        for name, (dtype, shape) in shapes.items():
            count = int(np.prod(shape))
            array = np.frombuffer(content, dtype, count, end).reshape(shape)
            arrays[name] = array.copy()  # torch needs writable memory
            end += array.nbytes
        return cls(kind, model, facts, arrays)


def step_message(model: int, batch: StepBatch) -> RankMessage:
    arrays = {name: getattr(batch, name) for name in _STEP_ARRAYS}
    arrays |= {f"updates.{name}": getattr(batch.table_updates, name) for name in _UPDATE_ARRAYS}
    facts: dict[str, Any] = {}
    if batch.observe:
        arrays |= {f"look.{name}": getattr(batch.observe, name) for name in _LOOK_ARRAYS}
        facts["layers"] = batch.observe.layers
    return RankMessage("step", model, facts, arrays)


def parse_step(message: RankMessage) -> StepBatch:
    def with_prefix(prefix: str) -> Arrays:
        return {
            name.removeprefix(prefix): array
            for name, array in message.arrays.items()
            if name.startswith(prefix)
        }

    arrays: dict[str, Any] = {name: message.arrays[name] for name in _STEP_ARRAYS}
    batch = StepBatch(**arrays)
    batch.table_updates = TableUpdates(**with_prefix("updates."))
    if look := with_prefix("look."):
        layers = message.facts["layers"]
        batch.observe = ObserveRequest(**look, layers=None if layers is None else tuple(layers))
    return batch


def adapter_message(model: int, number: int, adapter: Adapter | None) -> RankMessage:
    facts: dict[str, Any] = {"number": number, "scales": None}
    if adapter is None:
        return RankMessage("adapter", model, facts)
    facts["scales"] = {name: part.scale for name, part in adapter.parts.items()}
    arrays: Arrays = {}
    for name, part in adapter.parts.items():
        arrays |= {f"{name} down": part.down, f"{name} up": part.up}
    return RankMessage("adapter", model, facts, arrays)


def parse_adapter(message: RankMessage) -> Adapter | None:
    scales = message.facts["scales"]
    if scales is None:
        return None
    return Adapter(
        {
            name: LowRank(message.arrays[f"{name} down"], message.arrays[f"{name} up"], scale)
            for name, scale in scales.items()
        }
    )
