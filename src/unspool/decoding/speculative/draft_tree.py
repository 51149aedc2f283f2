"""Build a draft from a head's logits: a greedy chain, or a small tree.

A chain ends where it is no longer likely enough to be worth verifying.

A tree is built level by level: the likeliest nodes so far are expanded in one run of the head. Of
all nodes the likeliest are kept, by the product of the probabilities on the path. A node is never
likelier than its parent, so the result is connected.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from unspool.backends.step import Floats, Ints
from unspool.decoding.speculative.controller import DraftShape
from unspool.engine.request import DraftTree


@dataclass(slots=True, eq=False)
class DraftNode:
    """A drafted token; the root (parent None) is the last token of the text."""

    token: int
    parent: DraftNode | None = None
    depth: int = 0
    score: float = 0.0  # log-probability of the path
    state: Any = field(default=None, repr=False)  # the head's state after this token


class HeadContext(Protocol):
    """The state of a head for one text: the positions it has read."""

    def __len__(self) -> int: ...

    def read(self, positions: Ints, vectors: Floats, following: Sequence[int]) -> None:
        """Read positions: the model's hidden states [layers, n, width], and each next token."""

    def truncate(self, count: int) -> None:
        """Keep only the first `count` positions."""

    def fork(self, count: int) -> HeadContext:
        """Return the context of another text that shares the first `count` positions."""

    def expand(self, nodes: list[DraftNode], tokens: Sequence[int]) -> Floats:
        """Logits of the token after each node; sets the nodes' states."""


class DraftingHead(Protocol):
    """A drafting head with its weights, for any number of texts."""

    name: str
    layers: tuple[int, ...]
    ids: Ints  # the token of each logit

    def context(self) -> HeadContext: ...


def build_draft(
    context: HeadContext, tokens: Sequence[int], ids: Ints, shape: DraftShape, temperature: float
) -> DraftTree | list[int]:
    """Build a draft of this shape after these tokens."""
    if shape.width == 1:
        chain = getattr(context, "chain", None)  # a head may draft a whole chain in one run
        if chain is None:
            guesses = _chain(context, tokens, ids, shape.levels, temperature)
        else:
            guesses = chain(tokens, shape.levels, temperature)
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
    kept_tokens, score = list[int](), 0.0
    for token, logprob in guesses:
        score += logprob
        if min_probability and score < math.log(min_probability):
            break
        kept_tokens.append(token)
    return kept_tokens


def _top_logprobs(logits: Floats, count: int, temperature: float) -> list[tuple[int, float]]:
    """The likeliest indices with their log-probabilities."""
    most = float(logits.max())
    near = np.flatnonzero(logits > most - 8 * temperature)  # the others do not matter, even summed
    scaled = (logits[near] - most) / temperature
    total = float(np.log(np.exp(scaled).sum()))
    order = np.argsort(-scaled, kind="stable")[:count]
    return [(int(near[place]), float(scaled[place]) - total) for place in order]


def last_tokens(node: DraftNode, tokens: Sequence[int], count: int) -> list[int]:
    """The last `count` tokens up to a node, most recent first; short texts repeat their first
    token."""
    recent: list[int] = []
    current: DraftNode | None = node
    while current is not None and current.parent is not None:
        recent.append(current.token)
        current = current.parent
    back = 1
    while len(recent) < count:
        recent.append(int(tokens[max(-back, -len(tokens))]))
        back += 1
    return recent[:count]
