"""Prefill and observed steps, launched kernel by kernel.

Prefill kernels run long enough to hide the launch overhead. The computation is that of decode; only
attention processes many queries of a sequence in one program.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from unspool.backends.cuda import attention
from unspool.backends.cuda.adapters import Adapt
from unspool.backends.cuda.experts import ExpertScratch
from unspool.backends.cuda.inputs import to_device
from unspool.backends.cuda.program import ActivationBuffers, LayerObserver, ModelRunner
from unspool.backends.step import Ints, StepBatch


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Prefill tokens of a step, on the device."""

    tokens: Tensor
    rows: attention.DecodeRows
    tiles: Tensor  # one entry per program of the attention kernel
    logits_index: Tensor  # tokens whose logits are returned
    adapters: Ints | None  # adapter slot of each token


class PrefillRunner:
    """Prefills the KV cache of a model runner."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def build_batch(
        self,
        batch: StepBatch,
        batch_rows: Ints,
        token_index: Ints,
        logits_index: Ints,
        tokens: Tensor,
        adapters: Ints | None = None,
    ) -> PrefillBatch:
        """Copy the prefill tokens of a step to the device.

        Args:
            batch_rows: rows of the batch that are prefilled.
            token_index: indices of their tokens in the batch.
            logits_index: which of these tokens' logits are returned.
            tokens: their token ids, on the device.
            adapters: adapter slot of each token; None: no token has an adapter.
        """
        device, inputs = self._runner.weights.device, self._runner.inputs
        counts = np.diff(batch.row_starts)[batch_rows]
        slots = np.repeat(batch.slots[batch_rows], counts) + 1
        indices = np.concatenate(
            (slots, batch.positions[token_index], batch.visible_end[token_index])
        )
        on_device = to_device(indices.astype(np.int32), device).view(3, -1)
        rows = attention.DecodeRows(inputs.table, on_device[0], on_device[1], on_device[2])
        starts = np.concatenate(([0], np.cumsum(counts)))
        tiles = attention.chunk_tiles(
            starts,
            batch.slots[batch_rows] + 1,
            batch.visible_end[token_index],
            self._runner.weights.config,
            attention.prefill_rows(self._runner.weights.dtype, self._runner.exact),
        )
        return PrefillBatch(
            tokens, rows, to_device(tiles, device), to_device(logits_index, device), adapters
        )

    def run(self, prefill: PrefillBatch, observer: LayerObserver | None = None) -> Tensor:
        """Run the model; return logits [requested, vocabulary]."""
        runner = self._runner
        weights, inputs, pages = runner.weights, runner.inputs, runner.pages
        a = ActivationBuffers(weights, len(prefill.tokens))
        runner.embed(prefill.tokens, prefill.rows.positions, a.h, inputs.no_updates)

        def attend(layer: int, qkv: Tensor, heads_out: Tensor) -> None:
            shape, keys, values = (
                runner.attention_layers[layer],
                pages.keys(layer),
                pages.values(layer),
            )
            attention.store_keys(qkv, keys, values, shape, prefill.rows, pdl=False)
            attention.prefill_attention(
                qkv, heads_out, keys, values, shape, prefill.rows, prefill.tiles, exact=runner.exact
            )

        scratch = ExpertScratch.for_tokens(len(a.h), weights.config, weights)
        adapt, adapt_head = self._adapters_for(prefill)
        runner.layers(a, attend, scratch, observer, adapt)
        x = a.x[prefill.logits_index]
        logits = torch.empty(
            len(x), weights.config.vocab_size, dtype=weights.dtype, device=weights.device
        )
        if len(x):
            runner.head(x, logits, adapt_head)
        return logits

    def _adapters_for(self, prefill: PrefillBatch) -> tuple[Adapt | None, Adapt | None]:
        """Functions that add the adapters' outputs in the layers and in the head."""
        if prefill.adapters is None:
            return None, None
        adapters, slots = self._runner.adapters, prefill.adapters
        on_device = to_device(slots.astype(np.int32), prefill.tokens.device)
        head_adapters = adapters.for_rows(on_device[prefill.logits_index])
        if self._runner.exact:  # same order of summation as decode
            return adapters.for_rows(on_device), head_adapters
        starts = np.concatenate(([0], np.flatnonzero(np.diff(slots)) + 1, [len(slots)])).tolist()
        chunks = [
            (first, last, int(slots[first])) for first, last in pairwise(starts) if slots[first]
        ]
        return adapters.for_chunks(chunks), head_adapters
