"""Diverse verifier tree search (Beeching et al. 2024): independent greedy subtrees.

Each subtree continues its text in several ways by one piece and keeps the one with the best score.
Beam search tends to end with texts that share most of their prefix; subtrees stay different. The
best text of all subtrees wins.
"""

from __future__ import annotations

from unspool.decoding.search_tree import SearchNode
from unspool.decoding.think.policies.pieces import Pieces, check_partial
from unspool.decoding.think.search import Moves, Search
from unspool.decoding.written import check_int


def dvts(
    search: Search, *, subtrees: int = 4, width: int = 4, step: str = "line", tokens: int = 64
) -> Moves[None]:
    """Run `subtrees` subtrees, each continuing its text `width` times by one piece: a `step`
    (sentence, line, paragraph, tokens) of at most `tokens` tokens."""
    check_partial(search, "dvts")
    pieces, width = Pieces(search, step, tokens), check_int("width", width)
    active = [search.root] * check_int("subtrees", subtrees)  # current text of each subtree
    ended, stuck, grown = list[SearchNode](), list[SearchNode](), list[SearchNode]()
    while active:
        # Keep duplicates: merging equal texts would join the subtrees.
        grown = yield from pieces.grow(active, width, distinct=False)
        yield from search.score(grown)
        survivors: list[SearchNode] = []
        for number, text in enumerate(active):
            children = grown[number * width : (number + 1) * width]
            best = search.rank(children)[:1]
            survivors += best
            if not best and (text.parent or not children):
                stuck.append(text)  # nothing could be scored, or the budget ran out
        yield from search.prune([node for node in grown if node not in survivors])
        ended += [node for node in survivors if not search.remaining(node)]
        active = [node for node in survivors if search.remaining(node)]
    ended += yield from pieces.finish(stuck)
    yield from search.select_best(ended or grown)
