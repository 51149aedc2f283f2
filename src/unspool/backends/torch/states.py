"""Recurrent states in slots: a row reads one before its first token, writes one behind its last."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from unspool.backends.step import RECURRENT_LOOK, Floats, Ints, Look, StepBatch
from unspool.errors import UnspoolError
from unspool.model.config import ModelConfig
from unspool.model.layers.mixers import Mixer, Seen


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that go through the recurrence together: one of each of several rows, or several of
    one row, up to where its state is kept."""

    places: Tensor  # [rows, tokens]: their numbers in the batch
    reads: list[int]  # slots, -1: a fresh state; empty: goes on from the piece before
    writes: list[tuple[int, int]]  # row of the piece, slot


def pieces_of(batch: StepBatch, slots: int) -> list[Piece]:
    """How a step goes through recurrent layers; the same for all of them."""
    rows, captures = len(batch.starts) - 1, batch.captures
    fits = batch.states.shape == (rows, 2) and bool((batch.states >= (-1, 0)).all())
    fits = fits and bool((batch.states < slots).all() and (captures >= 0).all())
    fits = fits and bool((captures < (len(batch.tokens), slots)).all())
    if not fits or (np.diff(captures[:, 0]) < 0).any():
        raise UnspoolError("the batch names a recurrent state or a token that does not exist")
    kept: dict[int, list[int]] = {}
    for token, slot in captures.tolist():
        kept.setdefault(token, []).append(slot)
    counts = np.diff(batch.starts)
    found = [_run_of_one_token_each(batch, np.flatnonzero(counts == 1), kept)]
    for row in np.flatnonzero(counts > 1).tolist():
        first, end = batch.starts[row : row + 2].tolist()
        reads, last = batch.states[row].tolist()
        read = [reads]
        for token in range(first, end):
            slots_here = kept.get(token, []) + [last] * (token == end - 1)
            if slots_here:
                places = torch.arange(first, token + 1)[None]
                found.append(Piece(places, read, [(0, slot) for slot in slots_here]))
                first, read = token + 1, []
    return [piece for piece in found if piece.places.numel()]


def _run_of_one_token_each(batch: StepBatch, rows: Ints, kept: dict[int, list[int]]) -> Piece:
    tokens = batch.starts[rows]
    writes = list(enumerate(batch.states[rows, 1].tolist()))
    for number, token in enumerate(tokens.tolist()):
        writes += [(number, slot) for slot in kept.get(token, [])]
    return Piece(torch.from_numpy(tokens)[:, None], batch.states[rows, 0].tolist(), writes)


class States:
    """The slots of a backend, in 32 bits: for each layer, where it lies, [slots, floats]."""

    def __init__(self, config: ModelConfig, slots: int, devices: list[torch.device]) -> None:
        self._pools = [
            torch.zeros(slots, config.state_floats(layer), device=device)
            for layer, device in enumerate(devices)
        ]

    def mix(
        self, layer: int, mixer: Mixer, x: Tensor, pieces: list[Piece], look: StateLook | None
    ) -> Tensor:
        """What a recurrent layer adds to the tokens of all rows, [1, tokens, width]."""
        parts = mixer.project(x)
        pool = self._pools[layer]
        mixed: Tensor | None = None
        state = pool[:0]
        for piece in pieces:
            if piece.reads:
                state = pool[[max(0, slot) for slot in piece.reads]]
                state[[row for row, slot in enumerate(piece.reads) if slot < 0]] = 0
            seen = look.at(layer, piece.places) if look else None
            found, state = mixer.recur(tuple(part[0, piece.places] for part in parts), state, seen)
            if mixed is None:
                mixed = found.new_empty(x.shape[1], found.shape[-1])
            mixed[piece.places] = found
            rows, slots = zip(*piece.writes, strict=True)
            pool[list(slots)] = state[list(rows)]
        assert mixed is not None, "a step without tokens"
        return mixer.finish(mixed[None], parts)


class StateLook:
    """What somebody who looks at tokens sees of recurrent layers."""

    def __init__(self, config: ModelConfig, taps: Look) -> None:
        heads = max(1, config.recurrence.value_heads if config.recurrence else 0)
        shape = (config.layers, RECURRENT_LOOK, heads)
        self.seen: dict[int, Floats] = {
            int(token): np.full(shape, np.nan, np.float32) for token in taps.attention
        }

    def at(self, layer: int, places: Tensor) -> Seen:
        def seen(token: int, gate: Tensor, decay: Tensor, norm: Tensor) -> None:
            for row, place in enumerate(places[:, token].tolist()):
                if place in self.seen:
                    three = torch.stack((gate[row], decay[row], norm[row])).float().cpu().numpy()
                    self.seen[place][layer, :, : three.shape[1]] = three

        return seen
