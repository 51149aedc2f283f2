"""Forward passes of a frozen causal model and its twin over the same rows.

    halves = Halves(config, rows=48, length=640, device=device)
    halves.place(document_starts(batch.documents), block_starts)
    vectors = halves.read(causal, tokens)           # the clean pass; stores keys and values
    x = halves.guess(twin, noisy)                   # [copies * rows, length, width]

The clean pass is the ordinary one of the causal model and does not depend on the twin. In the noisy
pass each block attends to itself, bidirectionally, and to the clean keys and values before it.
Several noisy copies of the rows share one clean pass.

The starts of documents and blocks are in fixed tensors that are overwritten for each batch, so the
masks are compiled only once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from unspool.model.config import ModelConfig
from unspool.model.transformer import Attention, Transformer
from unspool.train.learning.forward import (
    AttentionMask,
    MaskFunction,
    build_mask,
    hidden_states,
    layer_states,
)


def document_starts(documents: Tensor) -> Tensor:
    """Start of each token's document, from document indices [rows, length]."""
    places = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    new = torch.ones_like(documents, dtype=torch.bool)
    new[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return torch.where(new, places, 0).cummax(1).values


def block_starts(starts: Tensor, sizes: Tensor, offsets: Tensor) -> Tensor:
    """Start of each token's block.

    Blocks have the size of their row [rows, 1] and are counted from the document's start; the first
    one is shorter by the row's offset.
    """
    places = torch.arange(starts.shape[1], device=starts.device)[None]
    grid = (places - starts + offsets) // sizes * sizes - offsets + starts
    return torch.maximum(starts, grid)


class RecordingAttention:
    """Attention that stores its keys and values."""

    def __init__(self, sight: AttentionMask) -> None:
        self.sight = sight
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    def __call__(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.key, self.value = key, value
        return self.sight(attention, query, key, value)


class NoisyAttention:
    """Attention to the clean keys and values, followed by its own."""

    def __init__(self, sight: AttentionMask, clean: RecordingAttention, copies: int) -> None:
        assert clean.key is not None and clean.value is not None
        self.sight = sight
        self.key = clean.key.repeat(copies, 1, 1, 1)
        self.value = clean.value.repeat(copies, 1, 1, 1)

    def __call__(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = torch.cat((self.key, key), 2), torch.cat((self.value, value), 2)
        return self.sight(attention, query, keys, values)


class CleanNoisyPasses:
    """The clean and the noisy pass over batches of one shape."""

    def __init__(
        self, config: ModelConfig, rows: int, length: int, device: torch.device, copies: int = 2
    ) -> None:
        self.config, self.rows, self.length, self.copies = config, rows, length, copies
        self.documents = torch.zeros(rows, length, dtype=torch.int32, device=device)
        self.blocks = torch.zeros_like(self.documents)
        self._clean_rule, self._noisy_rule, self._full_rule = self._mask_rules()
        self._recorded: list[RecordingAttention] = []

    def set_starts(self, documents: Tensor, blocks: Tensor | None = None) -> None:
        """Set the starts of documents and blocks of the next batch."""
        self.documents.copy_(documents)
        if blocks is not None:
            self.blocks.copy_(blocks)

    def clean_pass(self, model: Transformer, tokens: Tensor) -> Tensor:
        """Hidden states of the causal model, without gradients."""
        mask = self._attention_mask(self._clean_rule, self.rows, self.length)
        self._recorded = [RecordingAttention(mask) for _ in range(self.config.layers)]
        with torch.no_grad():
            return hidden_states(model, tokens, self._recorded)

    def layer_inputs(
        self, model: Transformer, tokens: Tensor, layers: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Inputs of some layers of the causal model [rows, length, layers, width], and the output
        of the last layer."""
        mask = self._attention_mask(self._clean_rule, self.rows, self.length)
        inputs = []
        for number, x in enumerate(layer_states(model, tokens, mask)):
            if number in layers:
                inputs.append(x)
        return torch.stack(inputs, 2), x

    def noisy_pass(self, model: Transformer, noisy: Tensor) -> Tensor:
        """Hidden states of the twin for noisy copies [copies * rows, length] of the last `read`."""
        mask = self._attention_mask(self._noisy_rule, self.copies * self.rows, 2 * self.length)
        layers = [NoisyAttention(mask, clean, self.copies) for clean in self._recorded]
        return hidden_states(model, noisy, layers)

    def bidirectional_pass(self, model: Transformer, noisy: Tensor) -> Tensor:
        """Hidden states of noisy copies with full attention within documents."""
        mask = self._attention_mask(self._full_rule, self.copies * self.rows, self.length)
        return hidden_states(model, noisy, mask)

    def _attention_mask(
        self, rule: Callable[[int], MaskFunction], rows: int, keys: int
    ) -> AttentionMask:
        windows = {self.config.window(layer) for layer in range(self.config.layers)}
        device = self.documents.device
        return AttentionMask(
            {w: build_mask(rule(w), rows, self.length, keys, device, self.config) for w in windows}
        )

    def _mask_rules(self) -> tuple[Callable[[int], MaskFunction], ...]:
        """Mask functions by sliding window (0: none), for the clean, noisy and full pass.

        Each is cached, because torch compiles every new function object again.
        """
        documents, blocks, rows, length = self.documents, self.blocks, self.rows, self.length

        def near(window: int, query: Any, place: Any) -> Any:
            return (place > query - window) if window else (place >= 0)

        @cache
        def clean(window: int) -> MaskFunction:
            def allowed(row: Any, head: Any, query: Any, key: Any) -> Any:
                inside = (key <= query) & (key >= documents[row % rows, query])
                return inside & near(window, query, key)

            return allowed

        @cache
        def noisy(window: int) -> MaskFunction:
            def allowed(row: Any, head: Any, query: Any, key: Any) -> Any:
                row = row % rows
                is_noisy, place = key >= length, key % length
                block = blocks[row, query]
                before = ~is_noisy & (place < block) & (place >= documents[row, query])
                visible = before | (is_noisy & (blocks[row, place] == block))
                return visible & near(window, query, place)

            return allowed

        @cache
        def full(window: int) -> MaskFunction:
            def allowed(row: Any, head: Any, query: Any, key: Any) -> Any:
                row = row % rows
                same_document = documents[row, query] == documents[row, key]
                return same_document & near(window, query, key) & near(window, key, query)

            return allowed

        return clean, noisy, full
