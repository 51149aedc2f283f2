"""Mamba-2 in plain torch (Granite 4, Nemotron): a recurrent layer like those in `mixers.py`."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from unspool.model.config import ModelConfig
from unspool.model.layers.mixers import CHUNK, Mixer, Parts, Seen, alive, exact


class Mamba2(Mixer):
    """Each head keeps a matrix S in which values are found by keys. A token lets S fade, adds its
    value at its key as much as its step dt is large, and reads with its query; d lets some of the
    value pass by: S = e^(-a dt) S + k (dt v), o = q S + d v."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        shape, width = self.recurrence, config.width
        self.eps = config.norm_eps
        self.z = nn.Linear(width, shape.values, bias=False)
        self.vkq = nn.Linear(width, self.channels, bias=False)
        self.dt = nn.Linear(width, shape.value_heads, bias=False)
        self.a_log = nn.Parameter(torch.zeros(shape.value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(shape.value_heads))
        self.d = nn.Parameter(torch.ones(shape.value_heads))
        self.norm_weight = nn.Parameter(torch.ones(shape.values))
        self.out = nn.Linear(shape.values, width, bias=False)
        self._key_heads = [shape.key_head(head) for head in range(shape.value_heads)]

    def project(self, x: Tensor) -> Parts:
        return self.vkq(x), self.z(x), self.dt(x)

    def recur(self, parts: Parts, state: Tensor, seen: Seen | None = None) -> tuple[Tensor, Tensor]:
        shape = self.recurrence
        value, key, query, last = self._ready(parts, state)
        step = self._step(parts[2])
        decay, more = exact(torch.exp, self._rate() * step), step[..., None] * value
        kept = state[:, last.flatten(1).shape[1] :]
        matrix = kept.unflatten(1, (shape.value_heads, shape.key_width, shape.value_width))
        found = []
        for token in range(value.shape[1]):
            matrix = matrix * decay[:, token, :, None, None]
            matrix = matrix + key[:, token, :, :, None] * more[:, token, :, None]
            found.append((matrix * query[:, token, :, :, None]).sum(-2))
            if seen is not None:
                seen(token, step[:, token], decay[:, token], matrix.flatten(2).norm(dim=2))
        mixed = torch.stack(found, 1) + self.d.float()[:, None] * value
        return mixed.flatten(2), torch.cat((last.flatten(1), matrix.flatten(1)), 1)

    def finish(self, mixed: Tensor, parts: Parts) -> Tensor:
        z = parts[1]
        gated = mixed.float() * functional.silu(z.float())
        groups = gated.unflatten(-1, (self.recurrence.norm_groups, -1))
        normed = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + self.eps)
        found: Tensor = self.out((normed.flatten(-2) * self.norm_weight.float()).to(z.dtype))
        return found

    def whole(self, x: Tensor, documents: Tensor | None) -> Tensor:
        parts = self.project(x)
        with torch.autocast(x.device.type, enabled=False):
            return self._in_chunks(parts, documents)

    def _in_chunks(self, parts: Parts, documents: Tensor | None) -> Tensor:
        shape, fresh = self.recurrence, self.fresh(len(parts[0]), parts[0].device)
        value, key, query, _ = (
            part.transpose(1, 2) for part in self._ready(parts, fresh, documents)
        )
        step = self._step(parts[2]).transpose(1, 2)
        g, more = self._rate()[:, None] * step, step[..., None] * value
        matrix = fresh.new_zeros(len(fresh), shape.value_heads, shape.key_width, shape.value_width)
        found = []
        for start in range(0, value.shape[2], CHUNK):
            at = slice(start, start + CHUNK)
            mixed, matrix = _chunk(
                query[:, :, at], key[:, :, at], more[:, :, at], g[:, :, at], matrix,
                alive(documents, start),
            )  # fmt: skip
            found.append(mixed)
        whole = torch.cat(found, 2) + self.d.float()[:, None, None] * value
        return self.finish(whole.transpose(1, 2).flatten(2), parts)

    def _ready(
        self, parts: Parts, state: Tensor, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Values, keys and queries [batch, tokens, heads, width] behind the convolution, and the
        convolution's last inputs."""
        shape = self.recurrence
        convolved, last = self._convolved(parts[0], state, documents)
        value, key, query = exact(functional.silu, convolved).split(
            (shape.values, shape.keys, shape.keys), -1
        )
        key, query = (
            part.unflatten(-1, (shape.key_heads, -1))[:, :, self._key_heads]
            for part in (key, query)
        )
        return value.unflatten(-1, (shape.value_heads, -1)), key, query, last

    def _step(self, dt: Tensor) -> Tensor:
        return exact(functional.softplus, dt.float() + self.dt_bias.float())

    def _rate(self) -> Tensor:
        """How fast each head forgets."""
        return -exact(torch.exp, self.a_log)


def _chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    matrix: Tensor,
    living: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Tokens [batch, heads, tokens, ...] of a chunk at once: what each finds of those before it in
    the chunk, and of what was there before the chunk, faded by so much in between."""
    total = g.cumsum(-1)
    fades = total.exp()
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    last = between[..., -1, :]
    if living is not None:
        between, fades = between * living[0], fades * living[1]
        last = last * living[0][..., -1, :]
    mixed = fades[..., None] * (query @ matrix)
    mixed = mixed + (query @ key.transpose(-1, -2) * between) @ value
    kept = fades[..., -1, None, None] * matrix
    return mixed, kept + (key * last[..., None]).transpose(-1, -2) @ value
