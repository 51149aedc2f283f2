"""Mamba-2 in plain torch (Granite 4, Nemotron)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from unspool.model.config import ModelConfig
from unspool.model.layers.matrix import (
    Chunk,
    DocumentMasks,
    MatrixMixer,
    decay_factors,
    elementwise_exact,
    read_and_update,
)
from unspool.model.layers.mixers import Parts, StateObserver


class Mamba2(MatrixMixer):
    """Mamba-2: S = e^(-a dt) S + k (dt v), o = q S + d v."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        shape, width = self.recurrence, config.width
        self.vkq = nn.Linear(width, self.channels, bias=False)
        self.dt = nn.Linear(width, shape.value_heads, bias=False)
        self.d = nn.Parameter(torch.ones(shape.value_heads))
        self.norm_weight = nn.Parameter(torch.ones(shape.value_dim))

    def project(self, x: Tensor) -> Parts:
        return self.vkq(x), self.z(x), self.dt(x)

    def recur(
        self, parts: Parts, state: Tensor, observe: StateObserver | None = None
    ) -> tuple[Tensor, Tensor]:
        query, key, value, conv_state = self._ready(parts, state)
        step = self._step(parts[2])
        decay, increment = (
            elementwise_exact(torch.exp, self._rate() * step),
            step[..., None] * value,
        )
        matrix, outputs = self._matrix(state, conv_state), []
        for token in range(value.shape[1]):
            matrix = matrix * decay[:, token, :, None, None]
            matrix = matrix + key[:, token, :, :, None] * increment[:, token, :, None]
            outputs.append((matrix * query[:, token, :, :, None]).sum(-2))
            if observe is not None:
                observe(token, step[:, token], decay[:, token], matrix.flatten(2).norm(dim=2))
        mixed = torch.stack(outputs, 1) + self.d.float()[:, None] * value
        return mixed.flatten(2), torch.cat((conv_state.flatten(1), matrix.flatten(1)), 1)

    def finish(self, mixed: Tensor, parts: Parts) -> Tensor:
        z = parts[1]
        gated = mixed.float() * functional.silu(z.float())
        groups = gated.unflatten(-1, (self.recurrence.norm_groups, -1))
        normed = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + self.eps)
        output: Tensor = self.out((normed.flatten(-2) * self.norm_weight.float()).to(z.dtype))
        return output

    def _in_chunks(self, parts: Parts, documents: Tensor | None) -> Tensor:
        state = self.zero_state(len(parts[0]), parts[0].device)
        query, key, value, _ = self._ready(parts, state, documents)
        step = self._step(parts[2])
        tokens = (query, key, step[..., None] * value, self._rate() * step)
        return self._chunks(tokens, documents, _mamba_chunk) + self.d.float()[:, None] * value

    def _split(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.recurrence
        value, key, query = convolved.split((shape.value_dim, shape.key_dim, shape.key_dim), -1)
        return self._of_keys(query), self._of_keys(key), value

    def _step(self, dt: Tensor) -> Tensor:
        return elementwise_exact(functional.softplus, dt.float() + self.dt_bias.float())


def _mamba_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    matrix: Tensor,
    masks: DocumentMasks | None,
) -> Chunk:
    """Process a chunk of tokens [batch, heads, tokens, ...] in parallel."""
    return read_and_update(query, key, value, matrix, decay_factors(g, masks))
