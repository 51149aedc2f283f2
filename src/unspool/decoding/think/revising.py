"""One pass over a finished text: doubtful words are replaced where another fits both sides better.

The same idea as `lm.edit`, made so that its price is known beforehand: words that are a single
token, other single tokens for them, and a few tokens behind to judge them by. It goes from the end
of the text to its beginning, so that what stands before a word is always computed already.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from unspool.decoding.edit.doubt import causal_surprise
from unspool.decoding.fill.ranking import scored
from unspool.decoding.search_tree import Node
from unspool.decoding.think.search import Moves, Search
from unspool.engine.steps import Score, Step, TokenScore

_WORD = re.compile(r" \w+")
_CANDIDATES = 6  # words that are compared, the one that stands there among them
_REACH = 16  # tokens, the word among them, by which they are
_SURE = 0.9  # how much likelier than all others together a word must be to replace another
_CERTAIN = 0.5  # nats of doubt below which nobody looks at a word
PRICE = 2 + _CANDIDATES * _REACH  # tokens for one word, at the most


def revised(search: Search, node: Node, places: int) -> Moves[Node]:
    """The text with at most so many of its most doubtful words looked at."""
    tokens = node.generation.tokens
    changed = False
    for place in sorted(doubtful_words(node.generation.steps)[:places], reverse=True):
        if search.budget.room < PRICE + len(tokens):
            break
        better = _better(search, node, tokens, place)
        if better is not None:
            tokens[place], changed = better, True
    if not changed:
        return node
    assert node.parent is not None
    (made,) = yield from search.put([(node.parent, tokens)])
    yield from search.prune([node])
    return made


def doubtful_words(steps: Sequence[Step]) -> list[int]:
    """Where words stand that are a single token and surprised the model, most doubtful first."""
    texts = [step.bytes.decode("utf-8", "replace") for step in steps]
    told = [TokenScore(s.token, "", s.logprob, s.rank, s.entropy) for s in steps]
    doubts = causal_surprise(Score(told), len(steps))
    words = [
        number
        for number, text in enumerate(texts[:-1])
        if _WORD.fullmatch(text) and not re.match(r"[\w'’-]", texts[number + 1])
    ]
    words = [number for number in words if doubts[number] >= _CERTAIN]
    return sorted(words, key=lambda number: -doubts[number])


def _better(search: Search, node: Node, tokens: list[int], place: int) -> int | None:
    """Another word for this place, if it is surely better."""
    request, lm = node.generation.request, search.lm
    lm = lm.adapted(request.adapter) if request.adapter else lm
    before = [*request.prompt, *tokens[:place]]
    search.budget.take("judged", PRICE)
    likely = lm.choices(before, 4 * _CANDIDATES)
    others = [c.token for c in likely if _WORD.fullmatch(c.text) and c.token != tokens[place]]
    words = [tokens[place], *others[: _CANDIDATES - 1]]
    behind = tokens[place + 1 : place + _REACH]
    rows = [[*before, word, *behind] for word in words]
    totals = [math.fsum(step.logprob for step in row) for row in scored(lm, rows, len(before))]
    search.budget.give_back("judged", PRICE - 2 - len(words) * len(behind))
    best = max(totals)
    share = 1 / math.fsum(math.exp(total - best) for total in totals)
    chosen = words[totals.index(best)]
    return chosen if chosen != tokens[place] and share >= _SURE else None
