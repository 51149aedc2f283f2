"""Recurrent layers with a matrix state S per head, in which values are looked up by keys."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from unspool.model.config import ModelConfig
from unspool.model.layers.mixers import Mixer, Parts

CHUNK = 64  # tokens of a chunk in training


class MatrixMixer(Mixer):
    """Base class of DeltaNet and Mamba-2: heads with decay, followed by a gated norm."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        shape = self.recurrence
        self.eps = config.norm_eps
        self.z = nn.Linear(config.width, shape.value_dim, bias=False)
        self.a_log = nn.Parameter(torch.zeros(shape.value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(shape.value_heads))
        self.out = nn.Linear(shape.value_dim, config.width, bias=False)
        heads = [shape.key_head(head) for head in range(shape.value_heads)]
        self._key_heads = heads if heads != list(range(shape.value_heads)) else None

    def forward_documents(self, x: Tensor, documents: Tensor | None) -> Tensor:
        parts = self.project(x)
        with torch.autocast(x.device.type, enabled=False):  # sums over many tokens
            mixed = self._in_chunks(parts, documents).flatten(2)
        return self.finish(mixed, parts)

    @abstractmethod
    def _in_chunks(self, parts: Parts, documents: Tensor | None) -> Tensor:
        """Outputs of `recur` from the zero state, [batch, tokens, heads, width], with gradients."""

    @abstractmethod
    def _split(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the convolution's output into queries and keys per head, and values."""

    def _ready(
        self, parts: Parts, state: Tensor, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values [batch, tokens, value heads, width] after the convolution, and
        the convolution's past inputs."""
        convolved, conv_state = self._convolved(parts[0], state, documents)
        query, key, value = self._split(elementwise_exact(functional.silu, convolved))
        values = value.unflatten(-1, (self.recurrence.value_heads, -1))
        return self._for_values(query), self._for_values(key), values, conv_state

    def _chunks(
        self, tokens: tuple[Tensor, ...], documents: Tensor | None, chunk: Callable[..., Chunk]
    ) -> Tensor:
        """Apply `chunk` to one chunk after the other of `tokens`, [batch, tokens, heads, ...]
        each."""
        shape, first = self.recurrence, tokens[0]
        matrix = first.new_zeros(len(first), shape.value_heads, shape.key_width, shape.value_width)
        by_head, outputs = [part.transpose(1, 2) for part in tokens], []
        for start in range(0, first.shape[1], CHUNK):
            chunk_inputs = [part[:, :, start : start + CHUNK] for part in by_head]
            mixed, matrix = chunk(*chunk_inputs, matrix, document_masks(documents, start))
            outputs.append(mixed)
        return torch.cat(outputs, 2).transpose(1, 2)

    def _matrix(self, state: Tensor, conv_state: Tensor) -> Tensor:
        """The heads' matrices: they follow the convolution's inputs in the state."""
        shape, flat = self.recurrence, state[:, conv_state.flatten(1).shape[1] :]
        matrix: Tensor = flat.unflatten(1, (shape.value_heads, shape.key_width, shape.value_width))
        return matrix

    def _of_keys(self, part: Tensor) -> Tensor:
        """Split keys or queries into heads."""
        heads: Tensor = part.unflatten(-1, (self.recurrence.key_heads, -1))
        return heads

    def _for_values(self, part: Tensor) -> Tensor:
        """Repeat the key or query heads for the value heads that share them."""
        return part if self._key_heads is None else part[:, :, self._key_heads]

    def _rate(self) -> Tensor:
        """Logarithmic decay rate of each head."""
        return -elementwise_exact(torch.exp, self.a_log)


Chunk = tuple[Tensor, Tensor]  # outputs of the tokens, and the matrix after them
DocumentMasks = tuple[Tensor, Tensor]


class DecayFactors(NamedTuple):
    """Decay between the tokens of a chunk."""

    between: Tensor  # [tokens, tokens]: at each token, of what each earlier token wrote
    before: Tensor  # [tokens]: at each token, of the state before the chunk
    last: Tensor  # [tokens]: after the chunk, of what each token wrote


def decay_factors(g: Tensor, masks: DocumentMasks | None) -> DecayFactors:
    """Decay factors from log decays [batch, heads, tokens]."""
    total = g.cumsum(-1)
    before = total.exp()
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    last = between[..., -1, :]
    if masks is not None:
        between, before = between * masks[0], before * masks[1]
        last = last * masks[0][..., -1, :]
    return DecayFactors(between, before, last)


def read_and_update(
    query: Tensor, key: Tensor, written: Tensor, matrix: Tensor, decay: DecayFactors
) -> Chunk:
    """Outputs of the queries, which read the matrix and what the chunk has `written` at its keys;
    and the matrix after the chunk."""
    mixed = decay.before[..., None] * (query @ matrix)
    mixed = mixed + (query @ key.transpose(-1, -2) * decay.between) @ written
    carried = decay.before[..., -1, None, None] * matrix
    return mixed, carried + (key * decay.last[..., None]).transpose(-1, -2) @ written


def elementwise_exact(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function in float64 and round to float32. torch's vectorized float32 functions give
    other bits at the end of an array, and a token must get the same bits at any position. Not
    needed with gradients."""
    if x.requires_grad or x.device.type == "mps":  # MPS has no float64
        return function(x.float())
    return function(x.double()).float()


def document_masks(documents: Tensor | None, start: int) -> DocumentMasks | None:
    """Masks of a chunk: pairs of tokens in the same document [batch, 1, tokens, tokens], and tokens
    in the document before the chunk [batch, 1, tokens]."""
    if documents is None:
        return None
    chunk_documents = documents[:, start : start + CHUNK]
    before = (
        documents[:, start - 1 : start] if start else torch.full_like(chunk_documents[:, :1], -1)
    )
    return (chunk_documents[:, :, None] == chunk_documents[:, None, :])[:, None], (
        chunk_documents == before
    )[:, None]
