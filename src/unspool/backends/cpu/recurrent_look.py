"""Observation of recurrent layers on the native backend."""

from __future__ import annotations

import numpy as np

from unspool.backends.cpu.packing import LANES
from unspool.backends.cpu.structures import TapsStruct, address_of
from unspool.backends.step import RECURRENT_STATS, Floats, ObserveRequest
from unspool.model.config import ModelConfig

_COLUMNS = 2 * LANES  # columns of a head's state per task: kColumns in `native/kernels`


class RecurrentObserver:
    """Buffer for the partial sums of the kernels, and their reduction to gate, decay and norm."""

    def __init__(self, config: ModelConfig, look: ObserveRequest, count: int) -> None:
        shape = config.recurrence
        assert shape is not None
        self._config, self._heads = config, max(1, shape.value_heads)
        self._blocks = -(-shape.value_width // _COLUMNS)
        channels = -(-config.width // LANES)
        stride = max(2 * channels, self._heads * (2 + self._blocks))
        self._sums = np.zeros((len(look.attention), config.layers, stride), np.float32)
        self._offsets = np.full(count, -1, np.int64)
        self._offsets[look.attention] = np.arange(len(look.attention)) * config.layers * stride

    def set_taps(self, taps: TapsStruct) -> None:
        taps.recurrent_offsets, taps.recurrent_stats = (
            address_of(self._offsets),
            address_of(self._sums),
        )
        taps.recurrent_stride = self._sums.shape[2]

    def stats(self) -> list[Floats]:
        """One array per token: [layers, 3, heads]; NaN in layers without a recurrence."""
        count, config = len(self._sums), self._config
        if not count:
            return []
        stats = np.full((count, config.layers, RECURRENT_STATS, self._heads), np.nan, np.float32)
        for layer in range(config.layers):
            sums = self._sums[:, layer]
            if config.mixer(layer) == "conv":
                pairs = sums[:, : 2 * -(-config.width // LANES)].reshape(count, -1, 2).sum(1)
                stats[:, layer, 0, 0] = np.sqrt(pairs[:, 0] / config.width)
                stats[:, layer, 1:, 0] = 0.0
                stats[:, layer, 2, 0] = np.sqrt(pairs[:, 1])
            elif config.mixer(layer) in ("delta", "mamba2"):
                heads = sums[:, : self._heads * (2 + self._blocks)]
                heads = heads.reshape(count, self._heads, -1)
                stats[:, layer, :2] = heads[:, :, :2].transpose(0, 2, 1)
                stats[:, layer, 2] = np.sqrt(heads[:, :, 2:].sum(-1))
        return list(stats)
