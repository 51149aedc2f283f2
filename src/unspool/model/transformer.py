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
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from unspool.model.activation import activate, bend
from unspool.model.config import ModelConfig
from unspool.model.positions import sinusoidal

# Attention looks at this many queries at a time, so that a long prompt needs no giant table.
QUERIES_AT_ONCE = 256


class Cache:
    """Keys and values of the tokens so far, one pair of tensors a layer."""

    def __init__(
        self, config: ModelConfig, capacity: int, batch: int, dtype: torch.dtype, device: str
    ) -> None:
        shape = (batch, config.kv_heads, capacity, config.head_width)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.values = [torch.zeros_like(keys) for keys in self.keys]
        self.capacity = capacity
        self.length = 0

    def rewind(self, length: int) -> None:
        """Forget every token from position `length` on; what lies behind is overwritten."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot rewind {self.length} tokens to {length}")
        self.length = length


class Norm(nn.Module):
    """RMSNorm or LayerNorm, computed in 32 bits whatever the weights are in."""

    def __init__(self, config: ModelConfig, size: int, kind: str) -> None:
        super().__init__()
        self.eps, self.plus_one = config.norm_eps, config.norm_plus_one
        self.centred = kind == "layer"
        self.weight = nn.Parameter(torch.full((size,), 0.0 if self.plus_one else 1.0))
        has_bias = self.centred and config.norm_bias
        self.bias = nn.Parameter(torch.zeros(size)) if has_bias else None

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        if self.centred:
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        weight = self.weight.float()
        wide = wide * (1 + weight if self.plus_one else weight)
        if self.bias is not None:
            wide = wide + self.bias.float()
        return wide.to(x.dtype)


def turn(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate pairs of numbers (one of each half) by their angle; what is left over passes."""
    width = cosine.shape[-1] * 2
    first, second = x[..., : width // 2], x[..., width // 2 : width]
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), -1)


class Attention(nn.Module):
    """Each position gathers from the positions it sees (itself and those before it, mostly) what
    it needs."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config, self.layer, self.window = config, layer, config.window(layer)
        width, out, shared = config.width, config.heads * config.head_width, config.kv_width
        self.q = nn.Linear(width, out, bias=config.qkv_bias)
        self.k = nn.Linear(width, shared, bias=config.qkv_bias)
        self.v = nn.Linear(width, shared, bias=config.qkv_bias)
        self.out = nn.Linear(out, width, bias=config.out_bias)
        self.sinks = nn.Parameter(torch.zeros(config.heads)) if config.sinks else None
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        if config.qk_norm != "none":
            whole = config.qk_norm == "whole"
            self.q_norm = Norm(config, out if whole else config.head_width, "rms")
            self.k_norm = Norm(config, shared if whole else config.head_width, "rms")

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        cache: Cache | None,
        attend: Attend | None = None,
    ) -> Tensor:
        batch, count, _ = x.shape
        query, key, value = self.project(x, angles)
        if attend is not None:
            mixed = attend(self, query, key, value)
            return self.out(mixed.transpose(1, 2).reshape(batch, count, -1))
        start = 0
        if cache is not None:
            start, end = cache.length, cache.length + count
            cache.keys[self.layer][:, :, start:end] = key
            cache.values[self.layer][:, :, start:end] = value
            key, value = cache.keys[self.layer][:, :, :end], cache.values[self.layer][:, :, :end]
        mixed = torch.cat(
            [
                self._attend(query[:, :, at : at + QUERIES_AT_ONCE], key, value, start + at)
                for at in range(0, count, QUERIES_AT_ONCE)
            ],
            dim=2,
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, count, -1))

    def project(
        self, x: Tensor, angles: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of tokens, [batch, heads, count, head_width] each."""
        query, key, value = self.q(x), self.k(x), self.v(x)
        if self.config.qk_norm == "whole" and self.q_norm and self.k_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (self._heads(part) for part in (query, key, value))
        if self.config.qk_norm == "head" and self.q_norm and self.k_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        if angles is not None:
            query, key = turn(query, *angles), turn(key, *angles)
        return query, key, value

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_width)).transpose(1, 2)

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
        group = self.config.heads // self.config.kv_heads
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
        )


# How the queries of whole texts look at their keys: [batch, heads, count, head_width] in and out.
Attend = Callable[[Attention, Tensor, Tensor, Tensor], Tensor]


def attention_weights(
    config: ModelConfig,
    window: int,
    query: Tensor,
    key: Tensor,
    ours: Tensor,
    theirs: Tensor,
    visible_end: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """`Attention.weights`, for a layer that sees the last `window` tokens (0: all), and as many
    ahead in a model that sees the whole text."""
    # Several query heads share one key head: put them side by side as more queries.
    group = config.heads // config.kv_heads
    grouped = query.unflatten(1, (-1, group)).flatten(2, 3)
    scores = (grouped @ key.transpose(-1, -2)).float() * config.scale
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


class FeedForward(nn.Module):
    """Each position by itself: widen, bend, and narrow again."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width, inner, bias = config.width, config.ff_width, config.ff_bias
        self.gate = nn.Linear(width, inner, bias=bias) if config.gated else None
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(activate(self.config.activation, self.up(x)))
        return self.down(bend(self.config, self.gate(x), self.up(x)))


class Stacked(nn.Module):
    """The same matrix of every expert, one above the other."""

    def __init__(self, experts: int, rows: int, columns: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(experts, rows, columns) * columns**-0.5)
        self.bias = nn.Parameter(torch.zeros(experts, rows)) if bias else None

    def forward(self, x: Tensor, expert: int) -> Tensor:
        bias = None if self.bias is None else self.bias[expert]
        return functional.linear(x, self.weight[expert], bias)


class Experts(nn.Module):
    """Many feed-forwards, of which a router picks a few for each token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        count, inner, width = config.experts, config.expert_width, config.width
        self.router = nn.Linear(width, count, bias=config.router_bias)
        self.gate = Stacked(count, inner, width, config.expert_bias)
        self.up = Stacked(count, inner, width, config.expert_bias)
        self.down = Stacked(count, width, inner, config.expert_bias)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        chances = self.router(tokens).float().softmax(-1)
        weights, chosen = chances.topk(self.config.experts_per_token, dim=-1)
        if self.config.normalize_experts:
            weights = weights / weights.sum(-1, keepdim=True)
        total = torch.zeros_like(tokens)
        for expert in chosen.unique().tolist():  # only the experts that somebody asked for
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            picked = tokens[rows]
            bent = bend(self.config, self.gate(picked, expert), self.up(picked, expert))
            answer = self.down(bent, expert)
            total.index_add_(0, rows, answer * weights[rows, place, None].to(answer.dtype))
        return total.view_as(x)


def norm_or_not(config: ModelConfig, wanted: bool) -> nn.Module:
    return Norm(config, config.width, config.norm) if wanted else nn.Identity()


class Layer(nn.Module):
    """Attention, then feed-forward, each adding to the vector that passes through."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.parallel, self.norm_sums = config.parallel, config.norm_sums
        after = config.norm_after or config.norm_sums
        self.attention_norm = norm_or_not(config, config.normed_attention(layer))
        self.attention = Attention(config, layer)
        self.attention_post_norm = norm_or_not(config, after)
        self.feed_norm = norm_or_not(config, config.norm_before)
        self.feed = Experts(config) if config.has_experts(layer) else FeedForward(config)
        self.feed_post_norm = norm_or_not(config, after)

    def forward(
        self,
        x: Tensor,
        angles: tuple[Tensor, Tensor] | None,
        cache: Cache | None,
        attend: Attend | None = None,
    ) -> Tensor:
        attended = self.attention(self.attention_norm(x), angles, cache, attend)
        between = self.with_attended(x, attended)
        return self.with_fed(x, between)

    def with_attended(self, x: Tensor, attended: Tensor) -> Tensor:
        """The vector with what attention found."""
        return self._sum(x, attended, self.attention_post_norm)

    def with_fed(self, x: Tensor, between: Tensor) -> Tensor:
        """That with what the feed-forward says to it, or (`parallel`) to the layer's own input."""
        fed = self.feed(self.feed_norm(x if self.parallel else between))
        return self._sum(between, fed, self.feed_post_norm)

    def _sum(self, x: Tensor, more: Tensor, norm: nn.Module) -> Tensor:
        summed: Tensor = norm(x + more) if self.norm_sums else x + norm(more)
        return summed


class HeadTransform(nn.Module):
    """One more matrix between the layers and the last norm, as BERT has it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.activation
        self.norm = norm_or_not(config, config.norm_before)
        self.dense = nn.Linear(config.width, config.width, bias=config.head_transform_bias)

    def forward(self, x: Tensor) -> Tensor:
        return activate(self.activation, self.dense(self.norm(x)))


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
        self, tokens: Tensor, cache: Cache | None = None, *, last_only: bool = False
    ) -> Tensor:
        """Logits for `tokens` [batch, count], which continue what the cache holds."""
        start, count = (cache.length if cache else 0), tokens.shape[1]
        if cache is not None and start + count > cache.capacity:
            raise ValueError(f"{start + count} tokens do not fit a cache of {cache.capacity}")
        positions = np.arange(start, start + count)
        angles = self.angles(positions, cache.capacity if cache else count)
        x = self.embedded(tokens, positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, angles[index], cache)
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

    def angles(
        self, positions: np.ndarray[tuple[int], np.dtype[np.int64]], length: int
    ) -> list[tuple[Tensor, Tensor] | None]:
        """Cosine and sine for each layer; layers that turn alike share one pair of tables."""
        weight, made = self.embed.weight, {}
        for rotary in {self.config.layer_rotary(layer) for layer in range(self.config.layers)}:
            if rotary is not None:
                cosine, sine = rotary.tables(positions, length)
                made[rotary] = (
                    torch.from_numpy(cosine).to(weight),
                    torch.from_numpy(sine).to(weight),
                )
        turning = (self.config.layer_rotary(layer) for layer in range(self.config.layers))
        return [made[rotary] if rotary is not None else None for rotary in turning]
