"""Run a model on the GPU: decode steps as one program of kernels, and what prefill shares."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
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
from unspool.backends.cuda.matmul import (
    Addition,
    Epilogue,
    NormWeights,
    next_power_of_two,
    norm_kind,
    norm_tensors,
)
from unspool.backends.cuda.recurrent import RecurrentLayer, RecurrentScratch, StateRows
from unspool.backends.cuda.recurrent import recur as run_recurrence
from unspool.backends.cuda.step_io import MAX_TABLE_UPDATES, StepInputs
from unspool.backends.cuda.weights import (
    AttentionWeights,
    DenseWeights,
    FeedWeights,
    LayerWeights,
    PlainMatrix,
    RecurrentWeights,
    StackedMatrix,
    TokenInputsWeights,
    TokenInputWeights,
    TransformWeights,
    WeightMatrix,
    Weights,
)
from unspool.model.config import sinusoidal

# -- Forward pass of the model as kernel launches, from tokens to logits

_BLOCK = 1024  # columns per program of element-wise kernels
_MAX_FUSED_ROWS = 16  # rows that may use the fused GEMVs ...
_MAX_FUSED_BYTES = 2 << 30  # ... if they read at most this much in total, mostly from the L2 cache


class ActivationBuffers:
    """Buffers between the kernels, for up to `rows` rows. Their rows are as wide as the current
    layer needs. `spare_rows` follow those of the projections and have finite numbers."""

    def __init__(self, weights: Weights, rows: int, spare_rows: int = 0) -> None:
        self.rows, self._width = rows, weights.config.width
        spare = {"projected": spare_rows}
        self._data = {
            name: torch.empty(
                (rows + spare.get(name, 0)) * width, dtype=weights.dtype, device=weights.device
            )
            for name, width in _buffer_widths(weights).items()
        }
        if spare_rows:
            self._data["projected"].zero_()

    def first_rows(self, rows: int) -> ActivationBuffers:
        """The first rows."""
        part = copy.copy(self)
        part.rows, part._data = rows, dict(self._data)
        return part

    def only(self, index: Tensor, weights: Weights) -> ActivationBuffers:
        """Buffers for the rows of `index`, with their residual stream and token inputs."""
        part, widths = ActivationBuffers(weights, len(index)), _buffer_widths(weights)
        for name in ("h", "token_inputs"):
            part.view(name, widths[name]).copy_(self.view(name, widths[name])[index])
        return part

    def swap_residual(self) -> None:
        """Make `x`, where a kernel wrote the new residual stream, the residual stream `h`."""
        self._data["h"], self._data["x"] = self._data["x"], self._data["h"]

    def view(self, name: str, width: int) -> Tensor:
        """Rows of one buffer, [rows, width]."""
        return self._data[name][: self.rows * width].view(self.rows, width)

    @property
    def h(self) -> Tensor:
        """The residual stream."""
        return self.view("h", self._width)

    @property
    def x(self) -> Tensor:
        """The normalized residual stream, input of the next GEMM."""
        return self.view("x", self._width)


def _buffer_widths(weights: Weights) -> dict[str, int]:
    """Largest width of each buffer."""
    config = weights.config
    widths = dict.fromkeys(("h", "x", "attention", "feed", "shared", "router"), config.width)
    widths |= {"projected": 1, "mixed": 1, "gate_up": 1, "inner": 1}
    widths["token_inputs"] = config.layers * config.token_width
    for layer in weights.layers:
        mixer, feed = layer.mixer, layer.feed
        if mixer is not None:
            projection = mixer.qkv if isinstance(mixer, AttentionWeights) else mixer.projection
            widths["projected"] = max(widths["projected"], projection.rows)
            widths["mixed"] = max(widths["mixed"], mixer.out.columns)
        if feed is not None and feed.dense is not None:
            widths["gate_up"] = max(widths["gate_up"], feed.dense.gate_up.rows)
            widths["inner"] = max(widths["inner"], feed.dense.down.columns)
    widths["gate_up"] = max(widths["gate_up"], config.token_width)
    widths["inner"] = max(widths["inner"], config.token_width)
    if config.token_width:
        widths["projected"] = max(widths["projected"], widths["token_inputs"])
    return widths


def activation_bytes(weights: Weights) -> int:
    """Bytes of `ActivationBuffers` for one token."""
    return sum(_buffer_widths(weights).values()) * weights.dtype.itemsize


class LayerHooks(Protocol):
    """Changes and reads intermediate values while the model runs."""

    def wants(self, site: str, layer: int) -> bool:
        """Whether to call it with the values of a site (`interventions.SITES`; "resid" is the
        residual stream before a layer, or after the last)."""

    def __call__(self, site: str, layer: int, x: Tensor) -> None:
        """Read the values [rows, width] of a site, or change them in place."""

    def on_queries(self, layer: int, qkv: Tensor) -> None:
        """Called with queries after RoPE, once the layer's keys are in the KV cache."""

    def recurrent_stats(self, layer: int, rows: int) -> Tensor | None:
        """Called before a recurrent layer, or (rows = 0) a layer without a mixer; may return a
        tensor for the statistics of its state."""


class LayerOps:
    """Products with the weights, and additions to the residual stream: GEMMs for any number of
    rows. Additions are delayed and fused with the next norm."""

    def __init__(
        self, runner: ModelRunner, buffers: ActivationBuffers, adapt: Adapt | None = None
    ) -> None:
        self._runner, self.buffers, self.adapt = runner, buffers, adapt
        self._added: list[Tensor] = []
        self._post: NormWeights | None = None
        self._scale = 1.0

    def normed(self, norm: NormWeights | None, name: str = "x") -> Tensor:
        """The normalized residual stream, in the buffer of this name."""
        out = self.buffers.view(name, self._runner.weights.config.width)
        self._flush(norm, out)
        return out

    def project(
        self, matrix: WeightMatrix, norm: NormWeights | None, out: Tensor, early: bool = True
    ) -> None:
        """out = W · norm(residual stream)."""
        x = self.residual() if norm is None else self.normed(norm)
        self.multiply(matrix, x, out)

    def glu(self, dense: DenseWeights, norm: NormWeights | None, x: Tensor | None = None) -> Tensor:
        """Inner vectors of a feed-forward on the normalized residual stream, or on `x`."""
        gate_up = self.buffers.view("gate_up", dense.gate_up.rows)
        inner = self.buffers.view("inner", dense.down.columns)
        if x is None:
            self.project(dense.gate_up, norm, gate_up)
        else:
            self.multiply(dense.gate_up, x, gate_up)
        self._runner.glu(gate_up, inner)
        return inner

    def multiply(self, matrix: WeightMatrix, x: Tensor, out: Tensor) -> None:
        """out = W · x."""
        matrix.gemm(x, out, exact=self._runner.exact, pdl=self._runner.pdl)
        if self.adapt is not None:
            self.adapt(matrix, x, out)

    def multiply_gate(self, matrix: WeightMatrix, x: Tensor, out: Tensor) -> None:
        """out = x * activation(W · residual stream)."""
        gate = self.buffers.view("gate_up", matrix.rows)
        self.project(matrix, None, gate)
        self._runner.multiply_gate(x, gate, out, self._runner.weights.config.activation)

    def add_product(
        self, matrix: WeightMatrix, x: Tensor, post: NormWeights | None, scale: float = 1.0
    ) -> None:
        """Add post_norm(W · x) to the residual stream, then multiply it by `scale`."""
        # Two delayed additions of a parallel layer need two buffers.
        out = self.buffers.view("shared" if self._added else "attention", matrix.rows)
        self.multiply(matrix, x, out)
        self.add(out, post, scale=scale)

    def add(
        self,
        delta: Tensor,
        post: NormWeights | None,
        second: Tensor | None = None,
        scale: float = 1.0,
    ) -> None:
        """Add post_norm(delta) + second to the residual stream, then multiply it by `scale`."""
        if self._added and (post is not None or second is not None):
            self._flush(None, self.buffers.h)
        if self._runner.weights.config.norm_sums:
            self._added = [delta]
            self._flush(post, self.buffers.h)
            return
        self._added += [delta] if second is None else [delta, second]
        self._post = self._post if post is None else post
        self._scale = scale

    def keep_rows(self, index: Tensor) -> None:
        """Drop all other rows."""
        self.residual()
        self.buffers = self.buffers.only(index, self._runner.weights)

    def residual(self) -> Tensor:
        """The residual stream with all additions."""
        if self._added:
            self._flush(None, self.buffers.h)
        return self.buffers.h

    def _flush(self, norm: NormWeights | None, out: Tensor) -> None:
        self._runner.add_norm(
            self.buffers.h, *self._added, post=self._post, norm=norm, out=out, scale=self._scale
        )
        self._added, self._post, self._scale = [], None, 1.0


class FusedOps(LayerOps):
    """GEMVs for a few rows, with norms and additions fused into them."""

    def project(
        self, matrix: WeightMatrix, norm: NormWeights | None, out: Tensor, early: bool = True
    ) -> None:
        self._gemv(matrix, out, self._runner.epilogue(norm=norm, early=early))

    def glu(self, dense: DenseWeights, norm: NormWeights | None, x: Tensor | None = None) -> Tensor:
        config = self._runner.weights.config
        inner = self.buffers.view("inner", dense.down.columns)
        epilogue = self._runner.epilogue(
            norm=norm if x is None else None, activation=config.activation, gated=config.gated
        )
        if x is None:
            self._gemv(dense.gate_up, inner, epilogue)
        else:
            dense.gate_up.gemv(x, inner, epilogue)
        return inner

    def multiply(self, matrix: WeightMatrix, x: Tensor, out: Tensor) -> None:
        matrix.gemv(x, out, self._runner.epilogue())

    def multiply_gate(self, matrix: WeightMatrix, x: Tensor, out: Tensor) -> None:
        activation = self._runner.weights.config.activation
        epilogue = self._runner.epilogue(activation=activation, residual=x, is_factor=True)
        self._gemv(matrix, out, epilogue)

    def add_product(
        self, matrix: WeightMatrix, x: Tensor, post: NormWeights | None, scale: float = 1.0
    ) -> None:
        if post is not None or scale != 1:
            super().add_product(matrix, x, post, scale)
            return
        h, added_scale = self.residual(), self._runner.weights.config.residual_scale
        matrix.gemv(x, h, self._runner.epilogue(residual=h, scale=added_scale))

    def _gemv(self, matrix: WeightMatrix, out: Tensor, epilogue: Epilogue) -> None:
        """Multiply the residual stream, after the delayed additions."""
        if not self._added or isinstance(matrix, StackedMatrix):
            matrix.gemv(self.residual(), out, epilogue)
            return
        first, *second = self._added
        addition = Addition(
            self.buffers.x, first, second[0] if second else None, self._post,
            self._runner.weights.config.residual_scale, self._scale,
        )  # fmt: skip
        matrix.gemv(self.buffers.h, out, replace(epilogue, addition=addition))
        self._added, self._post, self._scale = [], None, 1.0
        self.buffers.swap_residual()


Attend = Callable[[int, Tensor, Tensor], None]
"""Attention of one layer: (layer, qkv, out)."""
Recur = Callable[[int, Tensor, Tensor, Tensor | None], None]
"""A recurrent layer: (layer, projected, out, statistics)."""


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
        self.recurrent_layers = recurrent_layers(weights, pages)
        self._recurrent_scratch = RecurrentScratch.for_tokens(rows, config, weights.device)
        # Last layer in which a token reads others: afterwards only rows with outputs are needed.
        mixers = [number for number, layer in enumerate(weights.layers) if layer.mixer is not None]
        self.last_mixer = mixers[-1] if mixers else -1
        self._keys = {layer: pages.keys(layer) for layer in self.attention_layers}
        self._values = {layer: pages.values(layer) for layer in self.attention_layers}
        self._scratch = attention.AttentionScratch.for_rows(
            rows, self.attention_layers.values(), weights.device
        )
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
        hooks: LayerHooks | None = None,
    ) -> None:
        """Run the first `count` rows.

        Args:
            max_context: longest context of any row, in tokens.
            single_tokens: each row is the only new token of its sequence.
            has_adapters: some rows have a LoRA adapter.
        """
        inputs, a, logits = self.inputs, self.buffers.first_rows(count), self.logits[:count]
        is_fused = count <= self.max_fused_rows and not (self.exact or has_adapters)
        rows, states = inputs.decode_rows(count), StateRows(*inputs.state_tensors(count))
        adapt = None
        if has_adapters:
            adapt = self.adapters.for_rows(inputs.adapters[:count], pdl=self.pdl)
        ops = FusedOps(self, a) if is_fused else LayerOps(self, a, adapt)

        def attend(layer: int, qkv: Tensor, out: Tensor) -> None:
            if not single_tokens:
                attention.store_keys(
                    qkv, self._keys[layer], self._values[layer], self.attention_layers[layer], rows,
                    pdl=self.pdl,
                )  # fmt: skip
            self.decode_attention(layer, qkv, out, rows, max_context, new=single_tokens)

        def recur(layer: int, projected: Tensor, out: Tensor, stats: Tensor | None) -> None:
            run_recurrence(
                projected, out, self.recurrent_layers[layer], states, pdl=self.pdl,
                exact=self.exact, stats=stats, scratch=self._recurrent_scratch,
            )  # fmt: skip

        # First kernel of a step: no PDL.
        self.embed(ops, inputs.tokens, inputs.positions, inputs.updates, hooks)
        self.layers(ops, attend, recur, self._expert_scratch, hooks)
        self.head(ops, logits, hooks=hooks)

    # -- shared by decode and prefill ------------------------------------------------------------

    def decode_attention(
        self,
        layer: int,
        qkv: Tensor,
        out: Tensor,
        rows: attention.DecodeRows,
        max_context: int,
        *,
        new: bool = False,
    ) -> None:
        """Attention of next tokens, whose longest context has `max_context` tokens.

        `new`: their keys and values are still in `qkv` (see `attention.decode_attention`).
        """
        shape = self.attention_layers[layer]
        attention.decode_attention(
            qkv, out, self._keys[layer], self._values[layer], shape, rows, self._scratch, new=new,
            pieces=attention.num_pieces(shape, max_context), pdl=self.pdl, exact=self.exact,
        )  # fmt: skip

    def layers(
        self,
        ops: LayerOps,
        attend: Attend,
        recur: Recur,
        scratch: ExpertScratch,
        hooks: LayerHooks | None = None,
        outputs: Tensor | None = None,
    ) -> None:
        """Run all layers, from embeddings to the last residual.

        outputs: rows whose last residual is needed; None: all. The others end in `last_mixer`.
        """
        for number, layer in enumerate(self.weights.layers):
            if hooks and hooks.wants("resid", number):
                hooks("resid", number, ops.residual())
            mixed = self._mix(ops, number, layer, attend, recur, hooks)
            if outputs is not None and number == self.last_mixer:
                if not len(outputs):
                    return
                ops.keep_rows(outputs)
                mixed = None if mixed is None else mixed[outputs]
            fed: PartOutput | None = None
            if layer.feed is not None and self.weights.config.parallel:  # reads the layer's input
                fed = self._feed(ops, layer.feed, layer.feed_norm, scratch)
            if layer.mixer is not None and mixed is not None:
                site = "attn_out" if isinstance(layer.mixer, AttentionWeights) else "recurrent_out"
                attended = PartOutput(mixed, layer.mixer.out)
                self._add(ops, attended, layer.attention_post_norm, 1.0, hooks, site, number)
            if hooks and hooks.wants("resid_mid", number):
                hooks("resid_mid", number, ops.residual())
            if layer.feed is not None and fed is None:
                fed = self._feed(ops, layer.feed, layer.feed_norm, scratch)
            scale = 1.0 if layer.token_input is not None else layer.scale  # with the last addition
            if fed is not None:
                self._add(ops, fed, layer.feed_post_norm, scale, hooks, "mlp_out", number)
            if layer.token_input is not None:
                self._add_token_input(ops, number, layer.token_input, layer.scale)
        if hooks and hooks.wants("resid", len(self.weights.layers)):
            hooks("resid", len(self.weights.layers), ops.residual())

    def _add(
        self,
        ops: LayerOps,
        part: PartOutput,
        post: NormWeights | None,
        scale: float,
        hooks: LayerHooks | None,
        site: str,
        layer: int,
    ) -> None:
        """Add the output of a layer's part to the residual stream, then multiply it by `scale`."""
        if not (hooks and hooks.wants(site, layer)):
            if part.down is not None:
                ops.add_product(part.down, part.x, post, scale)
            else:
                ops.add(part.x, post, part.shared, scale)
            return
        h, config, delta = ops.residual(), self.weights.config, part.x
        if part.down is not None:
            delta = ops.buffers.view("attention", part.down.rows)
            ops.multiply(part.down, part.x, delta)
        if part.shared is not None:
            delta += part.shared
        if config.norm_sums:
            hooks(site, layer, delta)
            ops.add(delta, post, scale=scale)
            return
        if post is not None:
            self.add_norm(delta, norm=post, out=delta)
        if config.residual_scale != 1:
            delta *= config.residual_scale
        hooks(site, layer, delta)
        self.add_norm(h, delta, out=h, scale=scale, added_scale=1.0)

    def head(
        self,
        ops: LayerOps,
        logits: Tensor,
        rows: Tensor | None = None,
        hooks: LayerHooks | None = None,
    ) -> None:
        """Logits of the last residual, at these rows only if given."""
        weights, config = self.weights, self.weights.config
        transform = weights.transform
        is_norm_hooked = hooks is not None and hooks.wants("final_norm", 0)
        if transform is None and rows is None and not is_norm_hooked:
            ops.project(weights.head, weights.norm, logits)
        else:
            x = ops.residual() if transform is None else self._transformed(ops, transform)
            x = x if rows is None else x[rows]
            normed = ops.buffers.x if rows is None else x
            self.add_norm(x, norm=weights.norm, out=normed)
            if hooks and is_norm_hooked:
                hooks("final_norm", 0, normed)
            ops.multiply(weights.head, normed, logits)
        if config.logit_scale != 1:
            logits.mul_(config.logit_scale)
        if config.logit_softcap:
            logits.div_(config.logit_softcap).tanh_().mul_(config.logit_softcap)
        if hooks and hooks.wants("logits", 0):
            hooks("logits", 0, logits)

    def _transformed(self, ops: LayerOps, transform: TransformWeights) -> Tensor:
        """The dense layer before the last norm."""
        width = self.weights.config.width
        out, activated = (ops.buffers.view(name, width) for name in ("attention", "feed"))
        ops.project(transform.dense, transform.norm, out)
        self.glu(out, activated, gated=False)
        return activated

    def _mix(
        self,
        ops: LayerOps,
        number: int,
        layer: LayerWeights,
        attend: Attend,
        recur: Recur,
        hooks: LayerHooks | None,
    ) -> Tensor | None:
        """Run attention or a recurrence, up to the output projection."""
        mixer = layer.mixer
        if mixer is None:
            if hooks:
                hooks.recurrent_stats(number, 0)
            return None
        mixed = ops.buffers.view("mixed", mixer.out.columns)
        if isinstance(mixer, RecurrentWeights):
            projected = ops.buffers.view("projected", mixer.projection.rows)
            ops.project(mixer.projection, layer.attention_norm, projected)
            stats = hooks.recurrent_stats(number, len(mixed)) if hooks else None
            recur(number, projected, mixed, stats)
            return mixed
        shape = self.attention_layers[number]
        qkv = ops.buffers.view("projected", mixer.qkv.rows)
        # `attend` must not read the block table before `embed` has updated it.
        ops.project(mixer.qkv, layer.attention_norm, qkv, early=number > 0)
        self._norm_qk(qkv, mixer, shape)
        attend(number, qkv, mixed)
        if hooks:
            hooks.on_queries(number, qkv)
        if shape.gated:
            self.multiply_gate(mixed, qkv[:, shape.gate_at :], mixed, "sigmoid")
        if hooks and hooks.wants("head_out", number):
            hooks("head_out", number, mixed)
        return mixed

    def _feed(
        self,
        ops: LayerOps,
        feed: FeedWeights,
        norm: NormWeights | None,
        scratch: ExpertScratch,
    ) -> PartOutput:
        """Run a feed-forward, up to the output projection of a dense one."""
        dense, experts, config = feed.dense, feed.experts, self.weights.config
        if experts is None:
            assert dense is not None
            return PartOutput(ops.glu(dense, norm), dense.down)
        if feed.parallel is not None:
            return self._dense_and_experts(ops, feed, scratch)
        out, x = ops.buffers.view("feed", config.width), ops.normed(norm)
        run_experts(x, experts, config, out, scratch, pdl=self.pdl, exact=self.exact)
        if dense is None:
            return PartOutput(out)
        inner, shared = ops.glu(dense, None, x), ops.buffers.view("shared", config.width)
        if feed.shared_gate is not None:  # scales the input of `down` instead of its output
            row_kernels.scale_by_gate[(len(x),)](
                inner, x, feed.shared_gate, F=inner.shape[1], FP=next_power_of_two(inner.shape[1]),
                D=config.width, DP=next_power_of_two(config.width), PDL=self.pdl, num_warps=4,
                launch_pdl=self.pdl,
            )  # fmt: skip
        ops.multiply(dense.down, inner, shared)
        return PartOutput(out, shared=shared)

    def _dense_and_experts(
        self, ops: LayerOps, feed: FeedWeights, scratch: ExpertScratch
    ) -> PartOutput:
        """A dense feed-forward and experts in parallel, each with its own norms."""
        dense, experts, norms, config = feed.dense, feed.experts, feed.parallel, self.weights.config
        assert dense is not None and experts is not None and norms is not None
        inner = ops.glu(dense, norms.dense)
        out, expert_out = (ops.buffers.view(name, config.width) for name in ("feed", "shared"))
        ops.multiply(dense.down, inner, out)
        x, router_input = ops.normed(norms.experts), ops.normed(norms.router, "router")
        run_experts(
            x, experts, config, expert_out, scratch, pdl=self.pdl, exact=self.exact,
            router_input=router_input,
        )  # fmt: skip
        self.add_norm(out, norm=norms.dense_post, out=out)
        self.add_norm(out, expert_out, post=norms.experts_post, out=out, added_scale=1.0)
        return PartOutput(out)

    def _add_token_input(
        self, ops: LayerOps, number: int, weights: TokenInputWeights, scale: float
    ) -> None:
        """Add the per-layer embedding of each token."""
        config, a = self.weights.config, ops.buffers
        width = config.token_width
        inner = a.view("inner", width)
        tokens = a.view("token_inputs", config.layers * width)
        ops.multiply_gate(weights.gate, tokens[:, number * width : (number + 1) * width], inner)
        ops.add_product(weights.out, inner, weights.norm, scale)

    # -- single launches -----------------------------------------------------------------------

    def embed(
        self,
        ops: LayerOps,
        tokens: Tensor,
        positions: Tensor,
        updates: Tensor,
        hooks: LayerHooks | None = None,
    ) -> None:
        """Embed tokens, picks of the previous step included; apply block table updates."""
        weights, config, inputs, h = self.weights, self.weights.config, self.inputs, ops.buffers.h
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
        if weights.embed_norm is not None:
            self.add_norm(h, norm=weights.embed_norm, out=h)
        if hooks and hooks.wants("embedding", 0):
            hooks("embedding", 0, h)
        if weights.token_inputs is not None:
            self._embed_token_inputs(weights.token_inputs, ops, tokens)

    def _embed_token_inputs(
        self, weights: TokenInputsWeights, ops: LayerOps, tokens: Tensor
    ) -> None:
        """Per-layer embeddings of the tokens, for all layers."""
        a, config, width = ops.buffers, self.weights.config, self.weights.config.token_width
        out = a.view("token_inputs", config.layers * width)
        projected = a.view("projected", config.layers * width)
        ops.multiply(weights.project, a.h, projected)
        packed = not isinstance(weights.embed, PlainMatrix)
        if not isinstance(weights.embed, PlainMatrix):
            weights.embed.embed_tokens(tokens[: len(out)], self.inputs.previous, out)
        row_kernels.token_inputs[(len(out), config.layers)](
            tokens, self.inputs.previous,
            weights.embed.weight if isinstance(weights.embed, PlainMatrix) else out,
            projected, weights.norm.gain, out, config.width**-0.5, width**0.5, config.norm_eps,
            LAYERS=config.layers, D=width, DP=next_power_of_two(width), UNPACKED=packed,
            num_warps=1,
        )  # fmt: skip

    def add_norm(
        self,
        h: Tensor,
        first: Tensor | None = None,
        second: Tensor | None = None,
        *,
        post: NormWeights | None = None,
        norm: NormWeights | None = None,
        out: Tensor,
        scale: float = 1.0,
        added_scale: float | None = None,
    ) -> None:
        """h = (h + post_norm(first) + second) * scale; out = norm(h).

        `added_scale` multiplies what is added; None: the model's residual scale.
        """
        config = self.weights.config
        added_scale = config.residual_scale if added_scale is None else added_scale
        row_kernels.add_norm[(len(h),)](
            h, h if first is None else first, h if second is None else second,
            *norm_tensors(post, h), *norm_tensors(norm, h), out, config.norm_eps, added_scale,
            scale, D=config.width, DP=next_power_of_two(config.width),
            ADDED=(first is not None) + (second is not None), POST=norm_kind(post),
            NORM=norm_kind(norm), SCALED=added_scale != 1 or scale != 1, PDL=self.pdl,
            num_warps=8 if config.width > 2048 else 4, launch_pdl=self.pdl,
        )  # fmt: skip

    def glu(self, gate_up: Tensor, inner: Tensor, gated: bool | None = None) -> None:
        """inner = act(gate) * up, or act(up) in a model without gates."""
        config, width = self.weights.config, inner.shape[1]
        row_kernels.glu[(len(inner), -(-width // _BLOCK))](
            gate_up, inner, F=width, BF=_BLOCK, GATED=config.gated if gated is None else gated,
            ACTIVATION=ACTIVATIONS[config.activation], LIMIT=config.activation_limit,
            PDL=self.pdl, num_warps=4, launch_pdl=self.pdl,
        )  # fmt: skip

    def multiply_gate(self, x: Tensor, gate: Tensor, out: Tensor, activation: str) -> None:
        """out = x * activation(gate)."""
        width = out.shape[1]
        row_kernels.multiply_gate[(len(out), -(-width // _BLOCK))](
            x, gate, out, x.stride(0), gate.stride(0), F=width, BF=_BLOCK,
            ACTIVATION=ACTIVATIONS[activation], PDL=self.pdl, num_warps=4, launch_pdl=self.pdl,
        )  # fmt: skip

    def _norm_qk(
        self, qkv: Tensor, mixer: AttentionWeights, shape: attention.AttentionLayer
    ) -> None:
        config = self.weights.config
        if config.qk_norm != "whole" or mixer.q_norm is None:
            return
        k_norm = mixer.q_norm if mixer.k_norm is None else mixer.k_norm
        row_kernels.norm_all_heads[(len(qkv), 1 + shape.has_keys)](
            qkv, mixer.q_norm.gain, k_norm.gain, config.norm_eps, Q=shape.out_width,
            K=shape.kv_heads * shape.head_width, WIDTH=qkv.shape[1],
            P=next_power_of_two(shape.out_width), PDL=self.pdl, num_warps=4, launch_pdl=self.pdl,
        )  # fmt: skip

    def epilogue(
        self,
        *,
        norm: NormWeights | None = None,
        activation: str = "none",
        gated: bool = False,
        residual: Tensor | None = None,
        is_factor: bool = False,
        scale: float = 1.0,
        early: bool = True,
    ) -> Epilogue:
        config = self.weights.config
        return Epilogue(
            config.norm_eps, norm, activation, gated, residual, is_factor, scale=scale,
            early=early, pdl=self.pdl, limit=config.activation_limit,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PartOutput:
    """Output of attention, a recurrence or a feed-forward: `x`, or down · x; plus that of a shared
    expert."""

    x: Tensor
    down: WeightMatrix | None = None
    shared: Tensor | None = None


def recurrent_layers(weights: Weights, pages: KVCache) -> dict[int, RecurrentLayer]:
    """Parameters of the recurrent layers, with their state slots."""
    config, layers = weights.config, {}
    for number, layer in enumerate(weights.layers):
        mixer = layer.mixer
        if isinstance(mixer, RecurrentWeights):
            assert config.recurrence is not None
            layers[number] = RecurrentLayer(
                mixer.kind, config.recurrence, config.recurrence.channels(mixer.kind, config.width),
                mixer.conv_weight, mixer.conv_bias, mixer.rate, mixer.dt_bias, mixer.skip,
                mixer.norm_gain, config.norm_eps, pages.states(number),
            )  # fmt: skip
    return layers


def max_fused_rows(weights: Weights) -> int:
    """Largest batch that uses the fused GEMVs.

    The first row brings the weights into the L2 cache and the other rows read them there, which is
    faster than GEMMs for small models. A row's result does not depend on the batch size.
    """
    if weights.device.type != "cuda" or weights.config.experts:
        return 1  # Triton's interpreter is slow: use torch.mm
    size = sum(matrix.nbytes for matrix in weights.matrices())
    return max(1, min(_MAX_FUSED_ROWS, _MAX_FUSED_BYTES // max(size, 1)))


def position_vectors(weights: Weights, context: int) -> Tensor | None:
    """Absolute position embeddings [context, width]; None if the model has none."""
    if weights.config.positions == "sinusoidal":
        table = torch.from_numpy(sinusoidal(np.arange(context), weights.config.width))
        return table.to(weights.device, weights.dtype)
    return weights.position_embed


def supports_pdl(device: torch.device) -> bool:
    """Whether the GPU has programmatic dependent launch (Hopper and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
