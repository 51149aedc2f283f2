"""The KV cache on the device: its pages, and how many fit into memory."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from unspool.backends.cuda.attention import PAGE_SIZE
from unspool.backends.cuda.weights import Weights
from unspool.backends.step import Ints, num_pages_in
from unspool.errors import UnspoolError, UnspoolWarning
from unspool.model.config import ModelConfig
from unspool.model.hub.memory import format_bytes, kv_budget_with_kernels


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


_MAX_SEQUENCES = 512  # of full length: more pages are never used
_MIN_PAGES = 16


def allocate_kv_cache(weights: Weights, memory: int | None, context: int) -> KVCache:
    """Allocate a KV cache of `memory` bytes (None: a share of the free memory).

    On failure retries with fewer pages: other processes may allocate GPU memory at any time. Warns
    if the cache is smaller than requested.
    """
    config, dtype, device = weights.config, weights.dtype, weights.device
    bytes_per_page = page_bytes(config, dtype)
    if memory is None:
        count = min(
            _default_bytes(device) // bytes_per_page, _MAX_SEQUENCES * -(-context // PAGE_SIZE)
        )
    else:
        count = num_pages_in(memory, bytes_per_page)
    requested = max(count, _MIN_PAGES)
    count = requested
    while True:
        try:
            pages = KVCache(config, count, dtype, device)
            break
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            if count <= _MIN_PAGES:
                raise UnspoolError(_out_of_memory(device)) from error
            count = max(_MIN_PAGES, count * 3 // 4)
    if count < requested:
        warnings.warn(
            f"{device} has no memory for a KV cache of {format_bytes(requested * bytes_per_page)};"
            f" using {format_bytes(count * bytes_per_page)} ({count * PAGE_SIZE:,} tokens)",
            UnspoolWarning,
            stacklevel=3,
        )
    return pages


def _default_bytes(device: torch.device) -> int:
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 1 << 30
    return kv_budget_with_kernels(free)


def _out_of_memory(device: torch.device) -> str:
    return (
        f"out of memory on {device}: the KV cache does not fit beside the weights; free GPU "
        "memory, or use a smaller model or a quantized one"
    )
