"""Diverse verifier tree search (Beeching et al. 2024): subtrees that know nothing of each other.

Each subtree is a greedy search: its text is continued in several ways by one piece, and the one
that the judge likes best goes on. Where a beam search ends up with texts that all begin alike, the
subtrees stay different. In the end the best of their texts wins.
"""

from __future__ import annotations

from unspool.decoding.search_tree import Node
from unspool.decoding.think.policies.pieces import Pieces, check_partial
from unspool.decoding.think.search import Moves, Search
from unspool.decoding.written import whole


def dvts(
    search: Search, *, subtrees: int = 4, width: int = 4, step: str = "line", tokens: int = 64
) -> Moves[None]:
    """So many subtrees, each continuing its text `width` times by one piece: a `step` (sentence,
    line, paragraph, tokens) of at most so many tokens."""
    check_partial(search, "dvts")
    pieces, width = Pieces(search, step, tokens), whole("width", width)
    going = [search.root] * whole("subtrees", subtrees)  # the text of each
    ended, stuck, grown = list[Node](), list[Node](), list[Node]()
    while going:
        # Equal texts are not made one: that would tie the subtrees together at their root.
        grown = yield from pieces.grow(going, width, distinct=False)
        yield from search.judge(grown)
        chosen: list[Node] = []
        for number, text in enumerate(going):
            mine = grown[number * width : (number + 1) * width]
            best = search.ranked(mine)[:1]
            chosen += best
            if not best and (text.parent or not mine):
                stuck.append(text)  # the judge knows no more, or the budget did not reach it
        yield from search.prune([node for node in grown if node not in chosen])
        ended += [node for node in chosen if not search.left(node)]
        going = [node for node in chosen if search.left(node)]
    ended += yield from pieces.finish(stuck)
    yield from search.win(ended or grown)
