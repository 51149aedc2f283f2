"""Observation of a step on the GPU: residual vectors, attention weights, hidden states."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from unspool.backends.cuda.attention import PAGE_SIZE
from unspool.backends.cuda.matmul import NormWeights
from unspool.backends.cuda.runner import ModelRunner
from unspool.backends.cuda.step_io import to_device
from unspool.backends.cuda.weights import Weights
from unspool.backends.interventions import OUTPUT_SITES, place_of
from unspool.backends.step import (
    RECURRENT_STATS,
    Floats,
    Observations,
    ObserveRequest,
    StepBatch,
)
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
        self._site_rows = to_device(look.tokens, device)
        self._sites: dict[tuple[str, int], list[tuple[str, int]]] = {}  # by place
        for name in look.sites:
            self._sites.setdefault(place_of(*name), []).append(name)
        self._values: dict[tuple[str, int], Tensor] = {}
        self._residuals: list[Tensor] = []
        self._attention: list[list[Tensor]] = [[] for _ in look.attention]
        self._rows = look.attention.tolist()
        self._ends = batch.visible_end[look.attention].tolist()
        self._positions = batch.positions[look.attention].tolist()
        batch_rows = batch.row_starts.searchsorted(look.attention, side="right") - 1
        self._table_rows = (batch.slots[batch_rows] + 1).tolist()
        self._attended: list[Tensor] = []  # residual streams between attention and feed-forward
        self._after: list[Tensor] = []  # before each layer, and after the last
        heads = max(1, config.recurrence.value_heads if config.recurrence else 0)
        self._recurrent: list[Tensor | None] = [None] * config.layers
        self._max_state_heads, self._has_states = heads, config.state_bytes > 0

    def wants(self, site: str, layer: int) -> bool:
        return site in ("resid", "resid_mid") or (site, layer) in self._sites

    def __call__(self, site: str, layer: int, x: Tensor) -> None:
        if site == "resid" and len(self._residual_rows):
            self._residuals.append(x[self._residual_rows])
        if site in ("resid", "resid_mid") and len(self._part_rows):
            parts = self._after if site == "resid" else self._attended
            parts.append(x[self._part_rows].float())
        for name in self._sites.get((site, layer), ()):
            is_output = site in OUTPUT_SITES  # their rows are the last ones
            rows = x[-len(self._site_rows) :] if is_output else x[self._site_rows]
            self._values[name] = rows.to(torch.float32, copy=True)

    def on_queries(self, layer: int, qkv: Tensor) -> None:
        runner, shape = self._runner, self._runner.attention_layers[layer]
        config, table, keys = runner.weights.config, runner.inputs.table, runner.pages.keys(layer)
        for number, row in enumerate(self._rows):
            end, position = self._ends[number], self._positions[number]
            positions = torch.arange(end, device=keys.device)
            pages = table[self._table_rows[number], positions // PAGE_SIZE].long()
            key = keys[pages * PAGE_SIZE + positions % PAGE_SIZE].transpose(0, 1)[None]
            query = qkv[row, : shape.out_width].view(1, shape.heads, 1, shape.head_width)
            query_pos, ends = positions.new_tensor([position]), positions.new_tensor([end])
            weights = attention_weights(
                config, shape.window, query, key, query_pos, positions, ends, shape.sinks,
                scale=shape.scale,
            )  # fmt: skip
            self._attention[number].append(_padded(weights[0, :, 0], config.heads))

    def recurrent_stats(self, layer: int, rows: int) -> Tensor | None:
        config, device = self._runner.weights.config, self._runner.weights.device
        for number, end in enumerate(self._ends):  # a layer without attention
            self._attention[number].append(torch.zeros(config.heads, end, device=device))
        if not rows or not self._rows:
            return None
        heads = 1 if config.mixer(layer) == "conv" else self._max_state_heads
        stats = torch.zeros(rows, RECURRENT_STATS, heads, device=device)
        self._recurrent[layer] = stats
        return stats

    def inside(self) -> Observations:
        def host(tensors: list[Tensor]) -> Any:
            return torch.stack(tensors).float().cpu().numpy()

        parts = [
            torch.stack((attended - before, after - attended))
            for before, attended, after in zip(
                self._after, self._attended, self._after[1:], strict=False
            )
        ]
        return Observations(
            residuals=host(self._look.select_layers(self._residuals)) if self._residuals else None,
            attention=[host(layers) for layers in self._attention],
            parts=host(parts) if parts else None,
            recurrent=[self._state_stats(row) for row in self._rows] if self._has_states else [],
            sites={name: values.cpu().numpy() for name, values in self._values.items()},
        )

    def _state_stats(self, row: int) -> Floats:
        """Statistics of one token's states, [layers, 3, heads]."""
        shape = (len(self._recurrent), RECURRENT_STATS, self._max_state_heads)
        values = np.full(shape, np.nan, np.float32)
        for layer, stats in enumerate(self._recurrent):
            if stats is not None:
                values[layer, :, : stats.shape[2]] = stats[row].cpu().numpy()
        return values


def _padded(weights: Tensor, heads: int) -> Tensor:
    """Attention weights [heads, visible] with zeros for the heads that a layer does not have."""
    return torch.nn.functional.pad(weights, (0, 0, 0, heads - len(weights)))


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

    def wants(self, site: str, layer: int) -> bool:
        return site == "resid" and layer in self._layers

    def __call__(self, site: str, layer: int, x: Tensor) -> None:
        self._buffer[self._layers.index(layer), : len(x)].copy_(x)

    def on_queries(self, layer: int, qkv: Tensor) -> None:
        pass

    def recurrent_stats(self, layer: int, rows: int) -> Tensor | None:
        return None

    def vectors(self, first: int, last: int) -> Tensor:
        """Copy of the vectors [layers, rows, width] of rows `first` to `last`, last step."""
        return self._buffer[:, first:last].clone()
