"""Tree search: continue in several ways, score, keep the best, and again.

    found = tree_search(lm, "Roses are red,", width=4, tokens=6, keep=2, depth=3, seed=1)
    print(found)                   # the whole tree with its scores, pruned branches too
    found.best.text                # the best leaf, a Generation

Where beam search goes token by token and asks only the model, this goes by pieces of text, and
anybody may propose them (`expand`) and judge them (`scorer`): a reward model, a test, a person.
The same with a budget, other policies and judges is `lm.think`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack, cast

from unspool.decoding.search_tree import Node, SearchTree
from unspool.decoding.think.budget import Budget
from unspool.decoding.think.search import Search, result_of
from unspool.decoding.written import Prompt, Scorer, blank, judged, whole
from unspool.engine.generation import Generation
from unspool.engine.options import Options
from unspool.errors import SettingsError, UnspoolError
from unspool.session import Session

Expander = Callable[[Generation], Iterable[str | Sequence[int]]]
"""Proposes what may follow a text: pieces of text, or token ids."""


def tree_search(
    lm: Session,
    prompt: Prompt,
    *,
    width: int = 4,
    tokens: int = 16,
    keep: int = 2,
    depth: int = 4,
    scorer: Scorer | None = None,
    expand: Expander | None = None,
    **options: Unpack[Options],
) -> SearchTree:
    """Search `depth` levels deep for the continuation with the highest score.

    width     into how many continuations each kept text is sampled,
    tokens    of how many tokens each.
    keep      how many of a level's texts are continued; the others are pruned.
    scorer    judges the text up to a node (a `Generation`), higher is better; without one, the
              mean log-probability of its tokens does.
    expand    proposes the continuations in place of `width` samples.

    The rest as in `lm.stream` (seed, temperature, stop, ...). The best leaf is the best of those
    that were kept and either ended by themselves or stand on the last level.
    """
    for name, value in (("width", width), ("tokens", tokens), ("keep", keep), ("depth", depth)):
        whole(name, value)
    if options.get("max_tokens") is not None:
        raise SettingsError("a search writes tokens * depth tokens; give these, not max_tokens")
    rest = cast(dict[str, Any], {**options, "max_tokens": tokens * depth})
    with Search(lm, blank(lm, prompt, **rest), None, Budget()) as search:
        level, leaves = [search.root], list[Node]()
        for _ in range(depth):
            if expand is not None:
                pieces = [(node, piece) for node in level for piece in _proposed(expand, node)]
                grown = result_of(search.put(pieces, distinct=True))
            else:
                grown = result_of(search.sample(level, width, tokens, distinct=True))
            # Where nothing was proposed, this is as far as it goes.
            leaves += [node for node in level if not node.children]
            for child in grown:
                child.score = judged(scorer, child.generation)
            grown.sort(key=lambda node: -(node.score or 0.0))
            result_of(search.prune(grown[keep:]))
            leaves += [node for node in grown[:keep] if node.finished]
            level = [node for node in grown[:keep] if not node.finished]
            if not level:
                break
        return SearchTree(search.root, max(leaves + level, key=_value))


def _value(node: Node) -> float:
    return float("-inf") if node.score is None else node.score


def _proposed(expand: Expander, node: Node) -> list[str | Sequence[int]]:
    try:
        return list(expand(node.generation))
    except Exception as error:
        raise UnspoolError(f"expand raised {type(error).__name__}: {error}") from error
