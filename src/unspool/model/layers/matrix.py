"""Recurrent layers whose heads each keep a matrix S, in which values are found by keys."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from unspool.model.config import ModelConfig
from unspool.model.layers.mixers import Mixer, Parts

CHUNK = 64  # tokens whose sums training makes together


class MatrixMixer(Mixer):
    """What DeltaNet and Mamba-2 have in common: heads that fade, and a gated norm behind them."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        shape = self.recurrence
        self.eps = config.norm_eps
        self.z = nn.Linear(config.width, shape.values, bias=False)
        self.a_log = nn.Parameter(torch.zeros(shape.value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(shape.value_heads))
        self.out = nn.Linear(shape.values, config.width, bias=False)
        heads = [shape.key_head(head) for head in range(shape.value_heads)]
        self._key_heads = heads if heads != list(range(shape.value_heads)) else None

    def whole(self, x: Tensor, documents: Tensor | None) -> Tensor:
        parts = self.project(x)
        with torch.autocast(x.device.type, enabled=False):  # sums over many tokens
            mixed = self._in_chunks(parts, documents).flatten(2)
        return self.finish(mixed, parts)

    @abstractmethod
    def _in_chunks(self, parts: Parts, documents: Tensor | None) -> Tensor:
        """What `recur` finds from nothing on, [batch, tokens, heads, width], with gradients."""

    @abstractmethod
    def _split(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys head by head, and values, from what the convolution gave."""

    def _ready(
        self, parts: Parts, state: Tensor, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values [batch, tokens, heads of values, width] behind the convolution,
        and the convolution's last inputs."""
        convolved, last = self._convolved(parts[0], state, documents)
        query, key, value = self._split(exact(functional.silu, convolved))
        values = value.unflatten(-1, (self.recurrence.value_heads, -1))
        return self._for_values(query), self._for_values(key), values, last

    def _chunks(
        self, tokens: tuple[Tensor, ...], documents: Tensor | None, chunk: Callable[..., Chunk]
    ) -> Tensor:
        """`chunk` for chunk behind chunk of `tokens` [batch, tokens, heads, ...] each."""
        shape, first = self.recurrence, tokens[0]
        matrix = first.new_zeros(len(first), shape.value_heads, shape.key_width, shape.value_width)
        turned, found = [part.transpose(1, 2) for part in tokens], []
        for start in range(0, first.shape[1], CHUNK):
            here = [part[:, :, start : start + CHUNK] for part in turned]
            mixed, matrix = chunk(*here, matrix, alive(documents, start))
            found.append(mixed)
        return torch.cat(found, 2).transpose(1, 2)

    def _matrix(self, state: Tensor, last: Tensor) -> Tensor:
        """The heads' matrices: in a state they stand behind the convolution's `last` inputs."""
        shape, kept = self.recurrence, state[:, last.flatten(1).shape[1] :]
        matrix: Tensor = kept.unflatten(1, (shape.value_heads, shape.key_width, shape.value_width))
        return matrix

    def _of_keys(self, part: Tensor) -> Tensor:
        """Keys or queries head by head."""
        heads: Tensor = part.unflatten(-1, (self.recurrence.key_heads, -1))
        return heads

    def _for_values(self, part: Tensor) -> Tensor:
        """Of each head of values the key or query that it shares with others."""
        return part if self._key_heads is None else part[:, :, self._key_heads]

    def _rate(self) -> Tensor:
        """How fast each head forgets."""
        return -exact(torch.exp, self.a_log)


Chunk = tuple[Tensor, Tensor]  # what its tokens find, and the matrix behind it
Alive = tuple[Tensor, Tensor]


class Fading(NamedTuple):
    """How much is left of what was written, tokens of a chunk."""

    between: Tensor  # behind each token [tokens] of what each [tokens] wrote
    before: Tensor  # behind each token of what was there before the chunk
    last: Tensor  # behind the chunk of what each wrote


def fading(g: Tensor, alive: Alive | None) -> Fading:
    """Of the logarithms of how much each token leaves [batch, heads, tokens]."""
    total = g.cumsum(-1)
    before = total.exp()
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    last = between[..., -1, :]
    if alive is not None:
        between, before = between * alive[0], before * alive[1]
        last = last * alive[0][..., -1, :]
    return Fading(between, before, last)


def read_and_written(
    query: Tensor, key: Tensor, written: Tensor, matrix: Tensor, fades: Fading
) -> Chunk:
    """What queries find of what is `written` at keys in the chunk and of the matrix before it, and
    the matrix behind it."""
    mixed = fades.before[..., None] * (query @ matrix)
    mixed = mixed + (query @ key.transpose(-1, -2) * fades.between) @ written
    kept = fades.before[..., -1, None, None] * matrix
    return mixed, kept + (key * fades.last[..., None]).transpose(-1, -2) @ written


def exact(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """In 32 bits by way of 64: torch computes such a function in other ways at the end of an array,
    and a token must get the same bits wherever it stands. Gradients need not be so exact."""
    if x.requires_grad or x.device.type == "mps":  # which has no 64 bits
        return function(x.float())
    return function(x.double()).float()


def alive(documents: Tensor | None, start: int) -> Alive | None:
    """Of a chunk: which token knows which [batch, 1, tokens, tokens], and which of them the state
    before the chunk [batch, 1, tokens]."""
    if documents is None:
        return None
    here = documents[:, start : start + CHUNK]
    before = documents[:, start - 1 : start] if start else torch.full_like(here[:, :1], -1)
    return (here[:, :, None] == here[:, None, :])[:, None], (here == before)[:, None]
