"""Tree search: continue texts in several ways, score, keep the best, repeat.

    tree = tree_search(lm, "Roses are red,", width=4, tokens=6, keep=2, depth=3, seed=1)
    print(tree)                    # the tree with its scores, pruned branches included
    tree.best.text                 # the best leaf, a Generation

Unlike beam search it works on pieces of text, which a caller's function may propose (`expand`) and
score (`scorer`). `lm.think` is the same mechanism with a budget, other policies and verifiers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack, cast

from unspool.decoding.search_tree import SearchNode, SearchTree
from unspool.decoding.think.budget import TokenBudget
from unspool.decoding.think.search import Search, run_moves
from unspool.decoding.written import Prompt, Scorer, check_int, prepare_generation, score_text
from unspool.engine.generation import Generation
from unspool.engine.options import Options
from unspool.errors import SettingsError, UnspoolError
from unspool.session import Session

Expander = Callable[[Generation], Iterable[str | Sequence[int]]]
"""Proposes continuations of a text: strings or token ids."""


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

    width     number of continuations sampled per kept text.
    tokens    length of a continuation in tokens.
    keep      number of texts kept per level; the others are pruned.
    scorer    scores the text up to a node (a `Generation`), higher is better; default: the mean
              log-probability of its tokens.
    expand    proposes continuations instead of `width` samples.

    Other options as in `lm.stream` (seed, temperature, stop, ...). The best leaf is the best kept
    text that ended by itself or is on the last level.
    """
    for name, value in (("width", width), ("tokens", tokens), ("keep", keep), ("depth", depth)):
        check_int(name, value)
    if options.get("max_tokens") is not None:
        raise SettingsError(
            "a search writes tokens * depth tokens; set tokens and depth, not max_tokens"
        )
    settings = cast(dict[str, Any], {**options, "max_tokens": tokens * depth})
    with Search(lm, prepare_generation(lm, prompt, **settings), None, TokenBudget()) as search:
        level, leaves = [search.root], list[SearchNode]()
        for _ in range(depth):
            if expand is not None:
                pieces = [(node, piece) for node in level for piece in _proposed(expand, node)]
                grown = run_moves(search.append(pieces, distinct=True))
            else:
                grown = run_moves(search.sample(level, width, tokens, distinct=True))
            # Nodes without proposals are leaves.
            leaves += [node for node in level if not node.children]
            for child in grown:
                child.score = score_text(scorer, child.generation)
            grown.sort(key=lambda node: -(node.score or 0.0))
            run_moves(search.prune(grown[keep:]))
            leaves += [node for node in grown[:keep] if node.finished]
            level = [node for node in grown[:keep] if not node.finished]
            if not level:
                break
        return SearchTree(search.root, max(leaves + level, key=_value))


def _value(node: SearchNode) -> float:
    return float("-inf") if node.score is None else node.score


def _proposed(expand: Expander, node: SearchNode) -> list[str | Sequence[int]]:
    try:
        return list(expand(node.generation))
    except Exception as error:
        raise UnspoolError(f"expand raised {type(error).__name__}: {error}") from error
