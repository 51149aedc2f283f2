"""The pieces by which some policies go: sentences, lines, paragraphs, or so many tokens."""

from __future__ import annotations

from collections.abc import Sequence

from unspool.decoding.search_tree import Node
from unspool.decoding.think.search import Moves, Search
from unspool.decoding.written import whole
from unspool.errors import SettingsError

_ENDS = {"sentence": (".", "!", "?", "\n"), "line": ("\n",), "paragraph": ("\n\n",), "tokens": ()}


class Pieces:
    """How far a text is continued before it is judged again."""

    def __init__(self, search: Search, step: str, tokens: int) -> None:
        if step not in _ENDS:
            raise SettingsError(f"step is {step!r}; it may be {', '.join(_ENDS)}")
        self._search, self._until, self._tokens = search, _ENDS[step], whole("tokens", tokens)
        self._half = (search.budget.room - len(search.root.generation.prompt)) // 2

    def grow(
        self, nodes: Sequence[Node], width: int, *, distinct: bool = True
    ) -> Moves[list[Node]]:
        """Each text continued by one piece, `width` times; what it takes to bring one of them to
        its end is not spent (but at most half of the budget is kept for that), so that in the end
        there is a whole text."""
        search = self._search
        spare = min(max(map(search.to_the_end, nodes)), self._half)
        return search.sample(
            nodes, width, self._tokens, until=self._until, distinct=distinct, spare=spare
        )

    def finish(self, nodes: Sequence[Node]) -> Moves[list[Node]]:
        """With what is left of the budget, texts are written to their end, the best first. Those
        for which nothing is left stay as they are."""
        search = self._search
        going = search.ranked([node for node in nodes if search.left(node)])
        texts = yield from search.sample(going or [n for n in nodes if n is search.root][:1])
        yield from search.judge(texts)
        went_on = {text.parent for text in texts if text.score is not None}
        return [node for node in [*nodes, *texts] if node.parent and node not in went_on]


def check_partial(search: Search, policy: str) -> None:
    """Such a policy asks its judge about texts that are not finished."""
    if not search.judges_pieces:
        raise SettingsError(
            f"the policy {policy} asks its judge about unfinished texts, and this one judges only "
            "whole ones; take best-of, vote or mcts, which write every text to its end"
        )


def tokens_before(node: Node, marker: str, since: int) -> int | None:
    """How many tokens of a text stand wholly before it says this, or before the end token; only
    what comes behind the first `since` tokens is looked at. None if it says neither."""
    pieces = [step.bytes for step in node.generation.steps[since:]]
    at = b"".join(pieces).find(marker.encode())
    if at < 0:
        return since + len(pieces) - 1 if node.finished else None
    length, seen = 0, 0
    while seen + len(pieces[length]) <= at:
        seen += len(pieces[length])
        length += 1
    return since + length
