"""Early restarts: begin several times, keep the best beginning, and go on with that one alone.

The first words decide much of a text and cost little: k openings of a few tokens are cheaper than
k whole texts.
"""

from __future__ import annotations

from unspool.decoding.think.policies.pieces import Pieces, check_partial
from unspool.decoding.think.search import Moves, Search
from unspool.decoding.written import whole


def restarts(search: Search, *, k: int = 8, tokens: int = 24, keep: int = 1) -> Moves[None]:
    """`k` openings of so many tokens; the best `keep` of them are written to their end."""
    check_partial(search, "restarts")
    pieces, keep = Pieces(search, "tokens", tokens), whole("keep", keep)
    openings = yield from pieces.grow([search.root], whole("k", k))
    yield from search.judge(openings)
    kept = search.ranked(openings)[:keep]
    yield from search.prune([node for node in openings if node not in kept])
    texts = yield from pieces.finish(kept if openings else [search.root])
    yield from search.win(texts or openings)
