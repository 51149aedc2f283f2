"""A head of our own format, as plain arithmetic: what it computes is said here.

The model's vectors before some layers are normed and fused into one vector for each position of
the text; keys and values come from it. A token is drafted from the vector of the position before it
(or, further on, the head's own state) and the token's embedding: joined, one attention over those
keys and values and a first key of zeros, a feed-forward. The state that comes out, and a small
mixture of the last tokens' embeddings, are compared with the rows of the model's own head for the
tokens that can be proposed. Tokens that are drafted get no keys: all of a tree look at the same.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from unspool.backends.base import Loaded
from unspool.backends.step import Floats, Ints
from unspool.decoding.heads import arrays
from unspool.decoding.heads.files import HeadConfig, HeadFiles
from unspool.decoding.heads.growing import Node, last_tokens
from unspool.model.positions import Rotary

_AT_ONCE = 4096  # rows of the model's tables


class OwnHead:
    """A head, its weights where the arithmetic is done: numpy, or a device of torch."""

    def __init__(self, files: HeadFiles, model: Loaded, device: str | None = None) -> None:
        self.config: HeadConfig = files.config
        self.name, self.layers, self.ids = files.config.name, files.config.layers, files.ids
        self._model, self.put = model, arrays.on(device)
        self._weights = {n: self.put(stored.float32()) for n, stored in files.matrices.items()}
        self._norms = {name: self.put(vector) for name, vector in files.norms.items()}
        self._head = self.put(chosen_rows(model, "head.weight", files.ids))
        self._rotary = Rotary(width=files.config.head_width, base=files.config.rope_theta)

    def context(self) -> OwnContext:
        return OwnContext(self)

    def norm(self, x: arrays.Array, name: str) -> arrays.Array:
        return arrays.normed(x, self._norms[name], self.config.norm_eps)

    def times(self, x: arrays.Array, name: str) -> arrays.Array:
        return x @ self._weights[name].swapaxes(0, 1)

    def words(self, tokens: Sequence[int]) -> arrays.Array:
        rows = [self._model.rows("embed.weight", token, token + 1)[0] for token in tokens]
        return self.put(np.stack(rows))

    def angles(self, positions: Ints) -> list[arrays.Array]:
        return [self.put(table) for table in self._rotary.tables(positions, 0)]

    def fused(self, vectors: Floats) -> arrays.Array:
        """One vector for each position, from [layers, n, width]."""
        parts = [self.norm(self.put(x), f"features.norm.{n}") for n, x in enumerate(vectors)]
        return self.times(arrays.joined(parts, -1), "features.fuse")

    def keys_values(self, fused: arrays.Array, positions: Ints) -> list[arrays.Array]:
        config = self.config
        both = self.times(self.norm(fused, "context.norm"), "context.keys_values")
        both = both.reshape(len(positions), 2, config.kv_heads, config.head_width)
        return [arrays.turned(both[:, 0], *self.angles(positions)), both[:, 1]]

    def step(
        self,
        states: arrays.Array,
        recent: list[list[int]],
        positions: Ints,
        keys: arrays.Array,
        values: arrays.Array,
    ) -> tuple[arrays.Array, arrays.Array]:
        """The next states, and the logits over `ids`; `recent` has the last token first."""
        config, count = self.config, len(recent)
        word = self.words([tokens[0] for tokens in recent])
        h = self.times(self.norm(states, "join.state.norm"), "join.state")
        h = h + self.times(self.norm(word, "join.word.norm"), "join.word")
        query = self.times(self.norm(h, "attention.norm"), "attention.query")
        query = query.reshape(count, config.heads, config.head_width)
        query = arrays.turned(query, *self.angles(positions))
        h = h + self.times(arrays.attended(query, keys, values), "attention.out")
        inner = self.times(self.norm(h, "feed.norm"), "feed.gate_up")
        gate, up = inner[:, : config.ff_width], inner[:, config.ff_width :]
        h = h + self.times(arrays.silu(gate) * up, "feed.down")
        mixed = self.times(self.norm(h, "mix.norm"), "mix.state") + self._mixed_words(recent)
        gate, up = mixed[:, : config.mix_width], mixed[:, config.mix_width :]
        said = h + self.times(arrays.silu(gate) * up, "mix.out")
        return h, self.norm(said, "final.norm") @ self._head.swapaxes(0, 1)

    def _mixed_words(self, recent: list[list[int]]) -> arrays.Array:
        """What the last tokens themselves say, each through its own part of a projection."""
        width, parts = self.config.word_width, []
        for back in range(self.config.words):
            words = self.words([tokens[back] for tokens in recent])
            projected = self.times(self.norm(words, "words.norm"), "words.project")
            parts.append(projected[:, back * width : (back + 1) * width])
        earlier = self.times(arrays.joined(parts[1:], -1), "mix.earlier_words")
        return self.times(parts[0], "mix.last_word") + earlier


class OwnContext:
    """One text as a head of our own sees it."""

    def __init__(self, head: OwnHead) -> None:
        config = head.config
        self._head, self._length = head, 0
        self._fused = head.put(np.zeros((0, config.width), np.float32))
        sink = np.zeros((1, config.kv_heads, config.head_width), np.float32)
        self._keys, self._values = head.put(sink), head.put(sink)

    def __len__(self) -> int:
        return len(self._fused)

    def cut(self, count: int) -> None:
        self._fused = self._fused[:count]
        self._keys, self._values = self._keys[: count + 1], self._values[: count + 1]

    def fork(self, count: int) -> OwnContext:
        other = copy.copy(self)
        other.cut(count)
        return other

    def read(self, positions: Ints, vectors: Floats, following: Sequence[int]) -> None:
        fused = self._head.fused(vectors)
        keys, values = self._head.keys_values(fused, positions)
        self._fused = arrays.joined([self._fused, fused], 0)
        self._keys = arrays.joined([self._keys, keys], 0)
        self._values = arrays.joined([self._values, values], 0)

    def expand(self, nodes: list[Node], tokens: Sequence[int]) -> Floats:
        return expanded(self._head, nodes, tokens, self._fused, self._keys, self._values)


def expanded(
    head: OwnHead,
    nodes: list[Node],
    tokens: Sequence[int],
    fused: arrays.Array,
    keys: arrays.Array,
    values: arrays.Array,
) -> Floats:
    """Logits of what follows each node of a text whose positions have these; sets their states."""
    recent = [last_tokens(node, tokens, head.config.words) for node in nodes]
    states = [n.parent.state if n.parent is not None else fused[-1] for n in nodes]
    positions = np.array([len(tokens) - 1 + node.depth for node in nodes])
    rows = arrays.joined([state[None] for state in states], 0)
    h, logits = head.step(rows, recent, positions, keys, values)
    for node, state in zip(nodes, h, strict=True):
        node.state = state
    found: Floats = arrays.host(logits)
    return found


class Rows(Protocol):
    """Who has the model's tables."""

    def rows(self, name: str, start: int, stop: int) -> Floats: ...


def chosen_rows(model: Rows, name: str, ids: Ints) -> Floats:
    """Some rows of one of the model's tables, without having all of it in memory."""
    found: list[Floats] = []
    order = np.argsort(ids, kind="stable")
    for start in range(0, int(ids.max()) + 1, _AT_ONCE):
        mine = ids[order][(ids[order] >= start) & (ids[order] < start + _AT_ONCE)]
        if len(mine):
            found.append(model.rows(name, start, start + _AT_ONCE)[mine - start])
    sorted_rows = np.concatenate(found)
    rows = np.empty_like(sorted_rows)
    rows[order] = sorted_rows
    return rows
