"""Forward pass over full sequences for training: no KV cache, any attention mask.

    mask = AttentionMask.build(model.config, tokens)                      # causal
    x = hidden(model, tokens, mask)                            # [batch, length, width]

`hidden` returns the residual stream before the final norm. `model.logits` applies norm and head in
chunks, so that the logits of all tokens are never in memory together.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from unspool.model.config import ModelConfig
from unspool.model.layers.transformer import (
    Attention,
    AttentionFunction,
    RopeTables,
    Shared,
    Transformer,
    softmax_with_sinks,
)

Positions = npt.NDArray[np.int64]
# (row, head, query, key) -> whether the query attends to the key; indices or tensors of indices.
MaskFunction = Callable[[Any, Any, Any, Any], Any]
FULL = "all"  # full attention, computed without a mask


@dataclass(frozen=True, slots=True)
class AttentionMask:
    """Attention masks of a batch, one per sliding window size, and the attention over them."""

    masks: dict[int, Any]  # window -> None (plain causal), FULL, a tensor, or a flex BlockMask
    documents: Tensor | None = None  # [batch, length]: where recurrent layers reset their state

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        tokens: Tensor,
        allowed: MaskFunction | None = None,
        documents: Tensor | None = None,
    ) -> AttentionMask:
        """Build the masks of a batch.

        Args:
            allowed: Mask function; None: the model's own attention pattern. Sliding windows are
                applied on top.
            documents: Document indices, for layers with recurrent state.
        """
        allowed = allowed or _bidirectional_mask(config)
        masks: dict[int, Any] = {}
        rows, length = tokens.shape if allowed is not None else (1, tokens.shape[1])
        for window in {config.window(layer) for layer in range(config.layers)}:
            if allowed is None and (window == 0 or window >= length):
                masks[window] = None
            elif allowed is full_mask and not (window or _needs_manual_attention(config)):
                masks[window] = FULL
            else:
                function = _with_window(window, allowed or causal_mask)
                masks[window] = build_mask(function, rows, length, length, tokens.device, config)
        return cls(masks, None if documents is None else documents[:, : tokens.shape[1]])

    def __call__(self, attention: Attention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        config, mask = attention.config, self.masks[attention.window]
        if _needs_manual_attention(config):
            return _manual_attention(attention, query, key, value, mask)
        grouped = query.shape[1] != key.shape[1]
        if mask is FULL:
            return functional.scaled_dot_product_attention(
                query, key, value, scale=attention.scale, enable_gqa=grouped
            )
        if mask is not None and not isinstance(mask, Tensor):
            output: Tensor = _compiled_flex_attention()(
                query, key, value, block_mask=mask, scale=attention.scale, enable_gqa=grouped
            )
            return output
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            mask,
            is_causal=mask is None,
            scale=attention.scale,
            enable_gqa=grouped,
        )


def causal_mask(row: Any, head: Any, query: Any, key: Any) -> Any:
    """Each token attends to itself and the tokens before it."""
    return query >= key


def causal_within_documents(documents: Tensor) -> MaskFunction:
    """Causal attention within documents, given as indices [batch, length]."""

    def allowed(row: Any, head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (documents[row, query] == documents[row, key])

    return allowed


def full_mask(row: Any, head: Any, query: Any, key: Any) -> Any:
    """Full bidirectional attention."""
    return (query >= 0) & (key >= 0)


def block_causal_mask(block: int) -> MaskFunction:
    """Block-causal attention: each token attends to its block and the blocks before it."""

    def allowed(row: Any, head: Any, query: Any, key: Any) -> Any:
        return query // block >= key // block

    return allowed


def _bidirectional_mask(config: ModelConfig) -> MaskFunction | None:
    """The mask function of a bidirectional model; None for a causal one."""
    if config.sight == "block":
        return block_causal_mask(config.block)
    return full_mask if config.sight == "whole" else None


def _with_window(window: int, allowed: MaskFunction) -> MaskFunction:
    if not window:
        return allowed

    def near(row: Any, head: Any, query: Any, key: Any) -> Any:
        distance = query - key  # never negative under a causal mask
        return allowed(row, head, query, key) & (distance < window) & (distance > -window)

    return near


def build_mask(
    allowed: MaskFunction,
    rows: int,
    queries: int,
    keys: int,
    device: torch.device,
    config: ModelConfig,
) -> Any:
    """Evaluate a mask function: a bool tensor, or on a GPU a flex BlockMask that skips blocks."""
    if device.type == "cuda" and not _needs_manual_attention(config):
        from torch.nn.attention.flex_attention import create_block_mask

        return create_block_mask(allowed, rows, None, queries, keys, device=device)
    row = torch.arange(rows, device=device)[:, None, None, None]
    query, key = (torch.arange(count, device=device) for count in (queries, keys))
    mask: Tensor = allowed(row, 0, query[:, None], key[None, :])
    return mask.expand(rows, 1, queries, keys)


@cache
def _compiled_flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _needs_manual_attention(config: ModelConfig) -> bool:
    """Whether attention has features that torch's kernels lack: soft-capping or sinks."""
    return bool(config.attention_softcap) or config.sinks


def _manual_attention(
    attention: Attention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor:
    """Attention with soft-capped scores or attention sinks."""
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
    return softmax_with_sinks(scores, attention.sinks).to(value.dtype) @ value


def hidden_states(
    model: Transformer,
    tokens: Tensor,
    attention: AttentionFunction | Sequence[AttentionFunction],
    positions: Positions | None = None,
) -> Tensor:
    """Hidden states of `tokens` [batch, length] after the last layer."""
    return deque(layer_states(model, tokens, attention, positions), maxlen=1)[0]


def layer_states(
    model: Transformer,
    tokens: Tensor,
    attention: AttentionFunction | Sequence[AttentionFunction],
    positions: Positions | None = None,
) -> Iterator[Tensor]:
    """Yield the input of each layer, then the output of the last one.

    `attention` is the attention of all layers, or a sequence with one per layer.
    """
    if positions is None:
        positions = np.arange(tokens.shape[1])
    x = model.embed_tokens(tokens, positions)
    layer_inputs, shared = model.per_layer_embeddings(tokens, x), Shared()
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    yield x
    attends = attention if isinstance(attention, Sequence) else [attention] * model.config.layers
    for layer, angles, attend, layer_input in zip(
        model.layers, rope_tables(model, positions, x), attends, layer_inputs, strict=True
    ):
        x = layer(x, angles, None, attend, shared, layer_input)
        yield x


# RoPE tables are the same in every step: computed once for each set of positions.
_ROPE_TABLES: WeakKeyDictionary[Transformer, dict[Any, Any]] = WeakKeyDictionary()


def rope_tables(model: Transformer, positions: Positions, x: Tensor) -> list[RopeTables | None]:
    """RoPE tables of each layer at these positions, with the device and dtype of `x`."""
    tables = _ROPE_TABLES.setdefault(model, {})
    key = (positions.tobytes(), x.dtype, x.device)
    if key not in tables:
        length = int(positions.max()) + 1
        if len(tables) > 8:  # bounded: lengths may vary endlessly
            tables.clear()
        tables[key] = [
            None if angles is None else angles.to(x)
            for angles in model.rope_tables(positions, length)
        ]
    result: list[RopeTables | None] = tables[key]
    return result


def recompute_activations(model: Transformer) -> None:
    """Activation checkpointing: keep only layer inputs, recompute the rest in the backward pass.

    Costs about a third more compute for a fraction of the memory.
    """
    for layer in model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
