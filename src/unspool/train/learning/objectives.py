"""Objectives: what a model is trained to do, as functions of (model, batch, random numbers).

    next_token        guess each token from those before it
    Masked            guess hidden tokens from all around them (masked diffusion, arXiv 2502.09992)
    BlockDiffusion    guess hidden tokens of a block from the block and what came before it
                      (arXiv 2503.09573)

Each gives a `Loss`: the mean over the tokens that count, how many those were, and whatever else is
worth logging. Means of several batches are joined by their number of tokens, so that neither the
number of batches in a step nor the number of processes changes what is trained.
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
from unspool.train.learning.forward import Sight, everything, hidden, inside

if TYPE_CHECKING:
    from unspool.train.data.batches import Batch


@dataclass(frozen=True, slots=True)
class Loss:
    total: Tensor  # the mean over what counts, in nats
    tokens: int | Tensor  # how many counted
    extra: dict[str, float] = field(default_factory=dict)  # goes into the log as it is


# Of a model (a Transformer, or a head that has a config and layers too), a batch, random numbers.
Objective = Callable[[Any, Any, torch.Generator], Loss]


def next_token(model: Transformer, batch: Batch, rng: torch.Generator) -> Loss:
    """Each token from those before it, inside its document if the batch says where those begin."""
    tokens, targets = batch.ids[:, :-1], batch.ids[:, 1:]
    allowed = None if batch.documents is None else inside(batch.documents)
    sight = Sight.of(model.config, tokens, allowed, batch.documents)
    summed = summed_loss(model, hidden(model, tokens, sight), targets, batch.counted)
    return _mean(summed, targets.numel() if batch.counted is None else batch.counted.sum())


@dataclass(frozen=True, slots=True)
class Masked:
    """Hidden tokens from all that is visible around them; nothing comes first.

    In each row a share t of the tokens, drawn evenly from 0 to 1, is replaced by `mask_id`. With
    `shifted` a token's vector guesses the one behind it, as in models that were causal before.

    `weighting`: "bound" counts a guess 1/t, which makes the loss a bound on the text's
    log-likelihood; "plain" counts every guess alike, which is steadier.
    """

    mask_id: int
    shifted: bool = False
    weighting: Literal["bound", "plain"] = "bound"

    def __call__(self, model: Transformer, batch: Batch, rng: torch.Generator) -> Loss:
        tokens = batch.ids[:, :-1]
        share = _shares(tokens.shape[0], 1, rng, tokens.device)
        hide = _drawn(tokens, share, rng) & _may_hide(batch)
        weights = hide / share if self.weighting == "bound" else hide.float()
        noisy = tokens.masked_fill(hide, self.mask_id)
        allowed = everything if batch.documents is None else _together(batch.documents)
        sight = Sight.of(model.config, tokens, allowed)
        x = hidden(model, noisy, sight)
        if self.shifted:  # nobody stands before the first token, so nobody guesses it
            x, tokens, weights = x[:, :-1], tokens[:, 1:], weights[:, 1:]
        summed = summed_loss(model, x, tokens, weights)
        bound = self.weighting == "bound"
        return _mean(summed, _may_hide(batch).sum() if bound else weights.sum().clamp(min=1))


@dataclass(frozen=True, slots=True)
class BlockDiffusion:
    """Blocks from left to right, the tokens of a block in any order.

    A row goes through the model twice at once: its clean half is read as a causal model reads, its
    noisy half has hidden tokens, and each noisy block sees itself, both ways, and the clean tokens
    before it. So a block that is finished leaves the same keys and values as in a causal model.

    `weighting`: "bound" counts a guess 1/t, t being the share of its block that is hidden, which
    bounds the log-likelihood; "plain" counts every guess alike.
    """

    mask_id: int
    block: int = 8
    shifted: bool = False
    weighting: Literal["bound", "plain"] = "bound"

    def __call__(self, model: Transformer, batch: Batch, rng: torch.Generator) -> Loss:
        clean = batch.ids[:, :-1]
        rows, length = clean.shape
        blocks = -(-length // self.block)
        share = _shares(rows, blocks, rng, clean.device)
        share = share.repeat_interleave(self.block, 1)[:, :length]
        hide = _drawn(clean, share, rng) & _may_hide(batch)
        both = torch.cat((clean, clean.masked_fill(hide, self.mask_id)), 1)
        positions = np.tile(np.arange(length), 2)
        allowed = block_diffusion_mask(length, self.block, batch.documents)
        sight = Sight.of(model.config, both, allowed)
        x = hidden(model, both, sight, positions)
        weights = hide / share if self.weighting == "bound" else hide.float()
        counted = _may_hide(batch).sum() if self.weighting == "bound" else hide.sum().clamp(min=1)
        summed = summed_loss(model, self._guessing(x, length), clean, weights)
        return _mean(summed, counted)

    def _guessing(self, x: Tensor, length: int) -> Tensor:
        """The vector that guesses each token: its own in the noisy half, or the one before it."""
        noisy = x[:, length:]
        if not self.shifted:
            return noisy
        # The first token of a block is guessed by the clean token before it, which has seen
        # everything there is before the block; the very first by its own place.
        before = torch.cat((noisy[:, :1], noisy[:, :-1]), 1)
        clean_before = torch.cat((noisy[:, :1], x[:, : length - 1]), 1)
        first = (torch.arange(length, device=x.device) % self.block == 0)[None, :, None]
        return torch.where(first, clean_before, before)


def block_diffusion_mask(length: int, block: int, documents: Tensor | None) -> Any:
    """Who sees whom among `length` clean tokens and, behind them, the same ones with noise."""

    def allowed(row: Any, head: Any, query: Any, key: Any) -> Any:
        noisy_query, noisy_key = query >= length, key >= length
        at, there = query % length, key % length
        own_block = at // block == there // block
        clean = ~noisy_query & ~noisy_key & (at >= there)
        before = noisy_query & ~noisy_key & (there // block < at // block)
        sees = clean | before | (noisy_query & noisy_key & own_block)
        if documents is not None:
            sees = sees & (documents[row, at] == documents[row, there])
        return sees

    return allowed


def _together(documents: Tensor) -> Any:
    def allowed(row: Any, head: Any, query: Any, key: Any) -> Any:
        return documents[row, query] == documents[row, key]

    return allowed


def _shares(rows: int, count: int, rng: torch.Generator, device: torch.device) -> Tensor:
    """How much is hidden, from 0 to 1: spread evenly over the batch, which lowers the noise of the
    loss, and never quite 0, by which it is divided."""
    drawn = torch.rand(1, generator=rng) + torch.arange(rows * count) / (rows * count)
    shuffled = (drawn % 1)[torch.randperm(rows * count, generator=rng)]
    return (shuffled * 0.999 + 0.001).view(rows, count).to(device)


def _drawn(tokens: Tensor, share: Tensor, rng: torch.Generator) -> Tensor:
    return torch.rand(tokens.shape, generator=rng).to(tokens.device) < share


def _may_hide(batch: Batch) -> Tensor:
    """The tokens that count as targets; `counted` speaks of each token's successor."""
    if batch.counted is None:
        return torch.ones_like(batch.ids[:, :-1], dtype=torch.bool)
    first = torch.zeros_like(batch.counted[:, :1])
    return torch.cat((first, batch.counted[:, :-1]), 1)


def _mean(summed: Tensor, tokens: int | Tensor) -> Loss:
    several = tokens.clamp(min=1) if isinstance(tokens, Tensor) else max(1, tokens)
    return Loss(summed / several, tokens)
