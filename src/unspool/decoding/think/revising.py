"""Revise a finished text: replace doubtful words where another fits both sides better.

The same idea as `lm.edit` with a cost that is known in advance: only single-token words, replaced
by single tokens, scored on the next few tokens. It goes from the end to the start, so the
prefix of each word is always in the cache.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from unspool.decoding.edit.doubt import causal_surprise
from unspool.decoding.fill.ranking import score_rows
from unspool.decoding.search_tree import SearchNode
from unspool.decoding.think.search import Moves, Search
from unspool.engine.steps import Score, Step, TokenScore

_WORD = re.compile(r" \w+")
_CANDIDATES = 6  # words that are compared, the current one included
_REACH = 16  # tokens that are scored, the word included
_MIN_SHARE = 0.9  # probability among the candidates that a replacement needs
_MIN_DOUBT = 0.5  # nats of doubt below which a word is skipped
WORD_COST = 2 + _CANDIDATES * _REACH  # upper bound of the tokens computed for one word


def revise(search: Search, node: SearchNode, max_words: int) -> Moves[SearchNode]:
    """Revise at most `max_words` of the most doubtful words."""
    tokens = node.generation.tokens
    changed = False
    for index in sorted(doubtful_words(node.generation.steps)[:max_words], reverse=True):
        if search.budget.remaining < WORD_COST + len(tokens):
            break
        better = _better_word(search, node, tokens, index)
        if better is not None:
            tokens[index], changed = better, True
    if not changed:
        return node
    assert node.parent is not None
    (revision,) = yield from search.append([(node.parent, tokens)])
    yield from search.prune([node])
    return revision


def doubtful_words(steps: Sequence[Step]) -> list[int]:
    """Indices of single-token words that surprised the model, most doubtful first."""
    texts = [step.bytes.decode("utf-8", "replace") for step in steps]
    scores = [TokenScore(s.token, "", s.logprob, s.rank, s.entropy) for s in steps]
    doubts = causal_surprise(Score(scores), len(steps))
    words = [
        number
        for number, text in enumerate(texts[:-1])
        if _WORD.fullmatch(text) and not re.match(r"[\w'’-]", texts[number + 1])
    ]
    words = [number for number in words if doubts[number] >= _MIN_DOUBT]
    return sorted(words, key=lambda number: -doubts[number])


def _better_word(search: Search, node: SearchNode, tokens: list[int], index: int) -> int | None:
    """A better word for this position, if one is clearly better."""
    request, lm = node.generation.request, search.lm
    lm = lm.adapted(request.adapter) if request.adapter else lm
    before = [*request.prompt, *tokens[:index]]
    search.budget.reserve("judged", WORD_COST)
    likely = lm.choices(before, 4 * _CANDIDATES)
    others = [c.token for c in likely if _WORD.fullmatch(c.text) and c.token != tokens[index]]
    words = [tokens[index], *others[: _CANDIDATES - 1]]
    suffix = tokens[index + 1 : index + _REACH]
    rows = [[*before, word, *suffix] for word in words]
    totals = [math.fsum(step.logprob for step in row) for row in score_rows(lm, rows, len(before))]
    search.budget.refund("judged", WORD_COST - 2 - len(words) * len(suffix))
    best = max(totals)
    share = 1 / math.fsum(math.exp(total - best) for total in totals)
    winner = words[totals.index(best)]
    return winner if winner != tokens[index] and share >= _MIN_SHARE else None
