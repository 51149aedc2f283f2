"""Shared by the tests of recurrent layers: random models, and texts with states in slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from helpers.paged_texts import Library, RandomCheckpoint, Text, batch_of, config, host
from unspool.backends.cpu.model import CpuModel
from unspool.backends.step import Backend, Floats, Observations, ObserveRequest
from unspool.model.config import Recurrence

VOCABULARY = 67
_DELTA = Recurrence(conv_kernel=4, key_heads=2, value_heads=4, key_width=24, value_width=40)
_MAMBA = dataclasses.replace(_DELTA, conv_bias=True, norm_groups=2)
# Odd widths, so that no register is full by chance.
SHAPES: dict[str, dict[str, Any]] = {
    "conv": {
        "mixers": ("conv", "attention", "conv"),
        "recurrence": Recurrence(conv_kernel=3),
        "width": 40,
    },
    "delta": {
        "mixers": ("delta", "delta", "attention"),
        "recurrence": _DELTA,
        "attention_gate": True,
        "qk_norm": "head",
        "norm_plus_one": True,
    },
    "tiled": {
        "mixers": ("attention", "delta", "delta"),
        "recurrence": dataclasses.replace(_DELTA, tiled=True, key_width=16, value_width=16),
        "experts": 5,
        "experts_per_token": 2,
        "expert_width": 21,
        "shared_width": 19,
    },
    "sigmoid router": {
        "mixers": ("conv", "attention", "conv"),
        "recurrence": Recurrence(conv_kernel=5),
        "experts": 6,
        "experts_per_token": 3,
        "expert_width": 21,
        "router": "sigmoid",
        "selection_bias": True,
        "experts_scale": 1.5,
    },
    "mamba2": {
        "mixers": ("mamba2", "attention", "mamba2"),
        "recurrence": _MAMBA,
        "positions": "none",
        "residual_scale": 0.5,
    },
    "halves": {  # each layer has only one of the two
        "mixers": ("mamba2", "none", "attention"),
        "recurrence": dataclasses.replace(_MAMBA, conv_bias=False, norm_groups=1, value_width=16),
        "feedless_layers": (0, 2),
        "activation": "relu2",
        "gated": False,
        "experts": 5,
        "experts_per_token": 2,
        "expert_width": 21,
        "shared_width": 19,
        "shared_gated": False,
    },
}


def checkpoint(name: str, kind: str = "F32", **changes: Any) -> RandomCheckpoint:
    return RandomCheckpoint(config(layers=3, **{**SHAPES[name], **changes}), kind)


def native(name: str, *, threads: int = 2, kv_bits: int = 32, **changes: Any) -> Backend:
    model = CpuModel(checkpoint(name, **changes), store=None, threads=threads, kv_bits=kv_bits)
    return model.backend(memory=8 << 20, context=512)


def plain(name: str, **changes: Any) -> Backend:
    from unspool.backends.torch.backend import TorchModel
    from unspool.model.files.checkpoint import load_transformer

    model = TorchModel(load_transformer(checkpoint(name, **changes)))
    return model.backend(memory=8 << 20, context=512)


@dataclasses.dataclass
class Kept(Text):
    """A text whose state behind the tokens that were read is in a slot (-1: none was)."""

    slot: int = -1


class Shelf:
    """Hands out texts and slots of one backend."""

    def __init__(self, backend: Backend, seed: int = 0) -> None:
        self.backend = backend
        self.library = Library(min(400, backend.page_count), VOCABULARY, seed)
        self.slots = np.random.default_rng(seed).permutation(backend.state_count).tolist()

    def text(self, tokens: Sequence[int]) -> Kept:
        rows = self.library.again(tokens)
        return Kept(rows.tokens, rows.pages)

    def read(
        self,
        parts: Sequence[tuple[Kept, int]],
        *,
        look: ObserveRequest | None = None,
        captures: Sequence[tuple[int, int]] = (),
        in_place: bool = False,
    ) -> tuple[list[Floats], Observations | None]:
        """Compute the next tokens of each text; return each text's logits."""
        writes = [
            text.slot if in_place and text.slot >= 0 else self.slots.pop() for text, _ in parts
        ]
        batch = batch_of(parts, look)
        batch.state_slots = np.array(
            [(text.slot, to) for (text, _), to in zip(parts, writes, strict=True)]
        )
        batch.state_captures = np.array(captures, np.int64).reshape(-1, 2)
        ran = self.backend.launch(batch).result()
        for (text, count), slot in zip(parts, writes, strict=True):
            if text.slot >= 0 and text.slot != slot:
                self.slots.insert(0, text.slot)
            text.read, text.slot = text.read + count, slot
        return np.split(host(ran.logits).copy(), batch.row_starts[1:-1]), ran.observations

    def read_all(self, tokens: Sequence[int], chunk: int) -> Floats:
        """All logits of a text that is read in chunks, alone."""
        text, rows = self.text(tokens), []
        while text.read < len(text.tokens):
            rows += self.read([(text, min(chunk, len(text.tokens) - text.read))])[0]
        return np.concatenate(rows)


def some_tokens(count: int, seed: int = 3) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()  # type: ignore[no-any-return]
