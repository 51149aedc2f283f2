"""Looking inside while a step runs: vectors, attention, and what each layer added.

Only for the tokens that somebody asked about, and taken from the very run that gives the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unspool.backends.cuda.inputs import to_device
from unspool.backends.cuda.pages import PAGE_SIZE
from unspool.backends.cuda.products import NormWeights
from unspool.backends.cuda.program import Program
from unspool.backends.cuda.weights import LayerWeights
from unspool.backends.step import Inside, Look, StepBatch
from unspool.model.transformer import attention_weights


class Looker:
    """Looks on while the prompts of a step run, which are all of its tokens."""

    def __init__(self, program: Program, batch: StepBatch, look: Look) -> None:
        self._program, config = program, program.weights.config
        device = program.weights.device
        self._look = look
        self._residual_rows = to_device(look.residuals, device)
        self._part_rows = to_device(look.parts, device)
        self._residuals: list[Tensor] = []
        self._parts: list[Tensor] = []
        self._attention: list[list[Tensor]] = [[] for _ in look.attention]
        self._rows = look.attention.tolist()
        self._ends = batch.visible_end[look.attention].tolist()
        self._positions = batch.positions[look.attention].tolist()
        owners = batch.starts.searchsorted(look.attention, side="right") - 1
        self._lines = (batch.slots[owners] + 1).tolist()
        self._queries = (config.heads, config.head_width)

    def stream(self, layer: int, h: Tensor) -> None:
        if len(self._residual_rows):
            self._residuals.append(h[self._residual_rows])

    def queries(self, layer: int, qkv: Tensor) -> None:
        config, table = self._program.weights.config, self._program.inputs.table
        keys = self._program.pages.keys(layer)
        heads, width = self._queries
        for number, row in enumerate(self._rows):
            end, position = self._ends[number], self._positions[number]
            places = torch.arange(end, device=keys.device)
            pages = table[self._lines[number], places // PAGE_SIZE].long()
            key = keys[pages * PAGE_SIZE + places % PAGE_SIZE].transpose(0, 1)[None]
            query = qkv[row, : heads * width].view(1, heads, 1, width)
            ours, ends = places.new_tensor([position]), places.new_tensor([end])
            found = attention_weights(
                config, config.window(layer), query, key, ours, places, ends,
                scale=config.score_scale(layer),
            )  # fmt: skip
            self._attention[number].append(found[0, :, 0])

    def added(self, attended: Tensor, fed: Tensor, layer: LayerWeights) -> None:
        if len(self._part_rows):
            eps, rows = self._program.weights.config.norm_eps, self._part_rows
            first = normed(attended[rows], layer.attention_post_norm, eps)
            self._parts.append(torch.stack((first, normed(fed[rows], layer.feed_post_norm, eps))))

    def inside(self) -> Inside:
        def host(tensors: list[Tensor]) -> Any:
            return torch.stack(tensors).float().cpu().numpy()

        return Inside(
            residuals=host(self._look.chosen(self._residuals)) if self._residuals else None,
            attention=[host(layers) for layers in self._attention],
            parts=host(self._parts) if self._parts else None,
        )


def normed(x: Tensor, norm: NormWeights | None, eps: float) -> Tensor:
    """The norm behind what a half of a layer gave, as the kernel does it."""
    if norm is None:
        return x
    wide = x.float()
    if norm.bias is not None:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * norm.gain
    return (wide if norm.bias is None else wide + norm.bias).to(x.dtype)
