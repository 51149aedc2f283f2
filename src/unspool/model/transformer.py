"""The transformer in plain torch: the specification that every faster path is tested against.

Read it from `Transformer.forward` up: token numbers become vectors, each layer adds to them what
attention and feed-forward have to say, the last vector is compared with every token's embedding.

    model = Transformer(config)
    logits = model(tokens)                        # every position, no memory
    cache = model.new_cache(capacity=512)
    logits = model(prompt, cache, last_only=True) # the prompt, keys and values kept
    logits = model(next_token, cache)             # one more token, nothing computed twice

Training goes through the same layers with an `Attend` of its own: see `train/learning/forward.py`.
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

from unspool.model.config import ModelConfig
from unspool.model.layers.beside import TokenInput, TokenInputs
from unspool.model.layers.kinds import new_feed, new_mixer
from unspool.model.layers.mixers import Mixer
from unspool.model.layers.parts import HeadTransform, Norm, norm_or_not, turn, unit
from unspool.model.positions import Rotary, sinusoidal

# Attention looks at this many queries at a time, so that a long prompt needs no giant table.
QUERIES_AT_ONCE = 256


class Cache:
    """Keys and values of the tokens so far, a pair of tensors for each layer that has them; what
    recurrent layers have instead cannot go back."""

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
        """Forget every token from position `length` on; what lies behind is overwritten."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind {self.length} tokens to {length}")
        if 0 < length < self.length and any(state.numel() for state in self.states):
            raise ValueError("what a recurrent layer has read cannot be taken back, only all of it")
        if length == 0:
            for state in self.states:
                state.zero_()
        self.length = length


class Angles(NamedTuple):
    """How a layer turns queries and keys by their positions."""

    cosine: Tensor
    sine: Tensor
    query_scale: Tensor | None = None  # [positions, 1]: how much longer queries are far along

    def to(self, x: Tensor) -> Angles:
        """The same where `x` lies and as exact."""
        scale = None if self.query_scale is None else self.query_scale.to(x)
        return Angles(self.cosine.to(x), self.sine.to(x), scale)


# Keys and values of the layers before, for those that have none of their own.
Shared = dict[int, tuple[Tensor, Tensor]]


class Attention(nn.Module):
    """Each position gathers from the positions it sees (itself and those before it, mostly) what
    it needs."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer, self.window = config, layer, config.window(layer)
        self.shape, self.source = config.shape(layer), config.kv_source(layer)
        self.scale = config.score_scale(layer)
        width, out, shared = config.width, self.shape.out_width, self.shape.kv_width
        # Has keys and values, and does not read another layer's; and whether others read its own.
        # Said here, because a compiled layer serves all others in which such facts are the same.
        self.own = own = self.source == layer
        self.lends = any(
            config.kv_source(later) == layer for later in range(layer + 1, config.layers)
        )
        self.q = nn.Linear(width, out, bias=config.qkv_bias)
        if own:
            self.k = nn.Linear(width, shared, bias=config.qkv_bias)
        self.v: nn.Linear | None = None
        if own and config.has_values(layer):
            self.v = nn.Linear(width, shared, bias=config.qkv_bias)
        self.gate: nn.Linear | None = None
        if config.attention_gate:
            self.gate = nn.Linear(width, out, bias=config.qkv_bias)
        self.out = nn.Linear(out, width, bias=config.out_bias)
        self.sinks = nn.Parameter(torch.zeros(self.shape.heads)) if config.sinks else None
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        if config.qk_norm != "none":
            whole, head = config.qk_norm == "whole", self.shape.head_width
            self.q_norm = Norm(config, out if whole else head, "rms")
            self.k_norm = Norm(config, shared if whole else head, "rms") if own else None

    def forward(
        self,
        x: Tensor,
        angles: Angles | None,
        cache: Cache | None,
        attend: Attend | None = None,
        shared: Shared | None = None,
    ) -> Tensor:
        batch, count, _ = x.shape
        query = self.queries(x, angles)
        if self.own:
            key, value = self.keys_values(x, angles)
            if self.lends and shared is not None:
                shared[self.layer] = key, value
        else:
            assert shared is not None, "a layer that reads the keys of another"
            key, value = shared[self.source]
        if attend is not None:
            mixed = attend(self, query, key, value)
            return self.finish(mixed.transpose(1, 2).reshape(batch, count, -1), x)
        start = 0
        if cache is not None:
            start, end = cache.length, cache.length + count
            keys, values = cache.keys[self.source], cache.values[self.source]
            if self.own:
                keys[:, :, start:end], values[:, :, start:end] = key, value
            key, value = keys[:, :, :end], values[:, :, :end]
        mixed = torch.cat(
            [
                self._attend(query[:, :, at : at + QUERIES_AT_ONCE], key, value, start + at)
                for at in range(0, count, QUERIES_AT_ONCE)
            ],
            dim=2,
        )
        return self.finish(mixed.transpose(1, 2).reshape(batch, count, -1), x)

    def finish(self, mixed: Tensor, x: Tensor) -> Tensor:
        """What the heads found, back in the width of `x`, which went in."""
        if self.gate is not None:
            mixed = mixed * torch.sigmoid(self.gate(x))
        found: Tensor = self.out(mixed)
        return found

    def queries(self, x: Tensor, angles: Angles | None) -> Tensor:
        """Of tokens, [batch, heads, count, head_width]."""
        query = self._normed(self.q(x), self.q_norm)
        if angles is None:
            return query
        query = turn(query, angles.cosine, angles.sine)
        return query if angles.query_scale is None else query * angles.query_scale

    def keys_values(self, x: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens, [batch, kv_heads, count, head_width] each."""
        plain = self.k(x)
        key = self._normed(plain, self.k_norm)
        value = self._heads(plain if self.v is None else self.v(x))
        if self.config.value_norm:
            value = unit(value, self.config.norm_eps)
        return (key if angles is None else turn(key, angles.cosine, angles.sine)), value

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        """The heads of queries or keys, normalized each by itself or all together."""
        if norm is None:
            return self._heads(x)
        whole = self.config.qk_norm == "whole"
        return self._heads(norm(x)) if whole else cast(Tensor, norm(self._heads(x)))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.shape.head_width)).transpose(1, 2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
        """Softmax-weighted values for queries at positions `start`, `start + 1`, ..."""
        count, length = query.shape[2], key.shape[2]
        ends = [self.config.visible_end(at, length) for at in range(start, start + count)]
        # What no query here may see is not even read.
        oldest, newest = self.reach(start, count, max(ends))
        key, value = key[:, :, oldest:newest], value[:, :, oldest:newest]
        ours = torch.arange(start, start + count, device=key.device)
        theirs = torch.arange(oldest, newest, device=key.device)
        visible_end = torch.tensor(ends, device=key.device)
        weights = self.weights(query, key, ours, theirs, visible_end).to(value.dtype)
        group = weights.shape[1] // value.shape[1]
        mixed = weights.unflatten(1, (-1, group)).flatten(2, 3) @ value
        return mixed.unflatten(2, (group, count)).flatten(1, 2)

    def reach(self, start: int, count: int, end: int) -> tuple[int, int]:
        """From where up to where so many queries from `start` on see, the keys ending at `end`."""
        if not self.window:
            return 0, end
        ahead = start + count - 1 + self.window if self.config.sight == "whole" else end
        return max(0, start + 1 - self.window), min(end, ahead)

    def weights(
        self,
        query: Tensor,
        key: Tensor,
        ours: Tensor,
        theirs: Tensor,
        visible_end: Tensor | None = None,
    ) -> Tensor:
        """How much each query looks at each key: [batch, heads, queries, keys], rows sum to one
        (to less where a sink takes a share).

        `ours` and `theirs` are the positions of queries [..., queries] and keys [..., keys]. A
        query sees the keys up to its own position, or before `visible_end` [..., queries].
        """
        return attention_weights(
            self.config,
            self.window,
            query,
            key,
            ours,
            theirs,
            ours + 1 if visible_end is None else visible_end,
            self.sinks,
            self.scale,
        )


# How the queries of whole texts look at their keys: [batch, heads, count, head_width] in and out.
Attend = Callable[[Attention, Tensor, Tensor, Tensor], Tensor]


class StepRun(ABC):
    """An `Attend` of a backend: one step of many texts, whose pasts the backend keeps."""

    @abstractmethod
    def __call__(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Keep new keys and values, and give what the queries find in each text's past."""

    @abstractmethod
    def recur(self, layer: int, mixer: Mixer, x: Tensor) -> Tensor:
        """What a recurrent layer adds, from the state that each text is in."""

    @abstractmethod
    def note_attended(self, x: Tensor) -> None:
        """Called with the vectors between attention and feed-forward, for those who look inside."""


def attention_weights(
    config: ModelConfig,
    window: int,
    query: Tensor,
    key: Tensor,
    ours: Tensor,
    theirs: Tensor,
    visible_end: Tensor,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """`Attention.weights`, for a layer that sees the last `window` tokens (0: all), and as many
    ahead in a model that sees the whole text. `scale`: of scores, where layers differ."""
    # Several query heads share one key head: put them side by side as more queries.
    group = query.shape[1] // key.shape[1]
    grouped = query.unflatten(1, (-1, group)).flatten(2, 3)
    scores = (grouped @ key.transpose(-1, -2)).float() * (config.scale if scale is None else scale)
    scores = scores.unflatten(2, (group, -1)).flatten(1, 2)
    if config.attention_softcap:
        scores = torch.tanh(scores / config.attention_softcap) * config.attention_softcap
    hidden = theirs[..., None, :] >= visible_end[..., :, None]  # causal: nobody sees ahead
    if window:
        hidden = hidden | (theirs[..., None, :] <= ours[..., :, None] - window)
        if config.sight == "whole":
            hidden = hidden | (theirs[..., None, :] >= ours[..., :, None] + window)
    if hidden.ndim == 3:  # one mask for each text of a batch, the same for all heads
        hidden = hidden[:, None]
    return with_sinks(scores.masked_fill(hidden, -math.inf), sinks)


def with_sinks(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the keys, and over one more score a head, whose share nobody gets."""
    if sinks is None:
        return scores.softmax(-1)
    extra = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, extra), -1).softmax(-1)[..., :-1]


class Layer(nn.Module):
    """Attention or a recurrence, then feed-forward, each adding to the vector that passes; in some
    models a layer has only one of the two."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.parallel, self.norm_sums = config.parallel, config.norm_sums
        self.residual_scale = config.residual_scale
        after = config.norm_after or config.norm_sums
        self.attention_norm = norm_or_not(config, config.normed_attention(layer))
        self.layer = layer
        self.mixes = config.mixer(layer) != "none"
        self.mixer: Mixer | None = None
        if config.mixer(layer) == "attention":
            self.attention = Attention(config, layer)
        elif self.mixes:
            self.mixer = new_mixer(config, layer)
        self.attention_post_norm = norm_or_not(config, after)
        self.feed_norm = norm_or_not(config, config.normed_feed(layer))
        self.feed = new_feed(config, layer) if config.has_feed(layer) else None
        self.feed_post_norm = norm_or_not(config, after)
        self.token_input = TokenInput(config) if config.token_width else None
        self.scale = nn.Parameter(torch.ones(1)) if config.layer_scale else None

    def forward(
        self,
        x: Tensor,
        angles: Angles | None,
        cache: Cache | None,
        attend: Attend | None = None,
        shared: Shared | None = None,
        token: Tensor | None = None,
    ) -> Tensor:
        between = x
        if self.mixes:
            normed = self.attention_norm(x)
            if self.mixer is not None:
                attended = self.mixer(
                    normed, lambda mixer, inputs: self._recurred(mixer, inputs, cache, attend)
                )
            else:
                attended = self.attention(normed, angles, cache, attend, shared)
            between = self.with_attended(x, attended)
        if isinstance(attend, StepRun):
            attend.note_attended(between)
        return self.with_fed(x, between, token)

    def _recurred(
        self, mixer: Mixer, x: Tensor, cache: Cache | None, attend: Attend | None
    ) -> Tensor:
        if isinstance(attend, StepRun):
            return attend.recur(self.layer, mixer, x)
        if attend is not None:  # whole rows of text, some of several documents
            return mixer.whole(x, getattr(attend, "documents", None))
        parts = mixer.project(x)
        state = cache.states[self.layer] if cache else mixer.fresh(len(x), x.device)
        mixed, state = mixer.recur(parts, state)
        if cache is not None:
            cache.states[self.layer] = state
        return mixer.finish(mixed, parts)

    def with_attended(self, x: Tensor, attended: Tensor) -> Tensor:
        """The vector with what attention found."""
        return self._sum(x, attended, self.attention_post_norm)

    def with_fed(self, x: Tensor, between: Tensor, token: Tensor | None = None) -> Tensor:
        """That with what the feed-forward says to it, or (`parallel`) to the layer's own input;
        and with what the layer is told of the `token` itself, where it is."""
        after = between
        if self.feed is not None:
            fed = self.feed(self.feed_norm(x if self.parallel else between))
            after = self._sum(between, fed, self.feed_post_norm)
        if self.token_input is not None and token is not None:
            after = after + self.token_input(after, token)
        return after if self.scale is None else after * self.scale.to(after)

    def _sum(self, x: Tensor, more: Tensor, norm: nn.Module) -> Tensor:
        if self.norm_sums:
            return cast(Tensor, norm(x + more))
        return x + (norm(more) if self.residual_scale == 1 else norm(more) * self.residual_scale)


class Transformer(nn.Module):
    """Token numbers in, a logit for every token of the vocabulary out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.position_embed: nn.Embedding | None = None
        if config.positions == "learned":
            self.position_embed = nn.Embedding(config.context, config.width)
        self.embed_norm = norm_or_not(config, config.embedding_norm)
        self.token_inputs = TokenInputs(config) if config.token_width else None
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.layers))
        self.transform = HeadTransform(config) if config.head_transform else None
        self.norm = Norm(config, config.width, config.norm)
        self.head: nn.Linear | None = None
        self.head_bias: nn.Parameter | None = None  # of a head that is the table of tokens
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
        """Logits for `tokens` [batch, count], which continue what the cache holds.

        A backend gives a `step`, which runs the layers over the pasts that it keeps.
        """
        if step is not None:
            return step(tokens)
        start, count = (cache.length if cache else 0), tokens.shape[1]
        if cache is not None and start + count > cache.capacity:
            raise ValueError(f"{start + count} tokens do not fit a cache of {cache.capacity}")
        positions = np.arange(start, start + count)
        angles = self.angles(positions, cache.capacity if cache else count)
        x = self.embedded(tokens, positions)
        told, shared = self.told(tokens, x), Shared()
        for index, layer in enumerate(self.layers):
            x = layer(x, angles[index], cache, None, shared, told[index])
        if cache is not None:
            cache.length = start + count
        return self.logits(x[:, -1:] if last_only else x)

    def logits(self, x: Tensor) -> Tensor:
        """What a vector that has passed the layers says about the next token, or (in a model that
        looks ahead and is not `shifted`) about the token at its own place."""
        x = self.norm(x if self.transform is None else self.transform(x))
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

    def embedded(
        self, tokens: Tensor, positions: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> Tensor:
        x: Tensor = self.embed(tokens)
        if self.config.embedding_scale != 1:
            # Rounded to the weights' own precision first, as these models were trained.
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype, device=x.device)
        if self.position_embed is not None:
            x = x + self.position_embed(torch.from_numpy(positions).to(tokens.device))
        elif self.config.positions == "sinusoidal":
            x = x + torch.from_numpy(sinusoidal(positions, self.config.width)).to(x)
        normed: Tensor = self.embed_norm(x)
        return normed

    def told(self, tokens: Tensor, x: Tensor) -> Sequence[Tensor | None]:
        """What each layer is told of the tokens beside the vector `x` that they begin with."""
        if self.token_inputs is None:
            return [None] * self.config.layers
        return cast(Tensor, self.token_inputs(tokens, x)).unbind(-2)

    def angles(
        self, positions: np.ndarray[tuple[int], np.dtype[np.int64]], length: int
    ) -> list[Angles | None]:
        """How each layer turns; layers that turn alike share one set of tables."""
        like, made = self.embed.weight, dict[Rotary, Angles]()
        config, query_scale = self.config, None
        if config.query_growth:
            far = np.log1p(positions // config.query_span) * config.query_growth
            query_scale = torch.from_numpy(1 + far)[:, None].to(like)
        turning = [config.layer_rotary(layer) for layer in range(config.layers)]
        for rotary in set(turning) - {None}:
            assert rotary is not None
            cosine, sine = (torch.from_numpy(t).to(like) for t in rotary.tables(positions, length))
            made[rotary] = Angles(cosine, sine, query_scale)
        return [made[rotary] if rotary is not None else None for rotary in turning]
