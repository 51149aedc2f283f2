"""Objective of a block-diffusion twin of a frozen causal model.

The KV cache of the text before a block is that of the causal model, which stays unchanged. The twin
predicts the masked tokens of the block, each from the state before it (`shifted`); for the first
token of a block that is the causal model's own state.

Two noisy copies of each row mask complementary tokens: each token but the first of a block is
predicted once, and both copies share one clean pass. All predictions have equal weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from unspool.model.transformer import Transformer
from unspool.train.data.batches import TrainingBatch
from unspool.train.learning.cross_entropy import summed_loss
from unspool.train.learning.objectives import Loss
from unspool.train.tuning.preference import reference_model
from unspool.train.twins.halves import CleanNoisyPasses, block_starts, document_starts
from unspool.train.twins.noise import CHANCES, FULLY_MASKED, SIZES, draw_grid, mask_blocks


@dataclass(eq=False)
class BlockTwinObjective:
    """Predict masked tokens of blocks of several sizes from the rest and the text before."""

    mask_id: int
    clean: Transformer | None = field(default=None, repr=False)  # None: the model without LoRA
    sizes: tuple[int, ...] = SIZES
    chances: tuple[float, ...] = CHANCES
    all_hidden: float = FULLY_MASKED
    _halves: dict[tuple[int, int], CleanNoisyPasses] = field(default_factory=dict, repr=False)

    def __call__(self, model: Transformer, batch: TrainingBatch, rng: torch.Generator) -> Loss:
        tokens, documents = batch.inputs, document_ids(batch)
        halves = cached_halves(self._halves, model, tokens)
        starts = document_starts(documents)
        grid = draw_grid(len(tokens), rng, self.sizes, self.chances)
        sizes, offsets = grid.sizes.to(tokens.device), grid.offsets.to(tokens.device)
        blocks = block_starts(starts, sizes, offsets)
        halves.set_starts(starts, blocks)
        with reference_model(model, self.clean) as clean:
            halves.clean_pass(clean, tokens)
        hide, _ = mask_blocks(blocks, rng, self.all_hidden)
        first = torch.arange(tokens.shape[1], device=tokens.device)[None] == blocks
        x = halves.noisy_pass(
            model, complementary_copies(tokens, hide, ~first & ~hide, self.mask_id)
        )
        loss_mask = (~first & (documents >= 0))[:, 1:]
        summed = summed_loss(model, predicting_states(x, hide), tokens[:, 1:], loss_mask.float())
        count = loss_mask.sum().clamp(min=1)
        return Loss(summed / count, count)


def document_ids(batch: TrainingBatch) -> Tensor:
    """Document index of each token; one document per row by default. Negative: padding."""
    if batch.document_ids is not None:
        return batch.document_ids
    return torch.zeros_like(batch.inputs, dtype=torch.int32)


def cached_halves(
    cache: dict[tuple[int, int], CleanNoisyPasses], model: Transformer, tokens: Tensor
) -> CleanNoisyPasses:
    """The `Halves` of this batch shape, created once."""
    shape = (tokens.shape[0], tokens.shape[1])
    if shape not in cache:
        cache[shape] = CleanNoisyPasses(model.config, *shape, tokens.device)
    return cache[shape]


def complementary_copies(tokens: Tensor, hide: Tensor, others: Tensor, mask_id: int) -> Tensor:
    """Two copies of the rows: one with `hide` masked, one with `others` masked."""
    return torch.cat((tokens.masked_fill(hide, mask_id), tokens.masked_fill(others, mask_id)))


def predicting_states(x: Tensor, hide: Tensor) -> Tensor:
    """The states that predict tokens 1, 2, ...: those before, in the copy that masks the token."""
    first, second = x.chunk(2)
    return torch.where(hide[:, 1:, None], first[:, :-1], second[:, :-1])
