"""Best of n: sample n texts, score them, keep the best."""

from __future__ import annotations

from unspool.decoding.think.search import Moves, Search
from unspool.decoding.written import check_int


def best_of(search: Search, *, n: int = 8) -> Moves[None]:
    """Sample up to `n` texts, as many as the budget allows."""
    texts = yield from search.sample([search.root], check_int("n", n))
    yield from search.score(texts)
    yield from search.select_best(texts)
