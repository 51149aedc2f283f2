"""Step-wise beam search (Snell et al. 2024): texts grow piece by piece, and after each piece only
the best of all live on."""

from __future__ import annotations

from unspool.decoding.search_tree import Node
from unspool.decoding.think.policies.pieces import Pieces, check_partial
from unspool.decoding.think.search import Moves, Search
from unspool.decoding.written import whole


def beam(
    search: Search, *, keep: int = 4, width: int = 4, step: str = "line", tokens: int = 64
) -> Moves[None]:
    """`keep` texts live on after each piece, and each is continued `width` times. A piece is a
    `step` (sentence, line, paragraph, tokens) of at most so many tokens."""
    check_partial(search, "beam")
    pieces, keep, width = Pieces(search, step, tokens), whole("keep", keep), whole("width", width)
    level, ended, grown = [search.root], list[Node](), list[Node]()
    while level and len(ended) < keep:
        # The first level has one parent, and is as wide as the others.
        grown = yield from pieces.grow(level, width if level[0].parent else width * keep)
        yield from search.judge(grown)
        kept = search.ranked(grown)[:keep]
        yield from search.prune([node for node in grown if node not in kept])
        if not kept:  # the budget is spent, or the judge knows no more
            ended += yield from pieces.finish(level if level[0].parent or not grown else [])
            break
        ended += [node for node in kept if not search.left(node)]
        level = [node for node in kept if search.left(node)]
    yield from search.win(ended or grown)
