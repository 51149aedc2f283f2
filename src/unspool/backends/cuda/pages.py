"""Keys and values of all texts on the device, and the block table that says whose are where."""

from __future__ import annotations

import torch
from torch import Tensor

from unspool.backends.step import Ints
from unspool.model.config import ModelConfig

PAGE_SIZE = 16


def page_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return 2 * config.layers * config.kv_width * PAGE_SIZE * dtype.itemsize


class Pages:
    """`count` pages, and one more behind them for lines that only fill a batch up."""

    def __init__(
        self, config: ModelConfig, count: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.count = count
        shape = (config.layers, 2, count + 1, PAGE_SIZE, config.kv_heads, config.head_width)
        self._all = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def spare(self) -> int:
        """The page that nobody reads."""
        return self.count

    def keys(self, layer: int) -> Tensor:
        """[slots, kv_heads, head_width]; a slot is a place in a page."""
        return self._all[layer, 0].flatten(0, 1)

    def values(self, layer: int) -> Tensor:
        return self._all[layer, 1].flatten(0, 1)

    def copy(self, copies: Ints) -> None:
        """Copy pages in all layers at once: [n, 2] of source and target, where no source is a
        target (`StepBatch.copies`)."""
        places = torch.from_numpy(copies).to(self._all.device)
        self._all[:, :, places[:, 1]] = self._all[:, :, places[:, 0]]
