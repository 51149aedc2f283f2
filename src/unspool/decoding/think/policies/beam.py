"""Step-wise beam search (Snell et al. 2024): extend texts piece by piece and keep the best after
each piece."""

from __future__ import annotations

from unspool.decoding.search_tree import SearchNode
from unspool.decoding.think.policies.pieces import Pieces, check_partial
from unspool.decoding.think.search import Moves, Search
from unspool.decoding.written import check_int


def beam(
    search: Search, *, keep: int = 4, width: int = 4, step: str = "line", tokens: int = 64
) -> Moves[None]:
    """Keep `keep` texts after each piece and continue each `width` times. A piece is a `step`
    (sentence, line, paragraph, tokens) of at most `tokens` tokens."""
    check_partial(search, "beam")
    pieces, keep, width = (
        Pieces(search, step, tokens),
        check_int("keep", keep),
        check_int("width", width),
    )
    level, ended, grown = [search.root], list[SearchNode](), list[SearchNode]()
    while level and len(ended) < keep:
        # The first level has one parent, so widen it to the size of later levels.
        grown = yield from pieces.grow(level, width if level[0].parent else width * keep)
        yield from search.score(grown)
        survivors = search.rank(grown)[:keep]
        yield from search.prune([node for node in grown if node not in survivors])
        if not survivors:  # the budget is spent, or nothing could be scored
            ended += yield from pieces.finish(level if level[0].parent or not grown else [])
            break
        ended += [node for node in survivors if not search.remaining(node)]
        level = [node for node in survivors if search.remaining(node)]
    yield from search.select_best(ended or grown)
