"""Prefetch training batches to the device, one batch ahead.

While a GPU computes, the next batch is gathered and copied to it, so that it does not wait for the
CPU between steps. On-policy batches (`on_policy`), which the model itself generates, depend on the
weights after the previous step and are not prefetched.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from unspool.train.running.faults import TrainingError


class BatchSource(Protocol):
    """Yields the same batch for the same step number, with its tokens in `ids`."""

    def batch(self, step: int) -> Any: ...


class BatchPrefetcher:
    """Checked batches on the device, by number."""

    def __init__(self, batches: BatchSource, vocab_size: int, device: torch.device) -> None:
        self._batches, self._vocab_size, self._device = batches, vocab_size, device
        self._on_policy = bool(getattr(batches, "on_policy", False))
        self._prefetched: tuple[int, Any] | None = None

    def get(self, index: int) -> Any:
        """Return batch `index`, prefetched or not."""
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is not None and prefetched[0] == index:
            return prefetched[1]
        return self._load(index)

    def prefetch(self, index: int) -> None:
        """Start copying batch `index` to the GPU; does nothing on a CPU."""
        if self._device.type == "cuda" and not self._on_policy:
            self._prefetched = index, self._load(index)

    def _load(self, index: int) -> Any:
        batch = self._batches.batch(index)
        # An id outside of the embedding table would fail on a GPU with an obscure assertion.
        largest = int(batch.ids.max())
        if largest >= self._vocab_size or int(batch.ids.min()) < 0:
            raise TrainingError(
                f"batch {index} has token {largest}, but the model has {self._vocab_size:,} tokens:"
                " the data was prepared with another tokenizer"
            )
        moved = {
            name: value.to(self._device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in vars(batch).items()
        }
        return type(batch)(**moved)
