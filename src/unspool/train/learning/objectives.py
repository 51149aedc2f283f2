"""Training objectives: functions of (model, batch, random generator) that return a loss.

    next_token        predict each token from those before it
    Masked            predict masked tokens from all around them (masked diffusion,
                      arXiv 2502.09992)
    BlockDiffusion    predict masked tokens of a block from the block and the text before it
                      (arXiv 2503.09573)

A `Loss` has the mean over the target tokens, their number, and statistics to log. Means of several
batches are combined by their number of tokens, so that neither gradient accumulation nor the number
of processes changes the training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from unspool.model.transformer import Transformer
from unspool.train.learning.cross_entropy import summed_loss
from unspool.train.learning.forward import (
    AttentionMask,
    causal_within_documents,
    full_mask,
    hidden_states,
)

if TYPE_CHECKING:
    from unspool.train.data.batches import TrainingBatch


@dataclass(frozen=True, slots=True)
class Loss:
    mean: Tensor  # mean over the target tokens, in nats
    tokens: int | Tensor  # number of target tokens
    extra: dict[str, float] = field(default_factory=dict)  # statistics for the log


# (model, batch, rng) -> Loss. The model is a Transformer, or a draft head with config and layers.
Objective = Callable[[Any, Any, torch.Generator], Loss]


def next_token(model: Transformer, batch: TrainingBatch, rng: torch.Generator) -> Loss:
    """CausalModel language modelling, within documents if the batch has document indices."""
    tokens, targets = batch.ids[:, :-1], batch.ids[:, 1:]
    allowed = None if batch.document_ids is None else causal_within_documents(batch.document_ids)
    attention = AttentionMask.build(model.config, tokens, allowed, batch.document_ids)
    mask = batch.loss_mask
    summed = summed_loss(model, hidden_states(model, tokens, attention), targets, mask)
    return _mean_loss(summed, targets.numel() if mask is None else mask.sum())


@dataclass(frozen=True, slots=True)
class Masked:
    """Masked diffusion: predict masked tokens from all visible ones.

    In each row a share t of the tokens, uniform from 0 to 1, is replaced by `mask_id`. With
    `shifted` a hidden state predicts the next token, as in models that were causal before.

    `weighting`: "bound" weights a prediction by 1/t, which makes the loss a bound on the
    log-likelihood of the text; "plain" weights all alike, which has less variance.
    """

    mask_id: int
    shifted: bool = False
    weighting: Literal["bound", "plain"] = "bound"

    def __call__(self, model: Transformer, batch: TrainingBatch, rng: torch.Generator) -> Loss:
        tokens = batch.ids[:, :-1]
        share = _mask_ratios(tokens.shape[0], 1, rng, tokens.device)
        hide = _draw_mask(tokens, share, rng) & _maskable(batch)
        weights = hide / share if self.weighting == "bound" else hide.float()
        noisy = tokens.masked_fill(hide, self.mask_id)
        allowed = full_mask if batch.document_ids is None else _same_document(batch.document_ids)
        attention = AttentionMask.build(model.config, tokens, allowed)
        x = hidden_states(model, noisy, attention)
        if self.shifted:  # nothing precedes the first token, so it is not predicted
            x, tokens, weights = x[:, :-1], tokens[:, 1:], weights[:, 1:]
        summed = summed_loss(model, x, tokens, weights)
        bound = self.weighting == "bound"
        return _mean_loss(summed, _maskable(batch).sum() if bound else weights.sum().clamp(min=1))


@dataclass(frozen=True, slots=True)
class BlockDiffusion:
    """Block diffusion: blocks from left to right, the tokens of a block in any order.

    A row is concatenated with a noisy copy of itself. The clean half has causal attention; each
    noisy block attends to itself, bidirectionally, and to the clean tokens before it. A finished
    block therefore has the same keys and values as in a causal model.

    `weighting`: "bound" weights a prediction by 1/t, t being the masked share of its block, which
    bounds the log-likelihood; "plain" weights all alike.
    """

    mask_id: int
    block: int = 8
    shifted: bool = False
    weighting: Literal["bound", "plain"] = "bound"

    def __call__(self, model: Transformer, batch: TrainingBatch, rng: torch.Generator) -> Loss:
        clean = batch.ids[:, :-1]
        rows, length = clean.shape
        blocks = -(-length // self.block)
        share = _mask_ratios(rows, blocks, rng, clean.device)
        share = share.repeat_interleave(self.block, 1)[:, :length]
        hide = _draw_mask(clean, share, rng) & _maskable(batch)
        clean_and_noisy = torch.cat((clean, clean.masked_fill(hide, self.mask_id)), 1)
        positions = np.tile(np.arange(length), 2)
        allowed = block_diffusion_mask(length, self.block, batch.document_ids)
        attention = AttentionMask.build(model.config, clean_and_noisy, allowed)
        x = hidden_states(model, clean_and_noisy, attention, positions)
        is_bound = self.weighting == "bound"
        weights = hide / share if is_bound else hide.float()
        num_targets = _maskable(batch).sum() if is_bound else hide.sum().clamp(min=1)
        summed = summed_loss(model, self._predicting_states(x, length), clean, weights)
        return _mean_loss(summed, num_targets)

    def _predicting_states(self, x: Tensor, length: int) -> Tensor:
        """The hidden state that predicts each token: its own, or with `shifted` the one before."""
        noisy = x[:, length:]
        if not self.shifted:
            return noisy
        # The first token of a block is predicted by the clean token before it, which attends to all
        # text before the block; the very first token by its own position.
        before = torch.cat((noisy[:, :1], noisy[:, :-1]), 1)
        clean_before = torch.cat((noisy[:, :1], x[:, : length - 1]), 1)
        first = (torch.arange(length, device=x.device) % self.block == 0)[None, :, None]
        return torch.where(first, clean_before, before)


def block_diffusion_mask(length: int, block: int, documents: Tensor | None) -> Any:
    """Mask function over `length` clean tokens followed by their noisy copies."""

    def allowed(row: Any, head: Any, query: Any, key: Any) -> Any:
        noisy_query, noisy_key = query >= length, key >= length
        at, there = query % length, key % length
        own_block = at // block == there // block
        clean = ~noisy_query & ~noisy_key & (at >= there)
        before = noisy_query & ~noisy_key & (there // block < at // block)
        visible = clean | before | (noisy_query & noisy_key & own_block)
        if documents is not None:
            visible = visible & (documents[row, at] == documents[row, there])
        return visible

    return allowed


def _same_document(documents: Tensor) -> Any:
    def allowed(row: Any, head: Any, query: Any, key: Any) -> Any:
        return documents[row, query] == documents[row, key]

    return allowed


def _mask_ratios(rows: int, count: int, rng: torch.Generator, device: torch.device) -> Tensor:
    """Masked shares from 0.001 to 1, [rows, count].

    They are spread evenly over the batch, which lowers the variance of the loss, and never 0,
    because the loss is divided by them.
    """
    uniform = torch.rand(1, generator=rng) + torch.arange(rows * count) / (rows * count)
    shuffled = (uniform % 1)[torch.randperm(rows * count, generator=rng)]
    return (shuffled * 0.999 + 0.001).view(rows, count).to(device)


def _draw_mask(tokens: Tensor, share: Tensor, rng: torch.Generator) -> Tensor:
    return torch.rand(tokens.shape, generator=rng).to(tokens.device) < share


def _maskable(batch: TrainingBatch) -> Tensor:
    """Inputs that are targets of the loss; `loss_mask` is about the token after each input."""
    if batch.loss_mask is None:
        return torch.ones_like(batch.ids[:, :-1], dtype=torch.bool)
    first = torch.zeros_like(batch.loss_mask[:, :1])
    return torch.cat((first, batch.loss_mask[:, :-1]), 1)


def _mean_loss(summed: Tensor, tokens: int | Tensor) -> Loss:
    num_tokens = tokens.clamp(min=1) if isinstance(tokens, Tensor) else max(1, tokens)
    return Loss(summed / num_tokens, tokens)
