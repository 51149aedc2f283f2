"""Best of n: write n whole texts, judge them, keep the best."""

from __future__ import annotations

from unspool.decoding.think.search import Moves, Search
from unspool.decoding.written import whole


def best_of(search: Search, *, n: int = 8) -> Moves[None]:
    """`n` texts, as many of them as the budget has room for."""
    texts = yield from search.sample([search.root], whole("n", n))
    yield from search.judge(texts)
    yield from search.win(texts)
