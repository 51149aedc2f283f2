"""Early restarts: sample several openings, keep the best and only finish that one.

The first words decide much of a text: k openings of a few tokens are cheaper than k whole texts.
"""

from __future__ import annotations

from unspool.decoding.think.policies.pieces import Pieces, check_partial
from unspool.decoding.think.search import Moves, Search
from unspool.decoding.written import check_int


def restarts(search: Search, *, k: int = 8, tokens: int = 24, keep: int = 1) -> Moves[None]:
    """Sample `k` openings of `tokens` tokens and finish the best `keep` of them."""
    check_partial(search, "restarts")
    pieces, keep = Pieces(search, "tokens", tokens), check_int("keep", keep)
    openings = yield from pieces.grow([search.root], check_int("k", k))
    yield from search.score(openings)
    survivors = search.rank(openings)[:keep]
    yield from search.prune([node for node in openings if node not in survivors])
    texts = yield from pieces.finish(survivors if openings else [search.root])
    yield from search.select_best(texts or openings)
