"""Pieces by which some policies extend texts: a sentence, line, paragraph or number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from unspool.decoding.search_tree import SearchNode
from unspool.decoding.think.search import Moves, Search
from unspool.decoding.written import check_int
from unspool.errors import SettingsError

_ENDS = {"sentence": (".", "!", "?", "\n"), "line": ("\n",), "paragraph": ("\n\n",), "tokens": ()}


class Pieces:
    """Extends texts piece by piece."""

    def __init__(self, search: Search, step: str, tokens: int) -> None:
        if step not in _ENDS:
            raise SettingsError(f"step must be one of {', '.join(_ENDS)}, got {step!r}")
        self._search, self._until, self._tokens = search, _ENDS[step], check_int("tokens", tokens)
        self._half = (search.budget.remaining - len(search.root.generation.prompt)) // 2

    def grow(
        self, nodes: Sequence[SearchNode], width: int, *, distinct: bool = True
    ) -> Moves[list[SearchNode]]:
        """Continue each text by one piece, `width` times. Keeps back enough budget (at most half of
        it) to finish one text, so that the search ends with a complete text."""
        search = self._search
        spare = min(max(map(search.cost_to_finish, nodes)), self._half)
        return search.sample(
            nodes, width, self._tokens, until=self._until, distinct=distinct, reserve=spare
        )

    def finish(self, nodes: Sequence[SearchNode]) -> Moves[list[SearchNode]]:
        """Finish texts with the remaining budget, best first; the others stay unfinished."""
        search = self._search
        ranked = search.rank([node for node in nodes if search.remaining(node)])
        texts = yield from search.sample(ranked or [n for n in nodes if n is search.root][:1])
        yield from search.score(texts)
        extended = {text.parent for text in texts if text.score is not None}
        return [node for node in [*nodes, *texts] if node.parent and node not in extended]


def check_partial(search: Search, policy: str) -> None:
    """Raise `SettingsError` if the verifier cannot score unfinished texts."""
    if not search.scores_partial:
        raise SettingsError(
            f"the policy {policy} scores unfinished texts, and this judge only scores finished "
            "ones; use best-of, vote or mcts, which finish every text"
        )


def tokens_before(node: SearchNode, marker: str, since: int) -> int | None:
    """Number of tokens that end before the first `marker`, or before the end token. Only searches
    after the first `since` tokens. None if the text has neither."""
    pieces = [step.bytes for step in node.generation.steps[since:]]
    marker_pos = b"".join(pieces).find(marker.encode())
    if marker_pos < 0:
        return since + len(pieces) - 1 if node.finished else None
    length, num_bytes = 0, 0
    while num_bytes + len(pieces[length]) <= marker_pos:
        num_bytes += len(pieces[length])
        length += 1
    return since + length
