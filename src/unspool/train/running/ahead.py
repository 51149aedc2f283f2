"""The batches of a training, brought to its device one ahead.

While a GPU computes, the batch after this one is gathered from the data and sent to it, so that
between two steps it does not wait for a processor. Batches that the model itself writes
(`on_policy`) cannot be made before the model has learned from those before them.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from unspool.train.running.faults import TrainingError


class Batches(Protocol):
    """Where batches come from: number n is always the same one, with its tokens in `ids`."""

    def batch(self, step: int) -> Any: ...


class Ahead:
    """Batches by their numbers, on the device, each checked."""

    def __init__(self, batches: Batches, vocab_size: int, device: torch.device) -> None:
        self._batches, self._vocab_size, self._device = batches, vocab_size, device
        self._on_policy = bool(getattr(batches, "on_policy", False))
        self._ready: tuple[int, Any] | None = None

    def take(self, index: int) -> Any:
        """Batch number `index`, which may be ready already."""
        ready, self._ready = self._ready, None
        if ready is not None and ready[0] == index:
            return ready[1]
        return self._brought(index)

    def prepare(self, index: int) -> None:
        """Have this one ready for when it is asked for."""
        if self._device.type == "cuda" and not self._on_policy:
            self._ready = index, self._brought(index)

    def _brought(self, index: int) -> Any:
        batch = self._batches.batch(index)
        # Token ids that the model has no place for would end in an error nobody understands.
        largest = int(batch.ids.max())
        if largest >= self._vocab_size or int(batch.ids.min()) < 0:
            raise TrainingError(
                f"batch {index} has token {largest}, and the model knows {self._vocab_size:,}: the "
                "data was made with another vocabulary"
            )
        moved = {
            name: value.to(self._device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in vars(batch).items()
        }
        return type(batch)(**moved)
