"""A model's step as launches of kernels, from tokens to logits.

Every new token of a step is a line. `few` is the step of a single line, and of a few lines of a
small model: five kernels a layer, all that stands between the products folded into them. `many` is
the step of more lines, and `layers` what it shares with reading prompts: the vendor's products and
a few small kernels between.
All buffers have fixed addresses, so a step can be captured as a graph and run again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from unspool.backends.cuda import attention
from unspool.backends.cuda.adapters import Adapt, CudaAdapters
from unspool.backends.cuda.experts import ExpertScratch, experts
from unspool.backends.cuda.inputs import ROOM, Inputs
from unspool.backends.cuda.kernels import rows
from unspool.backends.cuda.kernels.common import ACTIVATIONS
from unspool.backends.cuda.pages import Pages
from unspool.backends.cuda.products import Around, NormWeights, norm_kind, power_of_two
from unspool.backends.cuda.weights import LayerWeights, Matrix, PlainMatrix, Weights
from unspool.model.positions import sinusoidal

_FEED_BLOCK = 1024
_FEW_LINES = 16  # that may be multiplied each by itself ...
_FEW_BYTES = 2 << 30  # ... where they read no more than this in all, most of it from the cache


class Activations:
    """What passes between the kernels, for so many lines."""

    def __init__(self, weights: Weights, lines: int) -> None:
        config = weights.config
        inner = max(config.ff_width, config.expert_width)

        def new(width: int) -> Tensor:
            return torch.empty(lines, width, dtype=weights.dtype, device=weights.device)

        self.h = new(config.width)  # the residual stream
        self.beside = new(config.width)  # the same with attention's share, for parallel layers
        self.x = new(config.width)  # what goes into a product
        self.attended, self.fed = new(config.width), new(config.width)
        self.qkv = new((config.heads + 2 * config.kv_heads) * config.head_width)
        self.mixed = new(config.heads * config.head_width)
        self.both = new(inner * (1 + config.gated))
        self.inner = new(inner)

    def first(self, lines: int) -> Activations:
        """Those of the first lines alone."""
        part = object.__new__(Activations)
        part.__dict__ = {name: tensor[:lines] for name, tensor in self.__dict__.items()}
        return part


class Watch(Protocol):
    """Who looks on while the layers run."""

    def stream(self, layer: int, h: Tensor) -> None:
        """The residual stream before a layer; after the last one, before one more."""

    def queries(self, layer: int, qkv: Tensor) -> None:
        """What attention looks with, rotated; the layer's keys are in their pages."""

    def added(self, attended: Tensor, fed: Tensor, layer: LayerWeights) -> None:
        """What the two halves of a layer gave, before the norms behind them."""


Attend = Callable[[int, Tensor, Tensor], None]
"""From a layer's number and its queries, keys and values to what attention mixed."""


class Program:
    """The launches, and the buffers that they work on."""

    def __init__(
        self, weights: Weights, pages: Pages, inputs: Inputs, context: int, exact: bool
    ) -> None:
        config = weights.config
        self.weights, self.pages, self.inputs, self.exact = weights, pages, inputs, exact
        self.pdl = supports_pdl(weights.device)
        lines = inputs.lines
        self.buffers = Activations(weights, lines)
        self.adapters = CudaAdapters(weights, lines)
        shape = (lines, config.vocab_size)
        self.logits = torch.empty(shape, dtype=weights.dtype, device=weights.device)
        self.turning = attention.attention_layers(weights, context)
        self._keys = [pages.keys(layer) for layer in range(config.layers)]
        self._values = [pages.values(layer) for layer in range(config.layers)]
        self._scratch = attention.Scratch.for_lines(lines, config, weights.device)
        self._expert_scratch = ExpertScratch.for_lines(lines, config, weights)
        self._places = position_vectors(weights, context)
        self.few_lines = few_lines(weights)
        # Rounded to the weights' own precision first, as these models were trained.
        self._scale = float(torch.tensor(config.embedding_scale, dtype=weights.dtype))

    # -- a captured step: the lines of `inputs` to the logits --------------------------------------

    def step(
        self,
        count: int,
        longest: int,
        fresh: bool,
        adapted: bool = False,
        watch: Watch | None = None,
    ) -> None:
        """The first `count` lines, none of which sees more than `longest` tokens; `fresh`: each is
        the next token of a text of its own; `adapted`: some of them have an adapter."""
        if count <= self.few_lines and not (self.exact or adapted):
            self._few(count, longest, fresh, watch)
        else:
            self._many(count, longest, fresh, adapted, watch)

    def _many(
        self, count: int, longest: int, fresh: bool, adapted: bool, watch: Watch | None
    ) -> None:
        a = self.buffers.first(count)
        self._begin(a.h)
        lines = self.inputs.of(count)
        fresh = fresh and not self.exact  # prepared like prompts, in the same order of sums

        def attend(layer: int, qkv: Tensor, mixed: Tensor) -> None:
            self._attend(layer, qkv, mixed, lines, longest, fresh)

        adapt = None
        if adapted:
            adapt = self.adapters.on_lines(self.inputs.adapters[:count], pdl=self.pdl)
        self.layers(a, attend, self._expert_scratch, watch, adapt)
        self.head(a.x, self.logits[:count], adapt)

    def _few(self, count: int, longest: int, fresh: bool, watch: Watch | None) -> None:
        config, a = self.weights.config, self.buffers.first(count)
        self._begin(a.h)
        lines, inner = self.inputs.of(count), a.inner[:, : config.ff_width]
        for number, layer in enumerate(self.weights.layers):
            if watch:
                watch.stream(number, a.h)
            # What `begin` wrote must be there before `attend` looks at the block table.
            by = self._around(norm=layer.attention_norm, early=number > 0)
            layer.qkv.times_each(a.h, a.qkv, by)
            self._norm_whole(a.qkv, layer)
            self._attend(number, a.qkv, a.mixed, lines, longest, fresh)
            after = a.beside if config.parallel else a.h
            if layer.attention_post_norm is None:
                layer.out.times_each(a.mixed, after, self._around(residual=a.h))
            else:
                layer.out.times_each(a.mixed, a.attended, self._around())
                self._add(a, a.attended, post=layer.attention_post_norm, out=a.h)
            if layer.gate_up is None or layer.down is None:
                self._add(a, norm=layer.feed_norm, out=a.x)
                self._feed(layer, a, a.x, a.fed, self._expert_scratch)
                if config.parallel:
                    a.h.copy_(a.beside)
                self._add(a, a.fed, post=layer.feed_post_norm, out=a.h)
                continue
            by = self._around(
                norm=layer.feed_norm, activation=config.activation, gated=config.gated
            )
            layer.gate_up.times_each(a.h, inner, by)
            if layer.feed_post_norm is None:
                layer.down.times_each(inner, a.h, self._around(residual=after))
            else:
                layer.down.times_each(inner, a.fed, self._around())
                self._add(a, a.fed, post=layer.feed_post_norm, out=a.h)
        if watch:
            watch.stream(len(self.weights.layers), a.h)
        logits = self.logits[:count]
        self.weights.head.times_each(a.h, logits, self._around(norm=self.weights.norm))
        self._soften(logits)

    def _attend(
        self, layer: int, qkv: Tensor, mixed: Tensor, lines: attention.Lines, longest: int,
        fresh: bool,
    ) -> None:  # fmt: skip
        turning, keys, values = self.turning[layer], self._keys[layer], self._values[layer]
        if not fresh:
            attention.store_keys(qkv, keys, values, turning, lines, pdl=self.pdl)
        attention.attend(
            qkv, mixed, keys, values, turning, lines, self._scratch, new=fresh,
            pieces=attention.pieces_for(turning, longest), pdl=self.pdl,
        )  # fmt: skip

    # -- what steps and prompts share ------------------------------------------------------------

    def layers(
        self,
        a: Activations,
        attend: Attend,
        scratch: ExpertScratch,
        watch: Watch | None = None,
        adapt: Adapt | None = None,
    ) -> None:
        """From embeddings in `a.h` to the final norm in `a.x`."""
        config = self.weights.config
        behind: NormWeights | None = None  # the norm behind what `a.fed` holds
        first, second = None, None
        for number, layer in enumerate(self.weights.layers):
            self._add(a, first, second, post=behind, norm=layer.attention_norm, out=a.x)
            if watch:
                watch.stream(number, a.h)
            self._times(layer.qkv, a.x, a.qkv, adapt)
            self._norm_whole(a.qkv, layer)
            attend(number, a.qkv, a.mixed)
            if watch:
                watch.queries(number, a.qkv)
            self._times(layer.out, a.mixed, a.attended, adapt)
            if config.parallel:
                self._add(a, norm=layer.feed_norm, out=a.x)
                first, second = a.attended, a.fed
            else:
                self._add(
                    a, a.attended, post=layer.attention_post_norm, norm=layer.feed_norm, out=a.x
                )
                first, second = a.fed, None
            self._feed(layer, a, a.x, a.fed, scratch, adapt)
            behind = layer.feed_post_norm
            if watch:
                watch.added(a.attended, a.fed, layer)
        self._add(a, first, second, post=behind, norm=self.weights.norm, out=a.x)
        if watch:
            watch.stream(len(self.weights.layers), a.h)

    def head(self, x: Tensor, logits: Tensor, adapt: Adapt | None = None) -> None:
        """What normed vectors say about the next token."""
        self._times(self.weights.head, x, logits, adapt)
        self._soften(logits)

    # -- single launches -----------------------------------------------------------------------

    def _begin(self, h: Tensor) -> None:
        """Block table and embeddings; the first kernel of a step, which waits for all before."""
        self.embed(self.inputs.tokens, self.inputs.positions, h, self.inputs.updates)

    def embed(self, tokens: Tensor, positions: Tensor, h: Tensor, updates: Tensor) -> None:
        """The vectors of tokens, those that the step before picked among them."""
        weights, config, inputs = self.weights, self.weights.config, self.inputs
        embed, places = weights.embed, self._places
        packed = not isinstance(embed, PlainMatrix)
        if not isinstance(embed, PlainMatrix):
            embed.gather(tokens[: len(h)], inputs.previous, h)
        rows.begin[(len(h) + 1,)](
            updates, inputs.table, tokens, inputs.previous, positions,
            embed.weight if isinstance(embed, PlainMatrix) else h,
            h if places is None else places, h, self._scale, ROOM,
            D=config.width, DP=power_of_two(config.width), UNPACKED=packed,
            SCALED=config.embedding_scale != 1, POSITIONS=places is not None, num_warps=4,
        )  # fmt: skip

    def _add(
        self,
        a: Activations,
        first: Tensor | None = None,
        second: Tensor | None = None,
        *,
        post: NormWeights | None = None,
        norm: NormWeights | None = None,
        out: Tensor,
    ) -> None:
        """h += first (after its own norm) + second; out = norm(h)."""
        config, h = self.weights.config, a.h
        rows.add_norm[(len(h),)](
            h, h if first is None else first, h if second is None else second,
            *_norm_tensors(post, h), *_norm_tensors(norm, h), out, config.norm_eps,
            D=config.width, DP=power_of_two(config.width),
            ADDED=(first is not None) + (second is not None), POST=norm_kind(post),
            NORM=norm_kind(norm), PDL=self.pdl, num_warps=4, launch_pdl=self.pdl,
        )  # fmt: skip

    def _feed(
        self,
        layer: LayerWeights,
        a: Activations,
        x: Tensor,
        out: Tensor,
        scratch: ExpertScratch,
        adapt: Adapt | None = None,
    ) -> None:
        config, width = self.weights.config, self.weights.config.ff_width
        if layer.experts is not None:
            experts(x, layer.experts, config, out, scratch, pdl=self.pdl, exact=self.exact)
            return
        assert layer.gate_up is not None and layer.down is not None
        both = a.both.view(-1)[: len(x) * width * (1 + config.gated)].view(len(x), -1)
        inner = a.inner.view(-1)[: len(x) * width].view(len(x), -1)
        self._times(layer.gate_up, x, both, adapt)
        rows.glu[(len(x), -(-width // _FEED_BLOCK))](
            both, inner, F=width, BF=_FEED_BLOCK, GATED=config.gated,
            ACTIVATION=ACTIVATIONS[config.activation], PDL=self.pdl, num_warps=4,
            launch_pdl=self.pdl,
        )  # fmt: skip
        self._times(layer.down, inner, out, adapt)

    def _norm_whole(self, qkv: Tensor, layer: LayerWeights) -> None:
        config = self.weights.config
        if config.qk_norm != "whole" or layer.q_norm is None or layer.k_norm is None:
            return
        queries = config.heads * config.head_width
        rows.norm_heads_whole[(len(qkv), 2)](
            qkv, layer.q_norm.gain, layer.k_norm.gain, config.norm_eps, Q=queries,
            K=config.kv_width, WIDTH=qkv.shape[1], P=power_of_two(queries), PDL=self.pdl,
            num_warps=4, launch_pdl=self.pdl,
        )  # fmt: skip

    def _times(self, matrix: Matrix, x: Tensor, out: Tensor, adapt: Adapt | None = None) -> None:
        matrix.times_many(x, out, exact=self.exact, pdl=self.pdl)
        if adapt is not None:
            adapt(matrix, x, out)

    def _soften(self, logits: Tensor) -> None:
        cap = self.weights.config.logit_softcap
        if cap:
            logits.div_(cap).tanh_().mul_(cap)

    def _around(
        self,
        *,
        norm: NormWeights | None = None,
        activation: str = "none",
        gated: bool = False,
        residual: Tensor | None = None,
        early: bool = True,
    ) -> Around:
        eps = self.weights.config.norm_eps
        return Around(eps, norm, activation, gated, residual, early, self.pdl)


def few_lines(weights: Weights) -> int:
    """How many lines are multiplied each by itself. The first of them brings the weights into the
    cache, and the others read them there, each all of them: quicker than the kernels for many
    lines as long as it is not much, and each line has the numbers that it has alone."""
    if weights.device.type != "cuda" or any(layer.experts is not None for layer in weights.layers):
        return 1  # the interpreter is quicker with the vendor's products
    size = sum(matrix.nbytes for matrix in weights.matrices())
    return max(1, min(_FEW_LINES, _FEW_BYTES // max(size, 1)))


def position_vectors(weights: Weights, context: int) -> Tensor | None:
    """What is added to a token's vector for its position, if the family does that."""
    if weights.config.positions == "sinusoidal":
        table = torch.from_numpy(sinusoidal(np.arange(context), weights.config.width))
        return table.to(weights.device, weights.dtype)
    return weights.position_embed


def _norm_tensors(norm: NormWeights | None, filler: Tensor) -> tuple[Tensor, Tensor]:
    if norm is None:
        return filler, filler
    return norm.gain, filler if norm.bias is None else norm.bias


def supports_pdl(device: torch.device) -> bool:
    """Whether a kernel can come up before the one ahead has ended (from Hopper on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
