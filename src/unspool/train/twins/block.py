"""A: a block-diffusion twin beside a frozen causal model, as an objective of the trainer.

The text before a block is what the causal model made of it, so the cache is the ordinary one and
the causal model stays what it was. The twin guesses the hidden tokens of the block, each by the
vector before it (`shifted`), which for the block's first token is the causal model's own.

Two noisy copies of each row hide opposite tokens: all but the first of a block are guessed once,
whatever was drawn, and both copies share one clean pass. Every guess counts alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from unspool.model.transformer import Transformer
from unspool.train.data.batches import Batch
from unspool.train.learning.cross_entropy import summed_loss
from unspool.train.learning.objectives import Loss
from unspool.train.tuning.preference import as_before
from unspool.train.twins.halves import Halves, block_starts, document_starts
from unspool.train.twins.noise import ALL_HIDDEN, CHANCES, SIZES, drawn_grid, hidden_in_blocks


@dataclass(eq=False)
class BlockTwin:
    """Blocks of several sizes, from whatever of them is shown and the text before."""

    mask_id: int
    clean: Transformer | None = field(default=None, repr=False)  # None: LoRA switched off
    sizes: tuple[int, ...] = SIZES
    chances: tuple[float, ...] = CHANCES
    all_hidden: float = ALL_HIDDEN
    _halves: dict[tuple[int, int], Halves] = field(default_factory=dict, repr=False)

    def __call__(self, model: Transformer, batch: Batch, rng: torch.Generator) -> Loss:
        tokens, documents = batch.inputs, documents_of(batch)
        halves = kept_halves(self._halves, model, tokens)
        starts = document_starts(documents)
        grid = drawn_grid(len(tokens), rng, self.sizes, self.chances)
        sizes, offsets = grid.sizes.to(tokens.device), grid.offsets.to(tokens.device)
        blocks = block_starts(starts, sizes, offsets)
        halves.place(starts, blocks)
        with as_before(model, self.clean) as clean:
            halves.read(clean, tokens)
        hide, _ = hidden_in_blocks(blocks, rng, self.all_hidden)
        first = torch.arange(tokens.shape[1], device=tokens.device)[None] == blocks
        x = halves.guess(model, opposite(tokens, hide, ~first & ~hide, self.mask_id))
        counted = (~first & (documents >= 0))[:, 1:]
        summed = summed_loss(model, guessing(x, hide), tokens[:, 1:], counted.float())
        count = counted.sum().clamp(min=1)
        return Loss(summed / count, count)


def documents_of(batch: Batch) -> Tensor:
    """Each token's document; one for each row where the batch does not say. Below 0: no text."""
    if batch.documents is not None:
        return batch.documents
    return torch.zeros_like(batch.inputs, dtype=torch.int32)


def kept_halves(made: dict[tuple[int, int], Halves], model: Transformer, tokens: Tensor) -> Halves:
    """The halves of rows of this shape, made once."""
    shape = (tokens.shape[0], tokens.shape[1])
    if shape not in made:
        made[shape] = Halves(model.config, *shape, tokens.device)
    return made[shape]


def opposite(tokens: Tensor, hide: Tensor, others: Tensor, mask_id: int) -> Tensor:
    """Two copies of the rows, of which one hides these tokens and the other those."""
    return torch.cat((tokens.masked_fill(hide, mask_id), tokens.masked_fill(others, mask_id)))


def guessing(x: Tensor, hide: Tensor) -> Tensor:
    """The vector that guesses each token from the second on: that before it, in the first copy if
    the token is hidden there, else in the second."""
    first, second = x.chunk(2)
    return torch.where(hide[:, 1:, None], first[:, :-1], second[:, :-1])
