"""Random masks for training twins: blocks, spans, and uniform masks.

All random numbers come from the batch's generator, so that a resumed run draws the same masks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SIZES = (4, 8, 16, 32)  # tokens per block
CHANCES = (0.2, 0.35, 0.3, 0.15)  # probability of each block size
FULLY_MASKED = 0.2  # share of fully masked blocks, as at the start of generating one
MAX_SPAN = 16


@dataclass(frozen=True, slots=True)
class Grid:
    """Block size of each row of a batch, and by how much its first block is shorter."""

    sizes: Tensor  # [rows, 1]
    offsets: Tensor  # [rows, 1]


def draw_grid(
    rows: int, rng: torch.Generator, sizes: tuple[int, ...] = SIZES,
    chances: tuple[float, ...] = CHANCES,
) -> Grid:  # fmt: skip
    picked = torch.multinomial(torch.tensor(chances), rows, True, generator=rng)
    row_sizes = torch.tensor(sizes)[picked][:, None]
    return Grid(row_sizes, (torch.rand(rows, 1, generator=rng) * row_sizes).long())


def mask_blocks(
    blocks: Tensor, rng: torch.Generator, all_hidden: float = FULLY_MASKED
) -> tuple[Tensor, Tensor]:
    """Draw a mask and the mask ratio of each token's block, both [rows, length].

    `blocks` has the start of each token's block. The first token of a block is never masked,
    because the causal model predicts it.
    """
    positions = torch.arange(blocks.shape[1], device=blocks.device)[None]
    ratio = _at_block_start(torch.rand(blocks.shape, generator=rng), blocks)
    is_full = _at_block_start(torch.rand(blocks.shape, generator=rng), blocks) < all_hidden
    ratio = torch.where(is_full, 1.0, ratio)
    mask = torch.rand(blocks.shape, generator=rng).to(blocks.device) < ratio
    return mask & (positions != blocks), ratio


def _at_block_start(values: Tensor, blocks: Tensor) -> Tensor:
    """The value at the start of each token's block."""
    return values.to(blocks.device).gather(1, blocks.long())


def mask_spans(rows: int, length: int, rng: torch.Generator) -> Tensor:
    """Mask spans of one length (1 to 16) per row, together 5 to 55 % of it."""
    share = 0.05 + 0.5 * torch.rand(rows, 1, generator=rng)
    span = torch.randint(1, MAX_SPAN + 1, (rows, 1), generator=rng)
    positions = torch.arange(length)[None]
    starts = torch.rand(rows, length, generator=rng) < share / span
    last_start = torch.where(starts, positions, -MAX_SPAN - 1).cummax(1).values
    return positions - last_start < span


def mask_uniformly(rows: int, length: int, rng: torch.Generator, most: float = 1.0) -> Tensor:
    """Mask a share of each row, uniform from 0 to `most`."""
    share = torch.rand(rows, 1, generator=rng) * most
    return torch.rand(rows, length, generator=rng) < share
