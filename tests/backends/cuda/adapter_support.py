"""Random adapters, of all matrices that may have one or of some."""

from __future__ import annotations

import numpy as np

from unspool.model.adapters import Adapter, LowRank, adaptable
from unspool.model.config import ModelConfig


def random_adapter(
    config: ModelConfig, rank: int, *, seed: int, only: tuple[str, ...] = ("",)
) -> Adapter:
    """Strong enough to be seen in the logits; `only`: matrices with one of these in their names."""
    rng = np.random.default_rng(seed)

    def floats(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / shape[1] ** 0.5).astype(np.float32)

    parts = {
        name: LowRank(floats(rank, columns), floats(rows, rank), 0.5)
        for name, (rows, columns) in adaptable(config).items()
        if any(word in name for word in only)
    }
    return Adapter(parts)
