"""A frozen causal model and its twin over the same rows: who sees whom, and the two passes.

    halves = Halves(config, rows=48, length=640, device=device)
    halves.place(document_starts(batch.documents), block_starts)
    vectors = halves.read(causal, tokens)           # the clean half; its keys and values are kept
    x = halves.guess(twin, noisy)                   # [copies * rows, length, width]

The clean half is computed by the causal model as always: nothing of it depends on the twin. In the
noisy half each block sees itself, both ways, and the clean keys and values before it. Several noisy
copies of the rows, one below the other, share one clean pass.

Where documents and blocks begin lies in tensors that stay where they are and get new numbers with
each batch. What a GPU compiled for the masks then never has to be compiled again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from unspool.model.config import ModelConfig
from unspool.model.transformer import Attention, Transformer
from unspool.train.learning.forward import Allowed, Sight, hidden, looking, residuals


def document_starts(documents: Tensor) -> Tensor:
    """Where the document of each token begins, from the documents' numbers [rows, length]."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    new = torch.ones_like(documents, dtype=torch.bool)
    new[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.where(new, places, 0).cummax(1).values


def block_starts(starts: Tensor, sizes: Tensor, offsets: Tensor) -> Tensor:
    """Where the block of each token begins: blocks of a row's size [rows, 1], counted from the
    document's start, the first of them shorter by the row's offset."""
    places = torch.arange(starts.shape[1], device=starts.device)[None]
    grid = (places - starts + offsets) // sizes * sizes - offsets + starts
    return torch.maximum(starts, grid)


class Kept:
    """Looks as it is told to, and keeps the keys and values that it saw."""

    def __init__(self, sight: Sight) -> None:
        self.sight = sight
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    def __call__(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.key, self.value = key, value
        return self.sight(attention, query, key, value)


class Beside:
    """Looks at keys and values of the clean half, and behind those at its own."""

    def __init__(self, sight: Sight, kept: Kept, copies: int) -> None:
        assert kept.key is not None and kept.value is not None
        self.sight = sight
        self.key = kept.key.repeat(copies, 1, 1, 1)
        self.value = kept.value.repeat(copies, 1, 1, 1)

    def __call__(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        both = torch.cat((self.key, key), 2), torch.cat((self.value, value), 2)
        return self.sight(attention, query, *both)


class Halves:
    """Both halves of rows of one shape."""

    def __init__(
        self, config: ModelConfig, rows: int, length: int, device: torch.device, copies: int = 2
    ) -> None:
        self.config, self.rows, self.length, self.copies = config, rows, length, copies
        self.documents = torch.zeros(rows, length, dtype=torch.int32, device=device)
        self.blocks = torch.zeros_like(self.documents)
        self._clean, self._beside, self._whole = self._rules()
        self._kept: list[Kept] = []

    def place(self, documents: Tensor, blocks: Tensor | None = None) -> None:
        """Say where the documents of a batch begin, and its blocks."""
        self.documents.copy_(documents)
        if blocks is not None:
            self.blocks.copy_(blocks)

    def read(self, model: Transformer, tokens: Tensor) -> Tensor:
        """The causal model's vectors; nothing of it is trained."""
        sight = self._sight(self._clean, self.rows, self.length)
        self._kept = [Kept(sight) for _ in range(self.config.layers)]
        with torch.no_grad():
            return hidden(model, tokens, self._kept)

    def inner(
        self, model: Transformer, tokens: Tensor, layers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """What goes into some layers of the causal model [rows, length, layers, width], and what
        comes out of the last."""
        found = []
        for number, x in enumerate(
            residuals(model, tokens, self._sight(self._clean, self.rows, self.length))
        ):
            if number in layers:
                found.append(x)
        return torch.stack(found, 2), x

    def guess(self, model: Transformer, noisy: Tensor) -> Tensor:
        """The twin's vectors of noisy copies of what was read last, [copies * rows, length]."""
        sight = self._sight(self._beside, self.copies * self.rows, 2 * self.length)
        return hidden(model, noisy, [Beside(sight, kept, self.copies) for kept in self._kept])

    def whole(self, model: Transformer, noisy: Tensor) -> Tensor:
        """The vectors of noisy copies in which each token sees its whole document."""
        return hidden(model, noisy, self._sight(self._whole, self.copies * self.rows, self.length))

    def _sight(self, rule: Callable[[int], Allowed], rows: int, keys: int) -> Sight:
        windows = {self.config.window(layer) for layer in range(self.config.layers)}
        device = self.documents.device
        return Sight(
            {w: looking(rule(w), rows, self.length, keys, device, self.config) for w in windows}
        )

    def _rules(self) -> tuple[Callable[[int], Allowed], ...]:
        """Who sees whom in a layer with a window (0: none); each rule is made once, because
        another function, even if it says the same, would be compiled again."""
        documents, blocks, rows, length = self.documents, self.blocks, self.rows, self.length

        def near(window: int, query: Any, place: Any) -> Any:
            return (place > query - window) if window else (place >= 0)

        @cache
        def clean(window: int) -> Allowed:
            def allowed(row: Any, head: Any, query: Any, key: Any) -> Any:
                inside = (key <= query) & (key >= documents[row % rows, query])
                return inside & near(window, query, key)

            return allowed

        @cache
        def beside(window: int) -> Allowed:
            def allowed(row: Any, head: Any, query: Any, key: Any) -> Any:
                row = row % rows
                own, place = key >= length, key % length
                block = blocks[row, query]
                text = ~own & (place < block) & (place >= documents[row, query])
                seen = text | (own & (blocks[row, place] == block))
                return seen & near(window, query, place)

            return allowed

        @cache
        def whole(window: int) -> Allowed:
            def allowed(row: Any, head: Any, query: Any, key: Any) -> Any:
                row = row % rows
                together = documents[row, query] == documents[row, key]
                return together & near(window, query, key) & near(window, key, query)

            return allowed

        return clean, beside, whole
