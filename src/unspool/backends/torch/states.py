"""Recurrent state slots: a row reads one before its first token and writes one after its last."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unspool.backends.step import RECURRENT_STATS, Floats, Ints, ObserveRequest, StepBatch
from unspool.errors import UnspoolError
from unspool.model.config import ModelConfig
from unspool.model.layers.mixers import Mixer, StateObserver


@dataclass(frozen=True, slots=True)
class RecurrentChunk:
    """Tokens that go through the recurrence together: one token each of several rows, or several
    tokens of one row, up to a token whose state is saved."""

    tokens: Tensor  # [rows, tokens]: token indices in the batch
    reads: list[int]  # state slots, -1: a zero state; empty: continues the previous chunk
    writes: list[tuple[int, int]]  # row of the chunk, state slot


def recurrent_chunks(batch: StepBatch, slots: int) -> list[RecurrentChunk]:
    """Divide a step into chunks, the same for all recurrent layers; `slots`: number of slots."""
    rows, captures = len(batch.row_starts) - 1, batch.state_captures
    is_valid = batch.state_slots.shape == (rows, 2) and bool((batch.state_slots >= (-1, 0)).all())
    is_valid = is_valid and bool((batch.state_slots < slots).all() and (captures >= 0).all())
    is_valid = is_valid and bool((captures < (len(batch.tokens), slots)).all())
    if not is_valid or (np.diff(captures[:, 0]) < 0).any():
        raise UnspoolError("the batch names a recurrent state or a token that does not exist")
    capture_slots: dict[int, list[int]] = {}
    for token, slot in captures.tolist():
        capture_slots.setdefault(token, []).append(slot)
    counts = np.diff(batch.row_starts)
    chunks = [_decode_chunk(batch, np.flatnonzero(counts == 1), capture_slots)]
    for row in np.flatnonzero(counts > 1).tolist():
        first, end = batch.row_starts[row : row + 2].tolist()
        first_slot, last_slot = batch.state_slots[row].tolist()
        reads = [first_slot]
        for token in range(first, end):
            writes = capture_slots.get(token, []) + [last_slot] * (token == end - 1)
            if writes:
                tokens = torch.arange(first, token + 1)[None]
                chunks.append(RecurrentChunk(tokens, reads, [(0, slot) for slot in writes]))
                first, reads = token + 1, []
    return [chunk for chunk in chunks if chunk.tokens.numel()]


def _decode_chunk(
    batch: StepBatch, rows: Ints, capture_slots: dict[int, list[int]]
) -> RecurrentChunk:
    """The chunk of all rows with a single token."""
    tokens = batch.row_starts[rows]
    writes = list(enumerate(batch.state_slots[rows, 1].tolist()))
    for row, token in enumerate(tokens.tolist()):
        writes += [(row, slot) for slot in capture_slots.get(token, [])]
    return RecurrentChunk(
        torch.from_numpy(tokens)[:, None], batch.state_slots[rows, 0].tolist(), writes
    )


class StateSlots:
    """The state slots of a backend in float32: [slots, floats] per layer, on the layer's device."""

    def __init__(self, config: ModelConfig, slots: int, devices: list[torch.device]) -> None:
        self._pools = [
            torch.zeros(slots, config.state_floats(layer), device=device)
            for layer, device in enumerate(devices)
        ]

    def mix(
        self,
        layer: int,
        mixer: Mixer,
        x: Tensor,
        chunks: list[RecurrentChunk],
        observer: RecurrentObserver | None,
    ) -> Tensor:
        """Run a recurrent layer on the tokens of all rows, [1, tokens, width]."""
        parts = mixer.project(x)
        pool = self._pools[layer]
        mixed: Tensor | None = None
        state = pool[:0]
        for chunk in chunks:
            if chunk.reads:
                state = pool[[max(0, slot) for slot in chunk.reads]]
                state[[row for row, slot in enumerate(chunk.reads) if slot < 0]] = 0
            record = observer.recorder(layer, chunk.tokens) if observer else None
            inputs = tuple(part[0, chunk.tokens] for part in parts)
            out, state = mixer.recur(inputs, state, record)
            if mixed is None:
                mixed = out.new_empty(x.shape[1], out.shape[-1])
            mixed[chunk.tokens] = out
            rows, slots = zip(*chunk.writes, strict=True)
            pool[list(slots)] = state[list(rows)]
        assert mixed is not None, "the step has no tokens"
        return mixer.finish(mixed[None], parts)


class RecurrentObserver:
    """Gate, decay and state norm of recurrent layers at the observed tokens."""

    def __init__(self, config: ModelConfig, look: ObserveRequest) -> None:
        heads = max(1, config.recurrence.value_heads if config.recurrence else 0)
        shape = (config.layers, RECURRENT_STATS, heads)
        self.stats: dict[int, Floats] = {
            int(token): np.full(shape, np.nan, np.float32) for token in look.attention
        }

    def recorder(self, layer: int, tokens: Tensor) -> StateObserver:
        """A callback that records the tokens of one chunk in one layer."""

        def record(column: int, gate: Tensor, decay: Tensor, norm: Tensor) -> None:
            for row, token in enumerate(tokens[:, column].tolist()):
                if token in self.stats:
                    values = torch.stack((gate[row], decay[row], norm[row])).float().cpu().numpy()
                    self.stats[token][layer, :, : values.shape[1]] = values

        return record
