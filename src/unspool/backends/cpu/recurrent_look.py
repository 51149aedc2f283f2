"""What a look sees of recurrent layers, out of what the kernels leave of it."""

from __future__ import annotations

import numpy as np

from unspool.backends.cpu.packing import LANES
from unspool.backends.cpu.structures import TapList, address
from unspool.backends.step import RECURRENT_LOOK, Floats, Look
from unspool.model.config import ModelConfig

_COLUMNS = 2 * LANES  # of a head's matrix that one task takes: see `native/kernels/recur_heads.h`


class RecurrentLook:
    """Room for the sums that the kernels' tasks make, and the gate, decay and norm made of them."""

    def __init__(self, config: ModelConfig, taps: Look, count: int) -> None:
        shape = config.recurrence
        assert shape is not None
        self._config, self._heads = config, max(1, shape.value_heads)
        self._blocks = -(-shape.value_width // _COLUMNS)
        channels = -(-config.width // LANES)
        room = max(2 * channels, self._heads * (2 + self._blocks))
        self._sums = np.zeros((len(taps.attention), config.layers, room), np.float32)
        self._where = np.full(count, -1, np.int64)
        self._where[taps.attention] = np.arange(len(taps.attention)) * config.layers * room

    def put(self, into: TapList) -> None:
        into.recurrent, into.recurrent_seen = address(self._where), address(self._sums)
        into.recurrent_room = self._sums.shape[2]

    def seen(self) -> list[Floats]:
        """Of each token [layers, 3, heads]; not a number where a layer has none."""
        count, config = len(self._sums), self._config
        if not count:
            return []
        found = np.full((count, config.layers, RECURRENT_LOOK, self._heads), np.nan, np.float32)
        for layer in range(config.layers):
            sums = self._sums[:, layer]
            if config.mixer(layer) == "conv":
                pairs = sums[:, : 2 * -(-config.width // LANES)].reshape(count, -1, 2).sum(1)
                found[:, layer, 0, 0] = np.sqrt(pairs[:, 0] / config.width)
                found[:, layer, 1:, 0] = 0.0
                found[:, layer, 2, 0] = np.sqrt(pairs[:, 1])
            elif config.mixer(layer) in ("delta", "mamba2"):
                heads = sums[:, : self._heads * (2 + self._blocks)]
                heads = heads.reshape(count, self._heads, -1)
                found[:, layer, :2] = heads[:, :, :2].transpose(0, 2, 1)
                found[:, layer, 2] = np.sqrt(heads[:, :, 2:].sum(-1))
        return list(found)
