"""The KV cache on the device: its pages, and how many fit into memory."""

from __future__ import annotations

import torch
from torch import Tensor

from unspool.backends.cuda.attention import PAGE_SIZE
from unspool.backends.step import Ints
from unspool.model.config import ModelConfig


def page_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return 2 * config.layers * config.kv_width * PAGE_SIZE * dtype.itemsize


class KVCache:
    """KV cache of `count` pages, and one more page for padding rows."""

    def __init__(
        self, config: ModelConfig, count: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.count = count
        shape = (config.layers, 2, count + 1, PAGE_SIZE, config.kv_heads, config.head_width)
        self._data = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def padding_page(self) -> int:
        """Page that padding rows write to; never read."""
        return self.count

    def keys(self, layer: int) -> Tensor:
        """[slots, kv_heads, head_width]; slot = page * PAGE_SIZE + offset."""
        return self._data[layer, 0].flatten(0, 1)

    def values(self, layer: int) -> Tensor:
        return self._data[layer, 1].flatten(0, 1)

    def copy(self, copies: Ints) -> None:
        """Copy pages in all layers: [n, 2] of source and target (`StepBatch.copies`)."""
        pairs = torch.from_numpy(copies).to(self._data.device)
        self._data[:, :, pairs[:, 1]] = self._data[:, :, pairs[:, 0]]
