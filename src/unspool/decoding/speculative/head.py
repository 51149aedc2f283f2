"""Drafting heads: one decoder layer that reads the model's hidden states, run in plain torch.

EAGLE-3 heads and MTP layers (multi-token prediction) have the same structure. The input of the
layer joins the embedding of a token with the hidden state of the position before it: the model's
hidden state where the text has been computed, the head's own output for drafted tokens. A subclass
of `DraftHead` defines how the two are joined; `HeadContext` has the KV cache of the layer for one
text; `build_draft` builds a chain or a tree from the logits.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from unspool.backends.step import Floats, Ints, LoadedModel
from unspool.decoding.speculative.controller import DraftShape
from unspool.engine.request import DraftTree
from unspool.model.config import Rotary
from unspool.model.layers.transformer import Attention, RopeTables, attention_weights

_FIRST_CAPACITY = 256  # positions of a KV cache
_HIDDEN = 1 << 40  # position of a key that a query may not attend to


@runtime_checkable
class DeviceModel(Protocol):
    """A model whose vectors need not leave its device."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of int32 tokens, [n, width]."""

    def project(self, vectors: Tensor) -> Tensor:
        """Apply the head to normalized vectors."""


class LayerInput(NamedTuple):
    """Joined token embeddings and hidden states."""

    residual: Tensor  # [n, width]: what the layer's outputs are added to
    normed: Tensor  # [n, ...]: input of the attention


class DraftHead(ABC):
    """A drafting head with its weights, for any number of texts."""

    attention: Attention
    rotary: Rotary
    ids: Ints  # the token of each logit

    def __init__(
        self, name: str, model: LoadedModel, layers: tuple[int, ...], max_length: int = 0
    ) -> None:
        self.name, self.model = name, model
        self.device_model = model if isinstance(model, DeviceModel) else None
        self.layers = layers  # hidden states it reads: n is the input of layer n
        self.device = torch.device(model.device)
        self.dtype = torch.float32 if self.device.type == "cpu" else torch.bfloat16
        self._max_length = max_length  # longest text; some kinds of RoPE depend on it

    @abstractmethod
    def read_hidden(self, vectors: Tensor) -> Tensor:
        """Convert the model's hidden states [layers, n, width] to those that `join` takes."""

    @abstractmethod
    def join(self, hidden: Tensor, tokens: Sequence[int]) -> LayerInput:
        """Join tokens with the hidden states [n, width] before them."""

    @abstractmethod
    def finish(self, inputs: LayerInput, mixed: Tensor) -> Tensor:
        """Compute hidden states [n, width] from the attention output: those of the next tokens."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the next token over `ids`, from the result of `finish`."""

    def context(self) -> HeadContext:
        return HeadContext(self)

    def to_tensor(self, array: Floats | Tensor) -> Tensor:
        tensor = array if isinstance(array, Tensor) else torch.from_numpy(np.array(array))
        return tensor.to(self.device, self.dtype)

    def embed(self, tokens: Sequence[int]) -> Tensor:
        """Embeddings of the model."""
        if self.device_model is not None:
            ids = torch.tensor(tokens, dtype=torch.int32, device=self.device)
            return self.device_model.embed(ids).to(self.dtype)
        distinct, index = np.unique(np.asarray(tokens, np.int64), return_inverse=True)
        rows = [self.model.rows("embed.weight", int(t), int(t) + 1)[0] for t in distinct]
        return self.to_tensor(np.stack(rows)[index] * np.float32(self.model.config.embedding_scale))

    def rope_tables(self, positions: Ints) -> RopeTables:
        cosine, sine = self.rotary.tables(positions, self._max_length)
        return RopeTables(self.to_tensor(cosine), self.to_tensor(sine))


@dataclass(slots=True, eq=False)
class DraftNode:
    """A drafted token; the root (parent None) is the last token of the text."""

    token: int
    parent: DraftNode | None = None
    depth: int = 0
    score: float = 0.0  # log-probability of the path
    hidden: Tensor | None = field(default=None, repr=False)  # after this token
    slot: int = -1  # of its key in the KV cache; the root's key belongs to the text


class HeadContext:
    """The state of a head for one text: the positions it has read.

    Each has a hidden state, and a key and a value of the layer. Position p joins the hidden state
    of p with token p + 1. Keys of drafted tokens follow those of the text until the next draft.
    """

    def __init__(self, head: DraftHead) -> None:
        self._head = head
        shape = head.attention.shape
        width = head.model.config.width
        self._length = self._num_drafted = 0
        self._positions: Ints = np.zeros(0, np.int64)
        sizes = ((width,), (shape.kv_heads, shape.head_width), (shape.kv_heads, shape.head_width))
        self._hidden, self._keys, self._values = (
            torch.zeros((0, *size), dtype=head.dtype, device=head.device) for size in sizes
        )

    def __len__(self) -> int:
        return self._length

    @property
    def hidden(self) -> Tensor:
        """The hidden states that were read, [positions, width]."""
        return self._hidden[: self._length]

    def truncate(self, count: int) -> None:
        """Keep only the first `count` positions."""
        self._length, self._num_drafted = min(self._length, count), 0

    @torch.inference_mode()
    def fork(self, count: int) -> HeadContext:
        """Return the context of another text that shares the first `count` positions."""
        other = HeadContext(self._head)
        other._reserve(count)
        for source, target in zip(self._tensors(), other._tensors(), strict=True):
            target[:count] = source[:count]
        other._positions[:count] = self._positions[:count]
        other._length = count
        return other

    @torch.inference_mode()
    def read(self, positions: Ints, vectors: Floats | Tensor, following: Sequence[int]) -> None:
        """Read positions: the model's hidden states [layers, n, width], and each next token."""
        head, first, end = self._head, self._length, self._length + len(positions)
        self._reserve(end)
        hidden = head.read_hidden(head.to_tensor(vectors))
        inputs = head.join(hidden, following)
        keys, values = head.attention.keys_values(inputs.normed[None], head.rope_tables(positions))
        self._hidden[first:end] = hidden
        self._keys[first:end], self._values[first:end] = (
            part[0].transpose(0, 1) for part in (keys, values)
        )
        self._positions[first:end] = positions
        self._length, self._num_drafted = end, 0

    @torch.inference_mode()
    def expand(self, nodes: list[DraftNode], tokens: Sequence[int]) -> Tensor:
        """Logits of the token after each node of one level; sets the nodes' hidden states.

        A node attends to the text, its ancestors and itself.
        """
        head, count = self._head, len(nodes)
        if nodes[0].parent is None:
            self._num_drafted = 0
        states = [self._hidden[self._length - 1] if n.parent is None else n.parent.hidden
                  for n in nodes]  # fmt: skip
        inputs = head.join(torch.stack([h for h in states if h is not None]),
                           [node.token for node in nodes])  # fmt: skip
        positions = np.array([len(tokens) - 2 + node.depth for node in nodes])
        angles = head.rope_tables(positions)
        query = head.attention.queries(inputs.normed[None], angles)
        if nodes[0].parent is not None:
            keys, values = head.attention.keys_values(inputs.normed[None], angles)
            first = self._length + self._num_drafted
            self._reserve(first + count)
            self._keys[first : first + count] = keys[0].transpose(0, 1)
            self._values[first : first + count] = values[0].transpose(0, 1)
            self._num_drafted += count
            for row, node in enumerate(nodes):
                node.slot = first + row
        hidden = head.finish(inputs, self._attend(query[0], nodes, positions))
        for row, node in enumerate(nodes):
            node.hidden = hidden[row]
        return head.logits(hidden)

    def _attend(self, query: Tensor, nodes: list[DraftNode], positions: Ints) -> Tensor:
        """Attention output [nodes, heads * head_width] of queries [heads, nodes, head_width]."""
        attention, end = self._head.attention, self._length + self._num_drafted
        key_positions = np.full((len(nodes), end), _HIDDEN, np.int64)
        key_positions[:, : self._length] = self._positions[: self._length]
        for row, node in enumerate(nodes):
            ancestor: DraftNode | None = node
            while ancestor is not None and ancestor.slot >= 0:
                key_positions[row, ancestor.slot] = positions[row] - (node.depth - ancestor.depth)
                ancestor = ancestor.parent
        query_positions = torch.from_numpy(positions[:, None]).to(query.device)
        keys, values = (part[:end].transpose(0, 1)[None] for part in (self._keys, self._values))
        weights = attention_weights(
            attention.config, attention.window, query.transpose(0, 1)[:, :, None], keys,
            query_positions, torch.from_numpy(key_positions).to(query.device), query_positions + 1,
            attention.sinks, attention.scale,
        ).to(values.dtype)  # fmt: skip
        group = weights.shape[1] // values.shape[1]
        mixed: Tensor = weights.unflatten(1, (-1, group)).flatten(2, 3) @ values
        return mixed.flatten(1)

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self._hidden, self._keys, self._values

    def _reserve(self, count: int) -> None:
        """Grow the buffers to at least `count` positions."""
        capacity = len(self._positions)
        if count <= capacity:
            return
        added = max(count, 2 * capacity, _FIRST_CAPACITY) - capacity
        self._hidden, self._keys, self._values = (
            torch.cat((part, part.new_zeros(added, *part.shape[1:]))) for part in self._tensors()
        )
        self._positions = np.concatenate((self._positions, np.zeros(added, np.int64)))


# -- Build a draft from a head's logits: a greedy chain, or a small tree


def build_draft(
    context: HeadContext, tokens: Sequence[int], ids: Ints, shape: DraftShape, temperature: float
) -> DraftTree | list[int]:
    """Build a draft of this shape after these tokens."""
    if shape.width == 1:
        guesses = _chain(context, tokens, ids, shape.levels, temperature)
        return _while_likely(guesses, shape.min_probability)
    level, all_nodes = [DraftNode(int(tokens[-1]))], list[DraftNode]()
    for depth in range(1, shape.levels + 1):
        logits = context.expand(level, tokens)
        candidates = [
            DraftNode(int(ids[place]), node, depth, node.score + logprob)
            for node, row in zip(level, logits, strict=True)
            for place, logprob in _top_logprobs(row, shape.width, temperature)
        ]
        candidates.sort(key=lambda node: -node.score)
        all_nodes += candidates
        level = candidates[: shape.width]
    all_nodes.sort(key=lambda node: -node.score)  # stable: parents stay before their children
    selected = all_nodes[: shape.nodes]
    number: dict[DraftNode | None, int] = {node: place for place, node in enumerate(selected)}
    parents = [number.get(node.parent, -1) for node in selected]
    return DraftTree([node.token for node in selected], parents)


def _chain(
    context: HeadContext, tokens: Sequence[int], ids: Ints, levels: int, temperature: float
) -> Iterator[tuple[int, float]]:
    """Draft greedily; each token is computed only when requested."""
    node = DraftNode(int(tokens[-1]))
    for depth in range(1, levels + 1):
        (logits,) = context.expand([node], tokens)
        ((place, logprob),) = _top_logprobs(logits, 1, temperature)
        node = DraftNode(int(ids[place]), node, depth)
        yield node.token, logprob


def _while_likely(guesses: Iterator[tuple[int, float]], min_probability: float) -> list[int]:
    """Take tokens while their joint probability is at least `min_probability`."""
    accepted_tokens, score = list[int](), 0.0
    for token, logprob in guesses:
        score += logprob
        if min_probability and score < math.log(min_probability):
            break
        accepted_tokens.append(token)
    return accepted_tokens


@torch.inference_mode()
def _top_logprobs(logits: Tensor, count: int, temperature: float) -> list[tuple[int, float]]:
    """The likeliest indices with their log-probabilities."""
    scaled = logits.float() / temperature
    top, indices = scaled.topk(count)
    logprobs = top - scaled.logsumexp(0)
    pairs = torch.stack((indices.double(), logprobs.double()), 1).tolist()  # one copy to the host
    return [(int(index), logprob) for index, logprob in pairs]
