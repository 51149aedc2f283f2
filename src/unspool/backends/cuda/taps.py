"""Residual vectors before chosen layers, copied inside a graph: the input of a drafting head.

Other observation runs kernel by kernel, because what is observed differs from step to step. A
drafting head reads the same vectors of every row in every step, so their copies can be captured.
They stay on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unspool.backends.cuda.weights import LayerWeights, Weights


class ResidualTap:
    """Copies the residual stream before chosen layers while a captured step runs."""

    def __init__(self, layers: tuple[int, ...], rows: int, weights: Weights) -> None:
        self._layers = layers
        shape = (len(layers), rows, weights.config.width)
        self._buffer = torch.zeros(shape, dtype=weights.dtype, device=weights.device)

    def on_residual(self, layer: int, h: Tensor) -> None:
        if layer in self._layers:
            self._buffer[self._layers.index(layer), : len(h)].copy_(h)

    def on_queries(self, layer: int, qkv: Tensor) -> None:
        pass

    def on_outputs(self, attn_out: Tensor, ffn_out: Tensor, layer: LayerWeights) -> None:
        pass

    def vectors(self, first: int, last: int) -> Tensor:
        """Copy of the vectors [layers, rows, width] of rows `first` to `last`, last step."""
        return self._buffer[:, first:last].clone()
