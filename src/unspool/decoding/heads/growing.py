"""From a head's logits to a draft: the likeliest token again and again, or a small tree.

A chain ends where it is no longer likely enough to be worth checking.

A tree grows level by level: at each, the likeliest nodes so far are asked what follows them, all in
one run of the head. Of all nodes found the likeliest are kept, by the product of the probabilities
on the way to each; a node is never likelier than the one it stands behind, so they hang together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from unspool.backends.step import Floats, Ints
from unspool.engine.request import DraftTree


@dataclass(slots=True, eq=False)
class Node:
    """A token that may come, behind another node or (parent None) the last token of the text."""

    token: int
    parent: Node | None = None
    depth: int = 0
    score: float = 0.0  # log-probability of all guesses up to this one
    state: Any = field(default=None, repr=False)  # what the head made of it


class Context(Protocol):
    """One text as a head sees it: what it has read, and what it says comes next."""

    def __len__(self) -> int: ...

    def read(self, positions: Ints, vectors: Floats, following: Sequence[int]) -> None:
        """Take in positions: the model's vectors [layers, n, width], the token behind each."""

    def cut(self, count: int) -> None:
        """Keep only the first `count` of the positions that were read."""

    def fork(self, count: int) -> Context:
        """Another text that begins alike: with the first `count` positions that were read here."""

    def expand(self, nodes: list[Node], tokens: Sequence[int]) -> Floats:
        """Logits of what follows each node, where the text has these tokens; sets their states."""


class Head(Protocol):
    """A head with its weights, for any number of texts."""

    name: str
    layers: tuple[int, ...]
    ids: Ints  # the tokens that its logits are for

    def context(self) -> Context: ...


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a draft is: a chain where `width` is 1."""

    nodes: int  # in all
    width: int = 1  # nodes that are asked at each level
    depth: int = 0  # levels; 0: as many as nodes
    sure: float = 0.0  # a chain ends where all its guesses together are less likely than this

    @property
    def levels(self) -> int:
        return self.depth or self.nodes

    def within(self, levels: int) -> Shape:
        """The same, with so many levels at the most."""
        if self.width == 1:
            return Shape(min(self.nodes, levels), sure=self.sure)
        return Shape(self.nodes, self.width, min(self.levels, levels))


def grow(
    context: Context, tokens: Sequence[int], ids: Ints, shape: Shape, temperature: float
) -> DraftTree | list[int]:
    """A draft of this shape behind these tokens."""
    if shape.width == 1:
        chain = getattr(context, "chain", None)  # a head may guess a whole chain in one run
        if chain is None:
            guesses = _chain(context, tokens, ids, shape.levels, temperature)
        else:
            guesses = chain(tokens, shape.levels, temperature)
        return _sure_enough(guesses, shape.sure)
    level, every = [Node(int(tokens[-1]))], list[Node]()
    for depth in range(1, shape.levels + 1):
        logits = context.expand(level, tokens)
        found = [
            Node(int(ids[place]), node, depth, node.score + chance)
            for node, row in zip(level, logits, strict=True)
            for place, chance in _best(row, shape.width, temperature)
        ]
        found.sort(key=lambda node: -node.score)
        every += found
        level = found[: shape.width]
    every.sort(key=lambda node: -node.score)  # stable: a node stays behind its parent
    kept = every[: shape.nodes]
    number: dict[Node | None, int] = {node: place for place, node in enumerate(kept)}
    parents = [number.get(node.parent, -1) for node in kept]
    return DraftTree([node.token for node in kept], parents)


def _chain(
    context: Context, tokens: Sequence[int], ids: Ints, levels: int, temperature: float
) -> Iterator[tuple[int, float]]:
    """The likeliest token again and again; nothing is computed before it is asked for."""
    node = Node(int(tokens[-1]))
    for depth in range(1, levels + 1):
        (logits,) = context.expand([node], tokens)
        ((place, chance),) = _best(logits, 1, temperature)
        node = Node(int(ids[place]), node, depth)
        yield node.token, chance


def _sure_enough(guesses: Iterator[tuple[int, float]], sure: float) -> list[int]:
    """Up to where all of them together are less likely than this."""
    found, score = list[int](), 0.0
    for token, chance in guesses:
        score += chance
        if sure and score < math.log(sure):
            break
        found.append(token)
    return found


def _best(logits: Floats, count: int, temperature: float) -> list[tuple[int, float]]:
    """The likeliest places, with log-probabilities."""
    most = float(logits.max())
    near = np.flatnonzero(logits > most - 8 * temperature)  # of the others not even the sum matters
    scaled = (logits[near] - most) / temperature
    total = float(np.log(np.exp(scaled).sum()))
    order = np.argsort(-scaled, kind="stable")[:count]
    return [(int(near[place]), float(scaled[place]) - total) for place in order]


def last_tokens(node: Node, tokens: Sequence[int], count: int) -> list[int]:
    """The last tokens up to a node, itself first; the first of a text that has too few stands for
    those that it lacks."""
    found: list[int] = []
    here: Node | None = node
    while here is not None and here.parent is not None:
        found.append(here.token)
        here = here.parent
    back = 1
    while len(found) < count:
        found.append(int(tokens[max(-back, -len(tokens))]))
        back += 1
    return found[:count]
