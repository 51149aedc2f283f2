"""The transformer in plain torch: the specification that every faster backend is tested against.

Read it from `Transformer.forward` up: token ids are embedded, each layer adds the outputs of its
attention and feed-forward to the residual stream, the output head computes logits.

    model = Transformer(config)
    logits = model(tokens)                        # all positions, no cache
    cache = model.new_cache(capacity=512)
    logits = model(prompt, cache, last_only=True) # prefill
    logits = model(next_token, cache)             # decode one token

Training runs the same layers with another attention function: see `train/learning/forward.py`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from unspool.model.config import ModelConfig, Rotary, sinusoidal
from unspool.model.layers.parts import (
    DenseAndExperts,
    Experts,
    FeedForward,
    HeadTransform,
    Norm,
    PerLayerEmbeddings,
    PerLayerInput,
    apply_rope,
    new_norm_if,
    rms_normalize,
)
from unspool.model.layers.recurrent import DeltaNet, Mamba2, Mixer, ShortConv

# -- Build the parts of a layer from the model's settings

_MIXERS: dict[str, type[Mixer]] = {"conv": ShortConv, "delta": DeltaNet, "mamba2": Mamba2}


def new_mixer(config: ModelConfig, layer: int) -> Mixer:
    return _MIXERS[config.mixer(layer)](config, layer)


def new_feed(config: ModelConfig, layer: int) -> nn.Module:
    """A dense feed-forward, experts, or both."""
    if not config.has_experts(layer):
        return FeedForward(config, config.shape(layer).ff_width)
    if not config.dense_beside_experts:
        return Experts(config)
    dense = FeedForward(config, config.shape(layer).ff_width)
    return DenseAndExperts(config, dense, Experts(config))


# Queries per attention chunk: bounds the memory for the scores of a long prompt.
QUERY_CHUNK = 256


class Cache:
    """KV cache of a batch: a pair of tensors for each layer that has keys and values. Recurrent
    layers have a state instead, which cannot be rewound."""

    def __init__(
        self, config: ModelConfig, capacity: int, batch: int, dtype: torch.dtype, device: str
    ) -> None:
        self.keys: dict[int, Tensor] = {}
        for layer in config.kv_layers:
            heads, width = config.kv_shape(layer)
            shape = (batch, heads, capacity, width)
            self.keys[layer] = torch.zeros(shape, dtype=dtype, device=device)
        self.values = {layer: torch.zeros_like(keys) for layer, keys in self.keys.items()}
        floats = [config.state_floats(layer) for layer in range(config.layers)]
        self.states = [torch.zeros(batch, count, device=device) for count in floats]
        self.capacity = capacity
        self.length = 0

    def rewind(self, length: int) -> None:
        """Drop the tokens from position `length` on; the next tokens overwrite them."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind {self.length} tokens to {length}")
        if 0 < length < self.length and any(state.numel() for state in self.states):
            raise ValueError("a recurrent state can be rewound only to 0 tokens")
        if length == 0:
            for state in self.states:
                state.zero_()
        self.length = length


class RopeTables(NamedTuple):
    """RoPE tables of a layer for some positions."""

    cosine: Tensor
    sine: Tensor
    query_scale: Tensor | None = None  # [positions, 1]: position-dependent scale of the queries

    def to(self, x: Tensor) -> RopeTables:
        """The tables on the device and in the dtype of `x`."""
        scale = None if self.query_scale is None else self.query_scale.to(x)
        return RopeTables(self.cosine.to(x), self.sine.to(x), scale)


# Keys and values of earlier layers, for layers that have none.
Shared = dict[int, tuple[Tensor, Tensor]]


class Attention(nn.Module):
    """Multi-head attention of one layer."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer, self.window = config, layer, config.window(layer)
        self.shape, self.source = config.shape(layer), config.kv_source(layer)
        self.scale = config.score_scale(layer)
        width, out, shared = config.width, self.shape.out_width, self.shape.kv_width
        # Whether the layer has keys and values, and whether later layers read them. Stored as
        # attributes, because a compiled layer is reused for layers with equal attributes.
        self.has_own_kv = has_own_kv = self.source == layer
        self.has_kv_borrowers = any(
            config.kv_source(later) == layer for later in range(layer + 1, config.layers)
        )
        self.q = nn.Linear(width, out, bias=config.qkv_bias)
        if has_own_kv:
            self.k = nn.Linear(width, shared, bias=config.qkv_bias)
        self.v: nn.Linear | None = None
        if has_own_kv and config.has_values(layer):
            self.v = nn.Linear(width, shared, bias=config.qkv_bias)
        self.gate: nn.Linear | None = None
        if config.attention_gate:
            self.gate = nn.Linear(width, out, bias=config.qkv_bias)
        self.out = nn.Linear(out, width, bias=config.out_bias)
        self.sinks = nn.Parameter(torch.zeros(self.shape.heads)) if config.sinks else None
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        if config.qk_norm != "none":
            is_whole, head = config.qk_norm == "whole", self.shape.head_width
            self.q_norm = Norm(config, out if is_whole else head, "rms")
            self.k_norm = Norm(config, shared if is_whole else head, "rms") if has_own_kv else None

    def forward(
        self,
        x: Tensor,
        angles: RopeTables | None,
        cache: Cache | None,
        attend: AttentionFunction | None = None,
        shared: Shared | None = None,
    ) -> Tensor:
        batch, count, _ = x.shape
        query = self.queries(x, angles, _hook_of(attend))
        if self.has_own_kv:
            key, value = self.keys_values(x, angles, _hook_of(attend))
            if self.has_kv_borrowers and shared is not None:
                shared[self.layer] = key, value
        else:
            assert shared is not None, "the layer reads keys of another layer"
            key, value = shared[self.source]
        if attend is not None:
            mixed = attend(self, query, key, value)
            mixed = mixed.transpose(1, 2).reshape(batch, count, -1)
            return self.project_output(mixed, x, _hook_of(attend))
        start = 0
        if cache is not None:
            start, end = cache.length, cache.length + count
            keys, values = cache.keys[self.source], cache.values[self.source]
            if self.has_own_kv:
                keys[:, :, start:end], values[:, :, start:end] = key, value
            key, value = keys[:, :, :end], values[:, :, :end]
        mixed = self.attend(query, key, value, start)
        return self.project_output(mixed.transpose(1, 2).reshape(batch, count, -1), x)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, start: int = 0) -> Tensor:
        """Attention output for queries from position `start` on, [batch, heads, count, width]."""
        return torch.cat(
            [
                self._attend(query[:, :, at : at + QUERY_CHUNK], key, value, start + at)
                for at in range(0, query.shape[2], QUERY_CHUNK)
            ],
            dim=2,
        )

    def project_output(self, mixed: Tensor, x: Tensor, hook: SiteHook | None = None) -> Tensor:
        """Gate and project the heads' outputs; `x` is the layer's input."""
        if self.gate is not None:
            mixed = mixed * torch.sigmoid(self.gate(x))
        if hook is not None:
            mixed = hook("head_out", self.layer, mixed)
        output: Tensor = self.out(mixed)
        return output

    def queries(self, x: Tensor, angles: RopeTables | None, hook: SiteHook | None = None) -> Tensor:
        """Queries with RoPE, [batch, heads, count, head_width]."""
        query = self._normed(self.q(x), self.q_norm)
        if hook is not None:
            query = self._hooked(hook, "q", query)
        if angles is None:
            return query
        query = apply_rope(query, angles.cosine, angles.sine)
        return query if angles.query_scale is None else query * angles.query_scale

    def keys_values(
        self, x: Tensor, angles: RopeTables | None, hook: SiteHook | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys with RoPE and values, [batch, kv_heads, count, head_width] each."""
        plain = self.k(x)
        key = self._normed(plain, self.k_norm)
        value = self._heads(plain if self.v is None else self.v(x))
        if self.config.value_norm:
            value = rms_normalize(value, self.config.norm_eps)
        if hook is not None:
            key, value = self._hooked(hook, "k", key), self._hooked(hook, "v", value)
        return (key if angles is None else apply_rope(key, angles.cosine, angles.sine)), value

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        """Split queries or keys into heads, normalized per head or over the whole vector."""
        if norm is None:
            return self._heads(x)
        is_whole = self.config.qk_norm == "whole"
        return self._heads(norm(x)) if is_whole else cast(Tensor, norm(self._heads(x)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.shape.head_width)).transpose(1, 2)

    def _hooked(self, hook: SiteHook, site: str, heads: Tensor) -> Tensor:
        """Pass the vectors of all heads, [batch, heads, count, head_width], through a hook."""
        return self._heads(hook(site, self.layer, heads.transpose(1, 2).flatten(2)))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
        """Softmax-weighted values for queries at positions `start`, `start + 1`, ..."""
        count, length = query.shape[2], key.shape[2]
        ends = [self.config.visible_end(at, length) for at in range(start, start + count)]
        # Skip keys that no query of this chunk may attend to.
        first_key, key_end = self.key_range(start, count, max(ends))
        key, value = key[:, :, first_key:key_end], value[:, :, first_key:key_end]
        query_positions = torch.arange(start, start + count, device=key.device)
        key_positions = torch.arange(first_key, key_end, device=key.device)
        visible_end = torch.tensor(ends, device=key.device)
        weights = self.weights(query, key, query_positions, key_positions, visible_end).to(
            value.dtype
        )
        group = weights.shape[1] // value.shape[1]
        mixed = weights.unflatten(1, (-1, group)).flatten(2, 3) @ value
        return mixed.unflatten(2, (group, count)).flatten(1, 2)

    def key_range(self, start: int, count: int, end: int) -> tuple[int, int]:
        """Range of keys that `count` queries from position `start` on attend to; keys end at
        `end`."""
        if not self.window:
            return 0, end
        ahead = start + count - 1 + self.window if self.config.sight == "whole" else end
        return max(0, start + 1 - self.window), min(end, ahead)

    def weights(
        self,
        query: Tensor,
        key: Tensor,
        query_positions: Tensor,
        key_positions: Tensor,
        visible_end: Tensor | None = None,
    ) -> Tensor:
        """Attention weights [batch, heads, queries, keys]; rows sum to one, or less with sinks.

        Args:
            query_positions: [..., queries].
            key_positions: [..., keys].
            visible_end: [..., queries]: a query attends to the keys before this position; None:
                up to its own position.
        """
        return attention_weights(
            self.config,
            self.window,
            query,
            key,
            query_positions,
            key_positions,
            query_positions + 1 if visible_end is None else visible_end,
            self.sinks,
            self.scale,
        )


# An attention function over full sequences: [batch, heads, count, head_width] in and out.
AttentionFunction = Callable[[Attention, Tensor, Tensor, Tensor], Tensor]
# Gets the name of a site, a layer and the values there, and returns what continues in their place.
SiteHook = Callable[[str, int, Tensor], Tensor]


class BackendStep(ABC):
    """The attention of a backend: one step of many sequences, whose caches the backend keeps."""

    @abstractmethod
    def __call__(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Store new keys and values; return the attention output of each sequence's queries."""

    @abstractmethod
    def recur(self, layer: int, mixer: Mixer, x: Tensor) -> Tensor:
        """Output of a recurrent layer from each sequence's state."""

    @property
    @abstractmethod
    def hook(self) -> SiteHook | None:
        """What reads or changes values at the sites of a layer; None: nothing does in this step."""


def _hook_of(attend: AttentionFunction | None) -> SiteHook | None:
    return attend.hook if isinstance(attend, BackendStep) else None


def attention_weights(
    config: ModelConfig,
    window: int,
    query: Tensor,
    key: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    visible_end: Tensor,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """`Attention.weights` for a layer with a sliding `window` (0: none), which counts in both
    directions in a bidirectional model. `scale`: of the scores, if layers differ."""
    # Grouped-query attention: stack the query heads of a key head as more queries.
    group = query.shape[1] // key.shape[1]
    grouped = query.unflatten(1, (-1, group)).flatten(2, 3)
    scores = (grouped @ key.transpose(-1, -2)).float() * (config.scale if scale is None else scale)
    scores = scores.unflatten(2, (group, -1)).flatten(1, 2)
    if config.attention_softcap:
        scores = torch.tanh(scores / config.attention_softcap) * config.attention_softcap
    is_masked = key_positions[..., None, :] >= visible_end[..., :, None]  # future tokens
    if window:
        is_masked = is_masked | (
            key_positions[..., None, :] <= query_positions[..., :, None] - window
        )
        if config.sight == "whole":
            is_masked = is_masked | (
                key_positions[..., None, :] >= query_positions[..., :, None] + window
            )
    if is_masked.ndim == 3:  # one mask per sequence of the batch, the same for all heads
        is_masked = is_masked[:, None]
    return softmax_with_sinks(scores.masked_fill(is_masked, -math.inf), sinks)


def softmax_with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the keys and the head's sink, whose share of the weight is dropped."""
    if sinks is None:
        return scores.softmax(-1)
    extra = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, extra), -1).softmax(-1)[..., :-1]


class Layer(nn.Module):
    """Attention or a recurrence, then a feed-forward, each added to the residual stream; in some
    models a layer has only one of the two."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.parallel, self.norm_sums = config.parallel, config.norm_sums
        self.residual_scale = config.residual_scale
        after = config.norm_after or config.norm_sums
        self.attention_norm = new_norm_if(config, config.has_attention_norm(layer))
        self.layer = layer
        self.mixes = config.mixer(layer) != "none"
        self.mixer: Mixer | None = None
        if config.mixer(layer) == "attention":
            self.attention = Attention(config, layer)
        elif self.mixes:
            self.mixer = new_mixer(config, layer)
        self.attention_post_norm = new_norm_if(config, after)
        self.feed_norm = new_norm_if(config, config.has_feed_norm(layer))
        self.feed = new_feed(config, layer) if config.has_feed(layer) else None
        self.feed_post_norm = new_norm_if(config, after)
        self.token_input = PerLayerInput(config) if config.token_width else None
        self.scale = nn.Parameter(torch.ones(1)) if config.layer_scale else None

    def forward(
        self,
        x: Tensor,
        angles: RopeTables | None,
        cache: Cache | None,
        attend: AttentionFunction | None = None,
        shared: Shared | None = None,
        token: Tensor | None = None,
    ) -> Tensor:
        between, hook = x, _hook_of(attend)
        if self.mixes:
            normed = self.attention_norm(x)
            if self.mixer is not None:
                attended = self.mixer(
                    normed, lambda mixer, inputs: self._recurred(mixer, inputs, cache, attend)
                )
            else:
                attended = self.attention(normed, angles, cache, attend, shared)
            between = self.add_attention(x, attended, hook)
        if hook is not None:
            between = hook("resid_mid", self.layer, between)
        return self.add_feed(x, between, token, hook)

    def _recurred(
        self, mixer: Mixer, x: Tensor, cache: Cache | None, attend: AttentionFunction | None
    ) -> Tensor:
        if isinstance(attend, BackendStep):
            return attend.recur(self.layer, mixer, x)
        if attend is not None:  # full rows of tokens, which may hold several documents
            return mixer.forward_documents(x, getattr(attend, "documents", None))
        parts = mixer.project(x)
        state = cache.states[self.layer] if cache else mixer.zero_state(len(x), x.device)
        mixed, state = mixer.recur(parts, state)
        if cache is not None:
            cache.states[self.layer] = state
        return mixer.finish(mixed, parts)

    def add_attention(self, x: Tensor, attended: Tensor, hook: SiteHook | None = None) -> Tensor:
        """Add the attention output to the residual stream."""
        site = "attn_out" if self.mixer is None else "recurrent_out"
        return self._sum(x, attended, self.attention_post_norm, site, hook)

    def add_feed(
        self,
        x: Tensor,
        between: Tensor,
        token: Tensor | None = None,
        hook: SiteHook | None = None,
    ) -> Tensor:
        """Add the feed-forward output, and the per-layer embedding of the `token` if the model has
        one. The feed-forward reads `between`, or with `parallel` the layer's input `x`."""
        after = between
        if self.feed is not None:
            fed = self.feed(self.feed_norm(x if self.parallel else between))
            after = self._sum(between, fed, self.feed_post_norm, "mlp_out", hook)
        if self.token_input is not None and token is not None:
            after = after + self.token_input(after, token)
        return after if self.scale is None else after * self.scale.to(after)

    def _sum(
        self, x: Tensor, delta: Tensor, norm: nn.Module, site: str, hook: SiteHook | None
    ) -> Tensor:
        if not self.norm_sums:
            delta = norm(delta) if self.residual_scale == 1 else norm(delta) * self.residual_scale
        if hook is not None:
            delta = hook(site, self.layer, delta)
        return cast(Tensor, norm(x + delta)) if self.norm_sums else x + delta


class Transformer(nn.Module):
    """Token ids in, logits over the vocabulary out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.position_embed: nn.Embedding | None = None
        if config.positions == "learned":
            self.position_embed = nn.Embedding(config.context, config.width)
        self.embed_norm = new_norm_if(config, config.embedding_norm)
        self.token_inputs = PerLayerEmbeddings(config) if config.token_width else None
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.layers))
        self.mtp: nn.Module | None = None  # an `MtpLayer`, while it is trained with the model
        self.transform = HeadTransform(config) if config.head_transform else None
        self.norm = Norm(config, config.width, config.norm)
        self.head: nn.Linear | None = None
        self.head_bias: nn.Parameter | None = None  # bias of a tied head
        if not config.tied:
            self.head = nn.Linear(config.width, config.vocab_size, bias=config.head_bias)
        elif config.head_bias:
            self.head_bias = nn.Parameter(torch.zeros(config.vocab_size))

    def new_cache(self, capacity: int, batch: int = 1) -> Cache:
        weight = self.embed.weight
        return Cache(self.config, capacity, batch, weight.dtype, str(weight.device))

    def forward(
        self,
        tokens: Tensor,
        cache: Cache | None = None,
        *,
        last_only: bool = False,
        step: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Logits for `tokens` [batch, count], which continue the cached ones.

        Args:
            step: Replaces the computation: a backend runs the layers over its own caches.
        """
        if step is not None:
            return step(tokens)
        start, count = (cache.length if cache else 0), tokens.shape[1]
        if cache is not None and start + count > cache.capacity:
            raise ValueError(f"{start + count} tokens do not fit a cache of {cache.capacity}")
        positions = np.arange(start, start + count)
        angles = self.rope_tables(positions, cache.capacity if cache else count)
        x = self.embed_tokens(tokens, positions)
        layer_inputs, shared = self.per_layer_embeddings(tokens, x), Shared()
        for index, layer in enumerate(self.layers):
            x = layer(x, angles[index], cache, None, shared, layer_inputs[index])
        if cache is not None:
            cache.length = start + count
        return self.logits(x[:, -1:] if last_only else x)

    def logits(self, x: Tensor) -> Tensor:
        """Logits of hidden states after the last layer: of the next token, or (in a model that is
        not causal and not `shifted`) of the token at the same position."""
        return self.head_logits(self.norm(x if self.transform is None else self.transform(x)))

    def head_logits(self, x: Tensor) -> Tensor:
        """Logits of hidden states after the last norm."""
        if self.head is not None:
            scores = self.head(x)
        else:
            scores = functional.linear(x, self.embed.weight, self.head_bias)
        if self.config.logit_scale != 1:
            scores = scores * self.config.logit_scale
        if self.config.logit_softcap:
            cap = self.config.logit_softcap
            scores = torch.tanh(scores / cap) * cap
        return scores

    def embed_tokens(
        self, tokens: Tensor, positions: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> Tensor:
        return self.finish_embeddings(self.embed(tokens), positions)

    def finish_embeddings(
        self, x: Tensor, positions: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> Tensor:
        """Scale rows of the embedding matrix [..., count, width], add the positions, and norm."""
        if self.config.embedding_scale != 1:
            # Rounded to the dtype of the weights first, as in training.
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype, device=x.device)
        if self.position_embed is not None:
            x = x + self.position_embed(torch.from_numpy(positions).to(x.device))
        elif self.config.positions == "sinusoidal":
            x = x + torch.from_numpy(sinusoidal(positions, self.config.width)).to(x)
        normed: Tensor = self.embed_norm(x)
        return normed

    def per_layer_embeddings(self, tokens: Tensor, x: Tensor) -> Sequence[Tensor | None]:
        """Per-layer embeddings of the tokens (Gemma 4), one tensor per layer; `x` are the token
        embeddings."""
        if self.token_inputs is None:
            return [None] * self.config.layers
        return cast(Tensor, self.token_inputs(tokens, x)).unbind(-2)

    def rope_tables(
        self, positions: np.ndarray[tuple[int], np.dtype[np.int64]], length: int
    ) -> list[RopeTables | None]:
        """RoPE tables of each layer; layers with equal settings share one set."""
        reference, tables = self.embed.weight, dict[Rotary, RopeTables]()
        config, query_scale = self.config, None
        if config.query_growth:
            growth = np.log1p(positions // config.query_span) * config.query_growth
            query_scale = torch.from_numpy(1 + growth)[:, None].to(reference)
        rotaries = [config.layer_rope(layer) for layer in range(config.layers)]
        for rotary in set(rotaries) - {None}:
            assert rotary is not None
            cosine, sine = (
                torch.from_numpy(t).to(reference) for t in rotary.tables(positions, length)
            )
            tables[rotary] = RopeTables(cosine, sine, query_scale)
        return [tables[rotary] if rotary is not None else None for rotary in rotaries]
