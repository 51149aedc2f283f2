"""Gated DeltaNet in plain torch (Qwen3-Next, Qwen3.5)."""

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

_KEY_EPS = 1e-6


class DeltaNet(MatrixMixer):
    """Gated delta rule: S *= e^g, S += k (beta (v - k S)), o = q S."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        shape, width = self.recurrence, config.width
        self.qkv = nn.Linear(width, self.channels, bias=False)
        self.b = nn.Linear(width, shape.value_heads, bias=False)
        self.a = nn.Linear(width, shape.value_heads, bias=False)
        self.norm_weight = nn.Parameter(torch.ones(shape.value_width))

    def project(self, x: Tensor) -> Parts:
        return self.qkv(x), self.z(x), self.b(x), self.a(x)

    def recur(
        self, parts: Parts, state: Tensor, observe: StateObserver | None = None
    ) -> tuple[Tensor, Tensor]:
        query, key, value, conv_state = self._ready(parts, state)
        beta, decay = (
            elementwise_exact(torch.sigmoid, parts[2]),
            elementwise_exact(torch.exp, self._log_decay(parts[3])),
        )
        matrix, outputs = self._matrix(state, conv_state), []
        for token in range(query.shape[1]):
            k = key[:, token, :, :, None]
            matrix = matrix * decay[:, token, :, None, None]
            error = value[:, token] - (matrix * k).sum(-2)
            matrix = matrix + k * (error * beta[:, token, :, None])[:, :, None]
            outputs.append((matrix * query[:, token, :, :, None]).sum(-2))
            if observe is not None:
                observe(token, beta[:, token], decay[:, token], matrix.flatten(2).norm(dim=2))
        return torch.stack(outputs, 1).flatten(2), torch.cat(
            (conv_state.flatten(1), matrix.flatten(1)), 1
        )

    def finish(self, mixed: Tensor, parts: Parts) -> Tensor:
        z = parts[1]
        heads = mixed.float().unflatten(-1, (self.recurrence.value_heads, -1))
        normed = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + self.eps)
        gate = functional.silu(z.float()).unflatten(-1, (self.recurrence.value_heads, -1))
        output: Tensor = self.out(
            (normed * self.norm_weight.float() * gate).flatten(-2).to(z.dtype)
        )
        return output

    def _in_chunks(self, parts: Parts, documents: Tensor | None) -> Tensor:
        state = self.zero_state(len(parts[0]), parts[0].device)
        query, key, value, _ = self._ready(parts, state, documents)
        beta, g = parts[2].float().sigmoid(), self._log_decay(parts[3])
        return self._chunks((query, key, value, beta, g), documents, _delta_chunk)

    def _split(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.recurrence
        query, key, value = convolved.split((shape.key_dim, shape.key_dim, shape.value_dim), -1)
        query = _unit(self._of_keys(query)) * shape.key_width**-0.5
        return query, _unit(self._of_keys(key)), value

    def _log_decay(self, a: Tensor) -> Tensor:
        return self._rate() * elementwise_exact(
            functional.softplus, a.float() + self.dt_bias.float()
        )


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + _KEY_EPS)


def _delta_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    g: Tensor,
    matrix: Tensor,
    masks: DocumentMasks | None,
) -> Chunk:
    """Process a chunk of tokens [batch, heads, tokens, ...] in parallel. Token t writes
    u_t = beta_t (v_t - k_t S_t), where S_t includes the u of earlier tokens: a triangular system
    for all u."""
    decay = decay_factors(g, masks)
    key_overlap = (key @ key.transpose(-1, -2) * decay.between).tril(-1) * beta[..., None]
    residual = (value - decay.before[..., None] * (key @ matrix)) * beta[..., None]
    identity = torch.eye(key_overlap.shape[-1], device=key_overlap.device)
    written = torch.linalg.solve_triangular(
        identity + key_overlap, residual, upper=False, unitriangular=True
    )
    return read_and_update(query, key, written, matrix, decay)
