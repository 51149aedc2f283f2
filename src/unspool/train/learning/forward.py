"""The transformer over whole rows of text at once, as training needs it: no cache, any mask.

    sight = Sight.of(model.config, tokens)                     # causal
    x = hidden(model, tokens, sight)                           # [batch, length, width]

What `hidden` gives has not passed the last norm yet: `model.logits` does that, in small pieces, so
that the logits of all tokens are never in memory together (`cross_entropy.py`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from unspool.model.config import ModelConfig
from unspool.model.transformer import Angles, Attend, Attention, Shared, Transformer, with_sinks

Positions = npt.NDArray[np.int64]
# Row of the batch, head, query, key -> may this query see this key? Numbers or tensors of numbers.
Allowed = Callable[[Any, Any, Any, Any], Any]
ALL = "all"  # the mask of those who see everything: none is needed


@dataclass(frozen=True, slots=True)
class Sight:
    """Which tokens each token sees, and how that is computed; one mask for each window."""

    masks: dict[int, Any]  # window -> None (plain causal), ALL, a tensor, or a GPU's block mask
    documents: Tensor | None = None  # [batch, length]: what recurrent layers must tell apart

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        tokens: Tensor,
        allowed: Allowed | None = None,
        documents: Tensor | None = None,
    ) -> Sight:
        """As far as the model looks, or what `allowed` says; layers with a window see no further
        than that. `documents` is for layers that do not look but carry a state."""
        allowed = allowed or _ahead(config)
        masks: dict[int, Any] = {}
        rows, length = tokens.shape if allowed is not None else (1, tokens.shape[1])
        for window in {config.window(layer) for layer in range(config.layers)}:
            if allowed is None and (window == 0 or window >= length):
                masks[window] = None
            elif allowed is everything and not (window or _by_hand(config)):
                masks[window] = ALL
            else:
                whole = _within(window, allowed or causal)
                masks[window] = looking(whole, rows, length, length, tokens.device, config)
        return cls(masks, None if documents is None else documents[:, : tokens.shape[1]])

    def __call__(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        config, mask = attention.config, self.masks[attention.window]
        if _by_hand(config):
            return _attend(attention, query, key, value, mask)
        grouped = query.shape[1] != key.shape[1]
        if mask is ALL:
            return functional.scaled_dot_product_attention(
                query, key, value, scale=attention.scale, enable_gqa=grouped
            )
        if mask is not None and not isinstance(mask, Tensor):
            mixed: Tensor = _flex()(
                query, key, value, block_mask=mask, scale=attention.scale, enable_gqa=grouped
            )
            return mixed
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            mask,
            is_causal=mask is None,
            scale=attention.scale,
            enable_gqa=grouped,
        )


def causal(row: Any, head: Any, query: Any, key: Any) -> Any:
    """Every token sees itself and those before it."""
    return query >= key


def inside(documents: Tensor) -> Allowed:
    """Causal, and no token sees another document than its own: `documents` [batch, length]."""

    def allowed(row: Any, head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (documents[row, query] == documents[row, key])

    return allowed


def everything(row: Any, head: Any, query: Any, key: Any) -> Any:
    """Every token sees all the others."""
    return (query >= 0) & (key >= 0)


def in_blocks(block: int) -> Allowed:
    """Every token sees what comes before its block, and all of the block."""

    def allowed(row: Any, head: Any, query: Any, key: Any) -> Any:
        return query // block >= key // block

    return allowed


def _ahead(config: ModelConfig) -> Allowed | None:
    """What the tokens of a model see that looks ahead; None for one that looks back."""
    if config.sight == "block":
        return in_blocks(config.block)
    return everything if config.sight == "whole" else None


def _within(window: int, allowed: Allowed) -> Allowed:
    if not window:
        return allowed

    def near(row: Any, head: Any, query: Any, key: Any) -> Any:
        distance = query - key  # who looks back only never sees a negative one
        return allowed(row, head, query, key) & (distance < window) & (distance > -window)

    return near


def looking(
    allowed: Allowed,
    rows: int,
    queries: int,
    keys: int,
    device: torch.device,
    config: ModelConfig,
) -> Any:
    """The mask of so many queries that look at so many keys: on a GPU the blocks that anybody sees,
    so that the others are not computed."""
    if device.type == "cuda" and not _by_hand(config):
        from torch.nn.attention.flex_attention import create_block_mask

        return create_block_mask(allowed, rows, None, queries, keys, device=device)
    row = torch.arange(rows, device=device)[:, None, None, None]
    ours, theirs = (torch.arange(count, device=device) for count in (queries, keys))
    seen: Tensor = allowed(row, 0, ours[:, None], theirs[None, :])
    return seen.expand(rows, 1, queries, keys)


@cache
def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _by_hand(config: ModelConfig) -> bool:
    """Whether attention does what no ready-made kernel does."""
    return bool(config.attention_softcap) or config.sinks


def _attend(
    attention: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """Scores bent by tanh before the softmax, or with a sink beside them."""
    config = attention.config
    group = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(group, 1) for part in (key, value))
    scores = (query @ key.transpose(-1, -2)).float() * attention.scale
    if config.attention_softcap:
        scores = torch.tanh(scores / config.attention_softcap) * config.attention_softcap
    if mask is None:
        length = query.shape[2]
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~mask, -math.inf)
    return with_sinks(scores, attention.sinks).to(value.dtype) @ value


def hidden(
    model: Transformer,
    tokens: Tensor,
    sight: Attend | Sequence[Attend],
    positions: Positions | None = None,
) -> Tensor:
    """The vectors of `tokens` [batch, length] behind the last layer."""
    return deque(residuals(model, tokens, sight, positions), maxlen=1)[0]


def residuals(
    model: Transformer,
    tokens: Tensor,
    sight: Attend | Sequence[Attend],
    positions: Positions | None = None,
) -> Iterator[Tensor]:
    """What goes into each layer, one after the other, and what comes out of the last. `sight` is
    one for all layers, or one for each."""
    if positions is None:
        positions = np.arange(tokens.shape[1])
    x = model.embedded(tokens, positions)
    told, shared = model.told(tokens, x), Shared()
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    yield x
    each = sight if isinstance(sight, Sequence) else [sight] * model.config.layers
    for layer, angles, look, token in zip(
        model.layers, angle_tables(model, positions, x), each, told, strict=True
    ):
        x = layer(x, angles, None, look, shared, token)
        yield x


# The tables of angles are the same in every step: made once for each set of positions.
_TABLES: WeakKeyDictionary[Transformer, dict[Any, Any]] = WeakKeyDictionary()


def angle_tables(model: Transformer, positions: Positions, x: Tensor) -> list[Angles | None]:
    """How each layer turns at these positions, where `x` lies and as exact."""
    made = _TABLES.setdefault(model, {})
    key = (positions.tobytes(), x.dtype, x.device)
    if key not in made:
        length = int(positions.max()) + 1
        if len(made) > 8:  # texts of ever other lengths
            made.clear()
        made[key] = [
            None if turning is None else turning.to(x)
            for turning in model.angles(positions, length)
        ]
    found: list[Angles | None] = made[key]
    return found


def recompute_activations(model: Transformer) -> None:
    """Keep only what goes into each layer, and compute its inside again for the gradients: about a
    third more work for a fraction of the memory."""
    for layer in model.layers:
        inner = layer.forward
        layer.forward = lambda *given, inner=inner: checkpoint(inner, *given, use_reentrant=False)
