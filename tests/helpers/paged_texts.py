"""Shared by the tests of backends: random models of any shape, and texts in pages, by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from helpers.packing_support import FLOATS, SIZES, floats, halves_of, set_halves
from unspool.backends.step import (
    Backend,
    Floats,
    Logits,
    Observations,
    ObserveRequest,
    StepBatch,
    TableUpdates,
)
from unspool.model.config import ModelConfig, Rotary
from unspool.model.files.stored import FileTensor, dequantize_blocks
from unspool.model.weights import weight_shapes

PAGE = 16


def config(**changes: Any) -> ModelConfig:
    """A small Llama, with changes."""
    head_width = changes.get("head_width", 16)
    shape: dict[str, Any] = {
        "family": "of-our-own",
        "vocab_size": 67,
        "width": 32,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_width": head_width,
        "ff_width": 48,
        "context": 2048,
        "rotary": Rotary(width=head_width),
    }
    return ModelConfig(**{**shape, **changes})


def random_blocks(kind: str, rows: int, columns: int, rng: np.random.Generator) -> FileTensor:
    """Random weights of any type, about as large as those of a model."""
    if kind in FLOATS:
        return floats(kind, rng.standard_normal((rows, columns)) / columns**0.5)
    elements, size = SIZES[kind]
    data = rng.integers(0, 256, (rows, columns // elements, size)).astype(np.uint8)
    halves = rng.uniform(0.5, 1.5, (halves_of(kind), *data.shape[:2])).astype(np.float32)
    halves[1:] *= -1 if kind.endswith("_1") else 1  # a minimum, to bring the mean near zero
    halves[1:] *= 8 if kind.endswith("_1") or kind == "Q4_K" else 1

    def stored_as(scale: float) -> FileTensor:
        set_halves(kind, data, halves * np.float32(scale))
        return FileTensor(kind, data.reshape(rows, -1), (rows, columns))

    spread = float(dequantize_blocks(kind, stored_as(2**-6).data).std()) * 2**6
    return stored_as(1 / (spread * columns**0.5))


@dataclass
class RandomCheckpoint:
    """A model that is in no file. `kind`: the type of its matrices."""

    config: ModelConfig
    kind: str = "F32"
    seed: int = 0
    change: Callable[[str, Any], None] = lambda name, values: None  # spoils weights
    path: Path = Path("random")

    def weights(self) -> Iterator[tuple[str, FileTensor]]:
        rng = np.random.default_rng(self.seed)
        for name, shape in weight_shapes(self.config).items():
            stored = self._weight(name, shape, rng)
            self.change(name, stored.data)
            yield name, stored

    def _weight(self, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> FileTensor:
        if len(shape) == 1 or name == "position_embed.weight":
            middle = 1.0 if "norm.weight" in name and not self.config.norm_plus_one else 0.0
            return FileTensor.from_float32(
                (middle + 0.2 * rng.standard_normal(shape)).astype(np.float32)
            )
        if name == "embed.weight" and self.kind in FLOATS:
            return floats(self.kind, rng.standard_normal(shape) * 0.5)
        if len(shape) == 3:
            parts = [random_blocks(self.kind, *shape[1:], rng) for _ in range(shape[0])]
            return FileTensor.stacked(parts)
        return random_blocks(self.kind, *shape, rng)

    losses = ""

    def bits_per_weight(self) -> float:
        return 32.0


@dataclass
class Text:
    """Tokens in pages of their own, of which some were read already."""

    tokens: list[int]
    pages: list[int]
    read: int = 0


@dataclass
class Library:
    """Hands out texts in pages that lie in no order."""

    pages: int
    vocab_size: int
    seed: int = 0
    rng: np.random.Generator = field(init=False)
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.free = self.rng.permutation(self.pages).tolist()

    def text(self, length: int) -> Text:
        tokens = self.rng.integers(0, self.vocab_size, length).tolist()
        return self.again(tokens)

    def again(self, tokens: Sequence[int]) -> Text:
        """The same tokens once more, in other pages."""
        return Text(list(tokens), [self.free.pop() for _ in range(-(-len(tokens) // PAGE))])


def batch_of(parts: Sequence[tuple[Text, int]], look: ObserveRequest | None = None) -> StepBatch:
    """Return a batch with the next tokens of each text, and logits of all of them."""
    counts = [count for _, count in parts]
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    spans = [(text, text.read, text.read + count) for text, count in parts]
    tokens = np.array([token for text, a, b in spans for token in text.tokens[a:b]], np.int64)
    positions = np.concatenate([np.arange(a, b) for _, a, b in spans]).astype(np.int64)
    table = [
        (row, column, page)
        for row, (text, _) in enumerate(parts)
        for column, page in enumerate(text.pages)
    ]
    return StepBatch(
        tokens,
        positions,
        positions + 1,
        starts,
        slots=np.arange(len(parts)),
        table_updates=TableUpdates(*np.array(table).T),
        logits_indices=np.arange(starts[-1]),
        observe=look,
    )


def read(backend: Backend, parts: Sequence[tuple[Text, int]]) -> list[Floats]:
    """Read the next tokens of several texts in one run; gives each text's logits."""
    return look(backend, parts, None)[0]


def read_to_last(backend: Backend, parts: Sequence[tuple[Text, int]]) -> list[Floats]:
    """`read` with the logits of the last token of each text only."""
    batch = batch_of(parts)
    ran = backend.launch(replace(batch, logits_indices=batch.row_starts[1:] - 1)).result()
    for text, count in parts:
        text.read += count
    return np.split(host(ran.logits), len(parts))


def look(
    backend: Backend, parts: Sequence[tuple[Text, int]], taps: ObserveRequest | None
) -> tuple[list[Floats], Observations | None]:
    batch = batch_of(parts, taps)
    ran = backend.launch(batch).result()
    for text, count in parts:
        text.read += count
    return np.split(host(ran.logits), batch.row_starts[1:-1]), ran.observations


def host(logits: Logits) -> Floats:
    """Logits as numpy has them, wherever they lie."""
    return logits if isinstance(logits, np.ndarray) else logits.float().cpu().numpy()


def read_whole(backend: Backend, text: Text, chunk: int) -> Floats:
    """All logits of a text that is read in chunks, alone."""
    rows = []
    while text.read < len(text.tokens):
        rows += read(backend, [(text, min(chunk, len(text.tokens) - text.read))])
    return np.concatenate(rows)
