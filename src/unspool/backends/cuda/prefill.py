"""Prefill and observed steps: the model's kernels, launched one by one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from unspool.backends.cuda import attention
from unspool.backends.cuda.adapters import Adapt
from unspool.backends.cuda.attention import PAGE_SIZE
from unspool.backends.cuda.experts import ExpertScratch
from unspool.backends.cuda.recurrent import StateRows, prefill_state_rows
from unspool.backends.cuda.recurrent import recur as run_recurrence
from unspool.backends.cuda.runner import ActivationBuffers, LayerHooks, LayerOps, ModelRunner
from unspool.backends.cuda.step_io import to_device
from unspool.backends.step import Ints, StepBatch, max_int

_TOKENS_PER_OUTPUT = 8  # with at least as many, the last layer ends early for the other tokens


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Prefill tokens of a step, on the device."""

    tokens: Tensor
    rows: attention.DecodeRows
    joined: attention.DecodeRows  # the first rows: next tokens of texts that are decoded
    longest_joined: int  # longest context of these
    tiles: dict[attention.PrefillShape, Tensor]  # work lists of the attention kernel
    long_chunks: list[attention.LongChunk]
    states: StateRows | None
    logits_index: Tensor  # tokens whose logits are returned
    longest_logits: int  # longest context of these
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
        num_joined: int = 0,
    ) -> PrefillBatch:
        """Copy the prefill tokens of a step to the device.

        Args:
            batch_rows: rows of the batch that are prefilled.
            token_index: indices of their tokens in the batch.
            logits_index: which of these tokens' logits are returned.
            tokens: their token ids, on the device.
            adapters: adapter slot of each token; None: no token has an adapter.
            num_joined: how many of the first rows are decoded; the others are chunks of prompts.
        """
        runner = self._runner
        device, inputs, dtype = runner.weights.device, runner.inputs, runner.weights.dtype
        counts = np.diff(batch.row_starts)[batch_rows]
        starts = np.concatenate(([0], np.cumsum(counts)))
        table_rows, count = batch.slots[batch_rows] + 1, len(token_index)
        positions, ends = batch.positions[token_index], batch.visible_end[token_index]
        # Aligned rows of any length: Triton compiles kernels anew for unaligned tensors.
        indices = np.zeros((3, -(-count // 4) * 4), np.int32)
        indices[0, :count] = np.repeat(table_rows, counts)
        indices[1, :count] = positions
        indices[2, :count] = ends
        on_device = to_device(indices, device)
        rows, joined = (
            attention.DecodeRows(inputs.table, *on_device[:, :n])
            for n in (count, int(starts[num_joined]))
        )
        shapes = {
            attention.prefill_shape(layer, dtype, device, runner.exact)
            for layer in runner.attention_layers.values()
        }
        chunk_starts, chunk_slots = starts[num_joined:], table_rows[num_joined:]
        is_long = attention.long_chunks(chunk_starts, positions, ends)
        tiles = {
            shape: to_device(
                attention.chunk_tiles(chunk_starts, chunk_slots, ends, shape, is_long), device
            )
            for shape in shapes
        }
        edges = chunk_starts.tolist()
        long_chunks = [
            attention.LongChunk(
                edges[n], edges[n + 1] - edges[n], int(positions[edges[n]]),
                inputs.table[chunk_slots[n], : -(-int(ends[edges[n + 1] - 1]) // PAGE_SIZE)],
            )
            for n in np.flatnonzero(is_long)
        ]  # fmt: skip
        states = None
        if runner.recurrent_layers:
            is_mine = np.isin(batch.state_captures[:, 0], token_index)
            captures = batch.state_captures[is_mine]
            captures = np.stack((token_index.searchsorted(captures[:, 0]), captures[:, 1]), 1)
            states = prefill_state_rows(
                starts, batch.state_slots[batch_rows], captures, device, dtype
            )
        logits_rows = to_device(logits_index, device)
        longest_joined = max_int(ends[: len(joined)]) if len(joined) else 0
        longest_logits = max_int(ends[logits_index]) if len(logits_index) else 0
        return PrefillBatch(
            tokens, rows, joined, longest_joined, tiles, long_chunks, states, logits_rows,
            longest_logits, adapters,
        )  # fmt: skip

    def run(self, prefill: PrefillBatch, hooks: LayerHooks | None = None) -> Tensor:
        """Run the model; return logits [requested, vocabulary]."""
        runner = self._runner
        weights, inputs, pages = runner.weights, runner.inputs, runner.pages
        spare_rows = attention.LONG_BLOCK if prefill.long_chunks else 0
        a = ActivationBuffers(weights, len(prefill.tokens), spare_rows)
        adapt, adapt_head = self._adapters_for(prefill)
        ops, logits_index = LayerOps(runner, a, adapt), prefill.logits_index
        outputs = None  # rows that are needed after the last attention or recurrence
        has_few = len(logits_index) <= min(inputs.rows, len(prefill.tokens) // _TOKENS_PER_OUTPUT)
        if has_few and hooks is None and prefill.adapters is None:
            outputs = logits_index
        runner.embed(ops, prefill.tokens, prefill.rows.positions, inputs.no_updates, hooks)

        def attend(layer: int, qkv: Tensor, out: Tensor) -> None:
            shape = runner.attention_layers[layer]
            keys, values = pages.keys(layer), pages.values(layer)
            work = attention.prefill_shape(shape, weights.dtype, weights.device, runner.exact)
            tiles = prefill.tiles[work]
            attention.store_keys(qkv, keys, values, shape, prefill.rows, pdl=False)
            if outputs is not None and layer == runner.last_mixer:
                if len(outputs):
                    rows, mixed = prefill.rows.at(outputs), out[: len(outputs)]
                    longest = prefill.longest_logits
                    runner.decode_attention(layer, qkv[outputs], mixed, rows, longest)
                    out[outputs] = mixed.clone()
                return
            attention.prefill_attention(
                qkv, out, keys, values, shape, prefill.rows, tiles, exact=runner.exact
            )
            for chunk in prefill.long_chunks if work.skips_long else ():
                attention.attend_long(qkv, out, keys, values, shape, chunk)
            joined = prefill.joined
            if len(joined):
                runner.decode_attention(
                    layer, qkv[: len(joined)], out[: len(joined)], joined, prefill.longest_joined
                )

        def recur(layer: int, projected: Tensor, out: Tensor, stats: Tensor | None) -> None:
            assert prefill.states is not None
            run_recurrence(
                projected, out, runner.recurrent_layers[layer], prefill.states, pdl=runner.pdl,
                exact=runner.exact, stats=stats,
            )  # fmt: skip

        scratch = ExpertScratch.for_tokens(a.rows, weights.config, weights)
        runner.layers(ops, attend, recur, scratch, hooks, outputs)
        shape = (len(logits_index), weights.config.vocab_size)
        logits = torch.empty(shape, dtype=weights.dtype, device=weights.device)
        if len(logits):
            ops.adapt = adapt_head
            runner.head(ops, logits, logits_index if outputs is None else None, hooks)
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
