"""Drafting heads in Unspool's own format: the reference implementation.

The model's hidden states before some layers are normalized and fused into one vector per position;
keys and values are computed from it. A token is drafted from the vector of the position before it
(for later tokens of a draft: the head's own state) and the token's embedding: a linear join, one
attention over those keys and values plus a zero key, and a feed-forward layer. The resulting state,
plus a small mixture of the last tokens' embeddings, is multiplied with the rows of the model's
output head for the tokens that can be proposed. Drafted tokens have no keys, so all nodes of a tree
attend to the same context.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from unspool.backends.base import LoadedModel
from unspool.backends.step import Floats, Ints
from unspool.decoding.heads import arrays
from unspool.decoding.heads.files import HeadConfig, HeadFiles
from unspool.decoding.heads.growing import DraftNode, last_tokens
from unspool.model.positions import Rotary

_CHUNK_ROWS = 4096  # rows of the model's tables read at a time


class UnspoolHead:
    """A head with its weights in numpy or on a torch device."""

    def __init__(self, files: HeadFiles, model: LoadedModel, device: str | None = None) -> None:
        self.config: HeadConfig = files.config
        self.name, self.layers, self.ids = files.config.name, files.config.layers, files.ids
        self._model, self.to_device = model, arrays.to_device(device)
        self._weights = {
            n: self.to_device(stored.float32()) for n, stored in files.matrices.items()
        }
        self._norms = {name: self.to_device(vector) for name, vector in files.norms.items()}
        self._head = self.to_device(gather_rows(model, "head.weight", files.ids))
        self._rotary = Rotary(width=files.config.head_width, base=files.config.rope_theta)

    def context(self) -> UnspoolHeadContext:
        return UnspoolHeadContext(self)

    def norm(self, x: arrays.Array, name: str) -> arrays.Array:
        return arrays.rms_norm(x, self._norms[name], self.config.norm_eps)

    def linear(self, x: arrays.Array, name: str) -> arrays.Array:
        return x @ self._weights[name].swapaxes(0, 1)

    def embed(self, tokens: Sequence[int]) -> arrays.Array:
        rows = [self._model.rows("embed.weight", token, token + 1)[0] for token in tokens]
        return self.to_device(np.stack(rows))

    def rope_tables(self, positions: Ints) -> list[arrays.Array]:
        return [self.to_device(table) for table in self._rotary.tables(positions, 0)]

    def fuse(self, vectors: Floats) -> arrays.Array:
        """Fuse hidden states [layers, n, width] into one vector per position."""
        parts = [self.norm(self.to_device(x), f"features.norm.{n}") for n, x in enumerate(vectors)]
        return self.linear(arrays.concat(parts, -1), "features.fuse")

    def keys_values(self, fused: arrays.Array, positions: Ints) -> list[arrays.Array]:
        config = self.config
        kv = self.linear(self.norm(fused, "context.norm"), "context.keys_values")
        kv = kv.reshape(len(positions), 2, config.kv_heads, config.head_width)
        return [arrays.apply_rope(kv[:, 0], *self.rope_tables(positions)), kv[:, 1]]

    def step(
        self,
        states: arrays.Array,
        recent: list[list[int]],
        positions: Ints,
        keys: arrays.Array,
        values: arrays.Array,
    ) -> tuple[arrays.Array, arrays.Array]:
        """Next states, and logits over `ids`; `recent` has the most recent token first."""
        config, count = self.config, len(recent)
        word = self.embed([tokens[0] for tokens in recent])
        h = self.linear(self.norm(states, "join.state.norm"), "join.state")
        h = h + self.linear(self.norm(word, "join.word.norm"), "join.word")
        query = self.linear(self.norm(h, "attention.norm"), "attention.query")
        query = query.reshape(count, config.heads, config.head_width)
        query = arrays.apply_rope(query, *self.rope_tables(positions))
        h = h + self.linear(arrays.attention(query, keys, values), "attention.out")
        inner = self.linear(self.norm(h, "feed.norm"), "feed.gate_up")
        gate, up = inner[:, : config.ff_width], inner[:, config.ff_width :]
        h = h + self.linear(arrays.silu(gate) * up, "feed.down")
        mixed = self.linear(self.norm(h, "mix.norm"), "mix.state") + self._mixed_words(recent)
        gate, up = mixed[:, : config.mix_width], mixed[:, config.mix_width :]
        output = h + self.linear(arrays.silu(gate) * up, "mix.out")
        return h, self.norm(output, "final.norm") @ self._head.swapaxes(0, 1)

    def _mixed_words(self, recent: list[list[int]]) -> arrays.Array:
        """Contribution of the last tokens' embeddings, each by its own part of a projection."""
        width, parts = self.config.word_width, []
        for back in range(self.config.words):
            words = self.embed([tokens[back] for tokens in recent])
            projected = self.linear(self.norm(words, "words.norm"), "words.project")
            parts.append(projected[:, back * width : (back + 1) * width])
        earlier = self.linear(arrays.concat(parts[1:], -1), "mix.earlier_words")
        return self.linear(parts[0], "mix.last_word") + earlier


class UnspoolHeadContext:
    """The state of the head for one text."""

    def __init__(self, head: UnspoolHead) -> None:
        config = head.config
        self._head, self._length = head, 0
        self._fused = head.to_device(np.zeros((0, config.width), np.float32))
        sink = np.zeros((1, config.kv_heads, config.head_width), np.float32)
        self._keys, self._values = head.to_device(sink), head.to_device(sink)

    def __len__(self) -> int:
        return len(self._fused)

    def truncate(self, count: int) -> None:
        self._fused = self._fused[:count]
        self._keys, self._values = self._keys[: count + 1], self._values[: count + 1]

    def fork(self, count: int) -> UnspoolHeadContext:
        other = copy.copy(self)
        other.truncate(count)
        return other

    def read(self, positions: Ints, vectors: Floats, following: Sequence[int]) -> None:
        fused = self._head.fuse(vectors)
        keys, values = self._head.keys_values(fused, positions)
        self._fused = arrays.concat([self._fused, fused], 0)
        self._keys = arrays.concat([self._keys, keys], 0)
        self._values = arrays.concat([self._values, values], 0)

    def expand(self, nodes: list[DraftNode], tokens: Sequence[int]) -> Floats:
        return expand_nodes(self._head, nodes, tokens, self._fused, self._keys, self._values)


def expand_nodes(
    head: UnspoolHead,
    nodes: list[DraftNode],
    tokens: Sequence[int],
    fused: arrays.Array,
    keys: arrays.Array,
    values: arrays.Array,
) -> Floats:
    """Logits of the token after each node, given a text's keys and values; sets node states."""
    recent = [last_tokens(node, tokens, head.config.words) for node in nodes]
    states = [n.parent.state if n.parent is not None else fused[-1] for n in nodes]
    positions = np.array([len(tokens) - 1 + node.depth for node in nodes])
    rows = arrays.concat([state[None] for state in states], 0)
    h, logits = head.step(rows, recent, positions, keys, values)
    for node, state in zip(nodes, h, strict=True):
        node.state = state
    result: Floats = arrays.to_host(logits)
    return result


def gather_rows(model: LoadedModel, name: str, ids: Ints) -> Floats:
    """Gather rows of one of the model's tables without loading all of it."""
    chunks: list[Floats] = []
    order = np.argsort(ids, kind="stable")
    for start in range(0, int(ids.max()) + 1, _CHUNK_ROWS):
        chunk_ids = ids[order][(ids[order] >= start) & (ids[order] < start + _CHUNK_ROWS)]
        if len(chunk_ids):
            chunks.append(model.rows(name, start, start + _CHUNK_ROWS)[chunk_ids - start])
    sorted_rows = np.concatenate(chunks)
    rows = np.empty_like(sorted_rows)
    rows[order] = sorted_rows
    return rows
