"""What is hidden from a twin while it learns: blocks, spans, answers, and wrong tokens.

All random numbers come from the generator that the trainer made for the batch, so that a run that
is gone on with sees what it would have seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SIZES = (4, 8, 16, 32)  # tokens of a block
CHANCES = (0.2, 0.35, 0.3, 0.15)  # that a row has blocks of this size
ALL_HIDDEN = 0.2  # share of blocks of which nothing is shown: how writing one begins
LONGEST_SPAN = 16


@dataclass(frozen=True, slots=True)
class Grid:
    """The blocks of each row of a batch: their size, and by how much the first is shorter."""

    sizes: Tensor  # [rows, 1]
    offsets: Tensor  # [rows, 1]


def drawn_grid(
    rows: int, rng: torch.Generator, sizes: tuple[int, ...] = SIZES,
    chances: tuple[float, ...] = CHANCES,
) -> Grid:  # fmt: skip
    picked = torch.multinomial(torch.tensor(chances), rows, True, generator=rng)
    chosen = torch.tensor(sizes)[picked][:, None]
    return Grid(chosen, (torch.rand(rows, 1, generator=rng) * chosen).long())


def hidden_in_blocks(
    blocks: Tensor, rng: torch.Generator, all_hidden: float = ALL_HIDDEN
) -> tuple[Tensor, Tensor]:
    """Which tokens are hidden [rows, length], where `blocks` says where each token's block begins;
    and the share of its block that was to be hidden. A block's first token is never hidden: that
    one is the causal model's."""
    places = torch.arange(blocks.shape[1], device=blocks.device)[None]
    level = _of_blocks(torch.rand(blocks.shape, generator=rng), blocks)
    everything = _of_blocks(torch.rand(blocks.shape, generator=rng), blocks) < all_hidden
    level = torch.where(everything, 1.0, level)
    hide = torch.rand(blocks.shape, generator=rng).to(blocks.device) < level
    return hide & (places != blocks), level


def _of_blocks(values: Tensor, blocks: Tensor) -> Tensor:
    """The value at the start of each token's block."""
    return values.to(blocks.device).gather(1, blocks.long())


def hidden_spans(rows: int, length: int, rng: torch.Generator) -> Tensor:
    """Spans of one length (1 to 16) a row, together 5 to 55 % of it."""
    share = 0.05 + 0.5 * torch.rand(rows, 1, generator=rng)
    span = torch.randint(1, LONGEST_SPAN + 1, (rows, 1), generator=rng)
    places = torch.arange(length)[None]
    begins = torch.rand(rows, length, generator=rng) < share / span
    last = torch.where(begins, places, -LONGEST_SPAN - 1).cummax(1).values
    return places - last < span


def hidden_evenly(rows: int, length: int, rng: torch.Generator, most: float = 1.0) -> Tensor:
    """A share of each row, drawn evenly up to `most`."""
    share = torch.rand(rows, 1, generator=rng) * most
    return torch.rand(rows, length, generator=rng) < share


def wrong_places(rows: int, length: int, rng: torch.Generator, most: float = 0.2) -> Tensor:
    """Where a token is replaced by another one."""
    return hidden_evenly(rows, length, rng, most)
