"""Run a model on the GPU: decode steps as one program of kernels, prefill."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from unspool.backends.cuda import attention
from unspool.backends.cuda.adapters import Adapt, CudaAdapters
from unspool.backends.cuda.experts import ExpertScratch, run_experts
from unspool.backends.cuda.kernels import elementwise as row_kernels
from unspool.backends.cuda.kernels.common import ACTIVATIONS
from unspool.backends.cuda.kv_cache import KVCache
from unspool.backends.cuda.matmul import Epilogue, NormWeights, next_power_of_two, norm_kind
from unspool.backends.cuda.step_io import MAX_TABLE_UPDATES, StepInputs, to_device
from unspool.backends.cuda.weights import LayerWeights, PlainMatrix, WeightMatrix, Weights
from unspool.backends.step import Ints, StepBatch
from unspool.model.config import sinusoidal

# -- Forward pass of the model as kernel launches, from tokens to logits

_GLU_BLOCK = 1024
_MAX_FUSED_ROWS = 16  # rows that may use the fused GEMVs ...
_MAX_FUSED_BYTES = 2 << 30  # ... if they read at most this much in total, mostly from the L2 cache


class ActivationBuffers:
    """Buffers between the kernels, for up to `rows` rows."""

    def __init__(self, weights: Weights, rows: int) -> None:
        config = weights.config
        inner = max(config.ff_width, config.expert_width)

        def new(width: int) -> Tensor:
            return torch.empty(rows, width, dtype=weights.dtype, device=weights.device)

        self.h = new(config.width)  # the residual stream
        self.h_attended = new(config.width)  # h + attention output, for parallel layers
        self.x = new(config.width)  # input of the next GEMM
        self.attn_out, self.ffn_out = new(config.width), new(config.width)
        self.qkv = new((config.heads + 2 * config.kv_heads) * config.head_width)
        self.heads_out = new(config.heads * config.head_width)
        self.gate_up = new(inner * (1 + config.gated))
        self.inner = new(inner)

    def first_rows(self, rows: int) -> ActivationBuffers:
        """Views of the first rows."""
        part = copy.copy(self)
        for name, tensor in vars(self).items():
            setattr(part, name, tensor[:rows])
        return part


class LayerObserver(Protocol):
    """Receives intermediate values while the layers run."""

    def on_residual(self, layer: int, h: Tensor) -> None:
        """Called with the residual stream before each layer, and once after the last."""

    def on_queries(self, layer: int, qkv: Tensor) -> None:
        """Called with queries after RoPE, once the layer's keys are in the KV cache."""

    def on_outputs(self, attn_out: Tensor, ffn_out: Tensor, layer: LayerWeights) -> None:
        """Called with the outputs of attention and feed-forward, before their post norms."""


Attend = Callable[[int, Tensor, Tensor], None]
"""Attention of one layer: (layer, qkv, out)."""


class ModelRunner:
    """Launches the kernels of the model on buffers at fixed addresses."""

    def __init__(
        self, weights: Weights, pages: KVCache, inputs: StepInputs, context: int, exact: bool
    ) -> None:
        config = weights.config
        self.weights, self.pages, self.inputs, self.exact = weights, pages, inputs, exact
        self.pdl = supports_pdl(weights.device)
        rows = inputs.rows
        self.buffers = ActivationBuffers(weights, rows)
        self.adapters = CudaAdapters(weights, rows)
        shape = (rows, config.vocab_size)
        self.logits = torch.empty(shape, dtype=weights.dtype, device=weights.device)
        self.attention_layers = attention.attention_layers(weights, context)
        self._keys = [pages.keys(layer) for layer in range(config.layers)]
        self._values = [pages.values(layer) for layer in range(config.layers)]
        self._scratch = attention.AttentionScratch.for_rows(rows, config, weights.device)
        self._expert_scratch = ExpertScratch.for_tokens(rows, config, weights)
        self._position_embed = position_vectors(weights, context)
        self.max_fused_rows = max_fused_rows(weights)
        # Rounded to the dtype of the weights first, as these models were trained.
        self._embed_scale = float(torch.tensor(config.embedding_scale, dtype=weights.dtype))

    # -- decode: rows of `inputs` to `logits`; can be captured ------------------------------------

    def decode(
        self,
        count: int,
        max_context: int,
        single_tokens: bool,
        has_adapters: bool = False,
        observer: LayerObserver | None = None,
    ) -> None:
        """Run the first `count` rows.

        Args:
            max_context: longest context of any row, in tokens.
            single_tokens: each row is the only new token of its sequence.
            has_adapters: some rows have a LoRA adapter.
        """
        if count <= self.max_fused_rows and not (self.exact or has_adapters):
            self._decode_fused(count, max_context, single_tokens, observer)
        else:
            self._decode_batched(count, max_context, single_tokens, has_adapters, observer)

    def _decode_batched(
        self,
        count: int,
        max_context: int,
        single_tokens: bool,
        has_adapters: bool,
        observer: LayerObserver | None,
    ) -> None:
        a = self.buffers.first_rows(count)
        self._embed_inputs(a.h)
        rows = self.inputs.decode_rows(count)
        single_tokens = single_tokens and not self.exact  # same order of summation as prefill

        def attend(layer: int, qkv: Tensor, heads_out: Tensor) -> None:
            self._attend(layer, qkv, heads_out, rows, max_context, single_tokens)

        adapt = None
        if has_adapters:
            adapt = self.adapters.for_rows(self.inputs.adapters[:count], pdl=self.pdl)
        self.layers(a, attend, self._expert_scratch, observer, adapt)
        self.head(a.x, self.logits[:count], adapt)

    def _decode_fused(
        self, count: int, max_context: int, single_tokens: bool, observer: LayerObserver | None
    ) -> None:
        config, a = self.weights.config, self.buffers.first_rows(count)
        self._embed_inputs(a.h)
        rows, inner = self.inputs.decode_rows(count), a.inner[:, : config.ff_width]
        for number, layer in enumerate(self.weights.layers):
            if observer:
                observer.on_residual(number, a.h)
            # `attend` must not read the block table before `begin` has updated it.
            epilogue = self._epilogue(norm=layer.attention_norm, early=number > 0)
            layer.qkv.gemv(a.h, a.qkv, epilogue)
            self._norm_qk(a.qkv, layer)
            self._attend(number, a.qkv, a.heads_out, rows, max_context, single_tokens)
            residual = a.h_attended if config.parallel else a.h
            if layer.attention_post_norm is None:
                layer.out.gemv(a.heads_out, residual, self._epilogue(residual=a.h))
            else:
                layer.out.gemv(a.heads_out, a.attn_out, self._epilogue())
                self._add_norm(a, a.attn_out, post=layer.attention_post_norm, out=a.h)
            if layer.gate_up is None or layer.down is None:
                self._add_norm(a, norm=layer.feed_norm, out=a.x)
                self._feed_forward(layer, a, a.x, a.ffn_out, self._expert_scratch)
                if config.parallel:
                    a.h.copy_(a.h_attended)
                self._add_norm(a, a.ffn_out, post=layer.feed_post_norm, out=a.h)
                continue
            epilogue = self._epilogue(
                norm=layer.feed_norm, activation=config.activation, gated=config.gated
            )
            layer.gate_up.gemv(a.h, inner, epilogue)
            if layer.feed_post_norm is None:
                layer.down.gemv(inner, a.h, self._epilogue(residual=residual))
            else:
                layer.down.gemv(inner, a.ffn_out, self._epilogue())
                self._add_norm(a, a.ffn_out, post=layer.feed_post_norm, out=a.h)
        if observer:
            observer.on_residual(len(self.weights.layers), a.h)
        logits = self.logits[:count]
        self.weights.head.gemv(a.h, logits, self._epilogue(norm=self.weights.norm))
        self._softcap(logits)

    def _attend(
        self, layer: int, qkv: Tensor, heads_out: Tensor, rows: attention.DecodeRows,
        max_context: int, single_tokens: bool,
    ) -> None:  # fmt: skip
        shape = self.attention_layers[layer]
        keys, values = self._keys[layer], self._values[layer]
        if not single_tokens:
            attention.store_keys(qkv, keys, values, shape, rows, pdl=self.pdl)
        attention.decode_attention(
            qkv, heads_out, keys, values, shape, rows, self._scratch, new=single_tokens,
            pieces=attention.num_pieces(shape, max_context), pdl=self.pdl,
        )  # fmt: skip

    # -- shared by decode and prefill ------------------------------------------------------------

    def layers(
        self,
        a: ActivationBuffers,
        attend: Attend,
        scratch: ExpertScratch,
        observer: LayerObserver | None = None,
        adapt: Adapt | None = None,
    ) -> None:
        """Run all layers, from embeddings in `a.h` to the final norm in `a.x`."""
        config = self.weights.config
        post_norm: NormWeights | None = None  # post norm of the last feed-forward
        first, second = None, None
        for number, layer in enumerate(self.weights.layers):
            self._add_norm(a, first, second, post=post_norm, norm=layer.attention_norm, out=a.x)
            if observer:
                observer.on_residual(number, a.h)
            self._gemm(layer.qkv, a.x, a.qkv, adapt)
            self._norm_qk(a.qkv, layer)
            attend(number, a.qkv, a.heads_out)
            if observer:
                observer.on_queries(number, a.qkv)
            self._gemm(layer.out, a.heads_out, a.attn_out, adapt)
            if config.parallel:
                self._add_norm(a, norm=layer.feed_norm, out=a.x)
                first, second = a.attn_out, a.ffn_out
            else:
                self._add_norm(
                    a, a.attn_out, post=layer.attention_post_norm, norm=layer.feed_norm, out=a.x
                )
                first, second = a.ffn_out, None
            self._feed_forward(layer, a, a.x, a.ffn_out, scratch, adapt)
            post_norm = layer.feed_post_norm
            if observer:
                observer.on_outputs(a.attn_out, a.ffn_out, layer)
        self._add_norm(a, first, second, post=post_norm, norm=self.weights.norm, out=a.x)
        if observer:
            observer.on_residual(len(self.weights.layers), a.h)

    def head(self, x: Tensor, logits: Tensor, adapt: Adapt | None = None) -> None:
        """Logits of normalized hidden states."""
        self._gemm(self.weights.head, x, logits, adapt)
        self._softcap(logits)

    # -- single launches -----------------------------------------------------------------------

    def _embed_inputs(self, h: Tensor) -> None:
        """Update the block table and embed the tokens. First kernel of a step: no PDL."""
        self.embed(self.inputs.tokens, self.inputs.positions, h, self.inputs.updates)

    def embed(self, tokens: Tensor, positions: Tensor, h: Tensor, updates: Tensor) -> None:
        """Embed tokens, picks of the previous step included; apply block table updates."""
        weights, config, inputs = self.weights, self.weights.config, self.inputs
        embed, position_embed = weights.embed, self._position_embed
        packed = not isinstance(embed, PlainMatrix)
        if not isinstance(embed, PlainMatrix):
            embed.embed_tokens(tokens[: len(h)], inputs.previous, h)
        row_kernels.embed_and_update[(len(h) + 1,)](
            updates, inputs.table, tokens, inputs.previous, positions,
            embed.weight if isinstance(embed, PlainMatrix) else h,
            h if position_embed is None else position_embed, h, self._embed_scale,
            MAX_TABLE_UPDATES, D=config.width, DP=next_power_of_two(config.width), UNPACKED=packed,
            SCALED=config.embedding_scale != 1, POSITIONS=position_embed is not None, num_warps=4,
        )  # fmt: skip

    def _add_norm(
        self,
        a: ActivationBuffers,
        first: Tensor | None = None,
        second: Tensor | None = None,
        *,
        post: NormWeights | None = None,
        norm: NormWeights | None = None,
        out: Tensor,
    ) -> None:
        """h += post_norm(first) + second; out = norm(h)."""
        config, h = self.weights.config, a.h
        row_kernels.add_norm[(len(h),)](
            h, h if first is None else first, h if second is None else second,
            *_norm_tensors(post, h), *_norm_tensors(norm, h), out, config.norm_eps,
            D=config.width, DP=next_power_of_two(config.width),
            ADDED=(first is not None) + (second is not None), POST=norm_kind(post),
            NORM=norm_kind(norm), PDL=self.pdl, num_warps=4, launch_pdl=self.pdl,
        )  # fmt: skip

    def _feed_forward(
        self,
        layer: LayerWeights,
        a: ActivationBuffers,
        x: Tensor,
        out: Tensor,
        scratch: ExpertScratch,
        adapt: Adapt | None = None,
    ) -> None:
        config, width = self.weights.config, self.weights.config.ff_width
        if layer.experts is not None:
            run_experts(x, layer.experts, config, out, scratch, pdl=self.pdl, exact=self.exact)
            return
        assert layer.gate_up is not None and layer.down is not None
        gate_up = a.gate_up.view(-1)[: len(x) * width * (1 + config.gated)].view(len(x), -1)
        inner = a.inner.view(-1)[: len(x) * width].view(len(x), -1)
        self._gemm(layer.gate_up, x, gate_up, adapt)
        row_kernels.glu[(len(x), -(-width // _GLU_BLOCK))](
            gate_up, inner, F=width, BF=_GLU_BLOCK, GATED=config.gated,
            ACTIVATION=ACTIVATIONS[config.activation], PDL=self.pdl, num_warps=4,
            launch_pdl=self.pdl,
        )  # fmt: skip
        self._gemm(layer.down, inner, out, adapt)

    def _norm_qk(self, qkv: Tensor, layer: LayerWeights) -> None:
        config = self.weights.config
        if config.qk_norm != "whole" or layer.q_norm is None or layer.k_norm is None:
            return
        query_width = config.heads * config.head_width
        row_kernels.norm_all_heads[(len(qkv), 2)](
            qkv, layer.q_norm.gain, layer.k_norm.gain, config.norm_eps, Q=query_width,
            K=config.kv_width, WIDTH=qkv.shape[1], P=next_power_of_two(query_width), PDL=self.pdl,
            num_warps=4, launch_pdl=self.pdl,
        )  # fmt: skip

    def _gemm(
        self, matrix: WeightMatrix, x: Tensor, out: Tensor, adapt: Adapt | None = None
    ) -> None:
        matrix.gemm(x, out, exact=self.exact, pdl=self.pdl)
        if adapt is not None:
            adapt(matrix, x, out)

    def _softcap(self, logits: Tensor) -> None:
        cap = self.weights.config.logit_softcap
        if cap:
            logits.div_(cap).tanh_().mul_(cap)

    def _epilogue(
        self,
        *,
        norm: NormWeights | None = None,
        activation: str = "none",
        gated: bool = False,
        residual: Tensor | None = None,
        early: bool = True,
    ) -> Epilogue:
        eps = self.weights.config.norm_eps
        return Epilogue(eps, norm, activation, gated, residual, early, self.pdl)


def max_fused_rows(weights: Weights) -> int:
    """Largest batch that uses the fused GEMVs.

    The first row brings the weights into the L2 cache and the other rows read them there, which is
    faster than GEMMs for small models. A row's result does not depend on the batch size.
    """
    if weights.device.type != "cuda" or any(layer.experts is not None for layer in weights.layers):
        return 1  # Triton's interpreter is slow: use torch.mm
    size = sum(matrix.nbytes for matrix in weights.matrices())
    return max(1, min(_MAX_FUSED_ROWS, _MAX_FUSED_BYTES // max(size, 1)))


def position_vectors(weights: Weights, context: int) -> Tensor | None:
    """Absolute position embeddings [context, width]; None if the model has none."""
    if weights.config.positions == "sinusoidal":
        table = torch.from_numpy(sinusoidal(np.arange(context), weights.config.width))
        return table.to(weights.device, weights.dtype)
    return weights.position_embed


def _norm_tensors(norm: NormWeights | None, filler: Tensor) -> tuple[Tensor, Tensor]:
    if norm is None:
        return filler, filler
    return norm.gain, filler if norm.bias is None else norm.bias


def supports_pdl(device: torch.device) -> bool:
    """Whether the GPU has programmatic dependent launch (Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


# -- Prefill and observed steps, launched kernel by kernel


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
