"""The vectors before some layers, kept while a captured step runs: what a drafting head reads.

A look at anything runs kernel by kernel, because what is looked at differs from step to step. A
drafting head wants the same few vectors of every line in every step, so their copies can be part
of the graph. They stay on the device, where the head is too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unspool.backends.cuda.weights import LayerWeights, Weights


class Taps:
    """Looks on while a captured step runs, and copies the residual stream before some layers."""

    def __init__(self, layers: tuple[int, ...], lines: int, weights: Weights) -> None:
        self._layers = layers
        shape = (len(layers), lines, weights.config.width)
        self._vectors = torch.zeros(shape, dtype=weights.dtype, device=weights.device)

    def stream(self, layer: int, h: Tensor) -> None:
        if layer in self._layers:
            self._vectors[self._layers.index(layer), : len(h)].copy_(h)

    def queries(self, layer: int, qkv: Tensor) -> None:
        pass

    def added(self, attended: Tensor, fed: Tensor, layer: LayerWeights) -> None:
        pass

    def of(self, first: int, last: int) -> Tensor:
        """[layers, lines, width] of some lines of the last step; the next one leaves it alone."""
        return self._vectors[:, first:last].clone()
