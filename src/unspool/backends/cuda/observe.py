"""Observation of a step on the GPU: residual vectors, attention weights, hidden states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unspool.backends.cuda.attention import PAGE_SIZE
from unspool.backends.cuda.matmul import NormWeights
from unspool.backends.cuda.runner import ModelRunner
from unspool.backends.cuda.step_io import to_device
from unspool.backends.cuda.weights import LayerWeights, Weights
from unspool.backends.step import Observations, ObserveRequest, StepBatch
from unspool.model.layers.transformer import attention_weights

# -- Observation of a step: residual vectors, attention weights and layer outputs
#
# Only the requested tokens are recorded, from the same run that computes the logits.


class StepObserver:
    """Records intermediate values of a step in which all tokens are prefilled."""

    def __init__(self, runner: ModelRunner, batch: StepBatch, look: ObserveRequest) -> None:
        self._runner, config = runner, runner.weights.config
        device = runner.weights.device
        self._look = look
        self._residual_rows = to_device(look.residuals, device)
        self._part_rows = to_device(look.parts, device)
        self._residuals: list[Tensor] = []
        self._parts: list[Tensor] = []
        self._attention: list[list[Tensor]] = [[] for _ in look.attention]
        self._rows = look.attention.tolist()
        self._ends = batch.visible_end[look.attention].tolist()
        self._positions = batch.positions[look.attention].tolist()
        batch_rows = batch.row_starts.searchsorted(look.attention, side="right") - 1
        self._table_rows = (batch.slots[batch_rows] + 1).tolist()
        self._query_shape = (config.heads, config.head_width)

    def on_residual(self, layer: int, h: Tensor) -> None:
        if len(self._residual_rows):
            self._residuals.append(h[self._residual_rows])

    def on_queries(self, layer: int, qkv: Tensor) -> None:
        config, table = self._runner.weights.config, self._runner.inputs.table
        keys = self._runner.pages.keys(layer)
        heads, width = self._query_shape
        for number, row in enumerate(self._rows):
            end, position = self._ends[number], self._positions[number]
            positions = torch.arange(end, device=keys.device)
            pages = table[self._table_rows[number], positions // PAGE_SIZE].long()
            key = keys[pages * PAGE_SIZE + positions % PAGE_SIZE].transpose(0, 1)[None]
            query = qkv[row, : heads * width].view(1, heads, 1, width)
            query_pos, ends = positions.new_tensor([position]), positions.new_tensor([end])
            weights = attention_weights(
                config, config.window(layer), query, key, query_pos, positions, ends,
                scale=config.score_scale(layer),
            )  # fmt: skip
            self._attention[number].append(weights[0, :, 0])

    def on_outputs(self, attn_out: Tensor, ffn_out: Tensor, layer: LayerWeights) -> None:
        if len(self._part_rows):
            eps, rows = self._runner.weights.config.norm_eps, self._part_rows
            attention = normed(attn_out[rows], layer.attention_post_norm, eps)
            self._parts.append(
                torch.stack((attention, normed(ffn_out[rows], layer.feed_post_norm, eps)))
            )

    def inside(self) -> Observations:
        def host(tensors: list[Tensor]) -> Any:
            return torch.stack(tensors).float().cpu().numpy()

        return Observations(
            residuals=host(self._look.select_layers(self._residuals)) if self._residuals else None,
            attention=[host(layers) for layers in self._attention],
            parts=host(self._parts) if self._parts else None,
        )


def normed(x: Tensor, norm: NormWeights | None, eps: float) -> Tensor:
    """Apply a norm as the kernels do: computed in float32."""
    if norm is None:
        return x
    x32 = x.float()
    if norm.bias is not None:
        x32 = x32 - x32.mean(-1, keepdim=True)
    x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps) * norm.gain
    return (x32 if norm.bias is None else x32 + norm.bias).to(x.dtype)


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
