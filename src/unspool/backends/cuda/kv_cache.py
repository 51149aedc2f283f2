"""The KV cache on the device: its pages, and how many fit into memory."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from unspool.backends.cuda.attention import PAGE_SIZE
from unspool.backends.cuda.weights import Weights
from unspool.backends.step import MIN_STATES, Ints, num_pages_and_states
from unspool.errors import UnspoolError, UnspoolWarning
from unspool.model.config import ModelConfig
from unspool.model.hub.memory import format_bytes, kv_budget_with_kernels


def page_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return config.kv_floats_per_token * PAGE_SIZE * dtype.itemsize


class KVCache:
    """KV cache of `count` pages, and one more page for padding rows; state slots of recurrent
    layers."""

    def __init__(
        self, config: ModelConfig, count: int, states: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.count, self.state_count = count, states
        self._config = config
        layers_by_shape: dict[tuple[int, int], list[int]] = {}
        for layer in config.kv_layers:
            layers_by_shape.setdefault(config.kv_shape(layer), []).append(layer)
        # One tensor for all layers of a shape, so that copying pages takes few kernels.
        self._pools = [
            torch.zeros(len(layers), 2, count + 1, PAGE_SIZE, *shape, dtype=dtype, device=device)
            for shape, layers in layers_by_shape.items()
        ]
        self._keys_values: dict[int, Tensor] = {
            layer: pool[number]
            for pool, layers in zip(self._pools, layers_by_shape.values(), strict=True)
            for number, layer in enumerate(layers)
        }
        self._states = {
            layer: torch.zeros(states, config.state_floats(layer), device=device)
            for layer in range(config.layers)
            if config.state_floats(layer)
        }

    @property
    def padding_page(self) -> int:
        """Page that padding rows write to; never read."""
        return self.count

    def keys(self, layer: int) -> Tensor:
        """[slots, kv_heads, head_width]; slot = page * PAGE_SIZE + offset."""
        return self._keys_values[self._config.kv_source(layer)][0].flatten(0, 1)

    def values(self, layer: int) -> Tensor:
        return self._keys_values[self._config.kv_source(layer)][1].flatten(0, 1)

    def states(self, layer: int) -> Tensor:
        """[state slots, floats], float32."""
        return self._states[layer]

    def copy(self, copies: Ints) -> None:
        """Copy pages in all layers: [n, 2] of source and target (`StepBatch.copies`)."""
        pairs = torch.from_numpy(copies).to(self._pools[0].device)
        for pool in self._pools:
            pool[:, :, pairs[:, 1]] = pool[:, :, pairs[:, 0]]


_MAX_SEQUENCES = 512  # of full length: more pages are never used
_MIN_PAGES = 16
_MAX_STATES = 2048  # more are used only if there is a page for each


def allocate_kv_cache(weights: Weights, memory: int | None, context: int) -> KVCache:
    """Allocate a KV cache of `memory` bytes (None: a share of the free memory).

    On failure retries with fewer pages: other processes may allocate GPU memory at any time. Warns
    if the cache is smaller than requested.
    """
    config, dtype, device = weights.config, weights.dtype, weights.device
    bytes_per_page = page_bytes(config, dtype)
    count, states = num_pages_and_states(
        _default_bytes(device) if memory is None else memory, bytes_per_page, config.state_bytes
    )
    if memory is None:
        count = min(count, _MAX_SEQUENCES * -(-context // PAGE_SIZE))
        states = min(states, max(_MAX_STATES, count))
    requested = max(count, _MIN_PAGES)
    count = requested
    while True:
        try:
            pages = KVCache(config, count, states, dtype, device)
            break
        except torch.OutOfMemoryError as error:
            torch.cuda.empty_cache()
            if count <= _MIN_PAGES:
                raise UnspoolError(_out_of_memory(device)) from error
            count = max(_MIN_PAGES, count * 3 // 4)
            states = min(states, max(MIN_STATES, states * 3 // 4))
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
