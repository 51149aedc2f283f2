r"""Several samples of one prompt: all of them, the best one, or a majority vote.

    samples(lm, "Once upon a time", 5, seed=7)                    # five texts, one batch
    best_of(lm, "Once upon a time", 5).best                       # highest mean log-probability
    best_of(lm, prompt, 5, scorer=lambda g: -len(g.text)).best    # or by a scorer
    vote(lm, question, 9, extract=r"answer is (\d+)").answer      # self-consistency

The prompt is computed once. Sample i of a seed is the same text for any n.
"""

from __future__ import annotations

import reprlib
import secrets
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack, cast

from unspool.decoding.batch import run_all
from unspool.decoding.branches import (
    Prompt,
    Ranking,
    Scorer,
    check_int,
    prepare_generation,
    score_text,
)
from unspool.decoding.search.search import Search, run_moves
from unspool.decoding.search.think import think
from unspool.decoding.search.tree import SearchNode, SearchTree, TokenBudget
from unspool.decoding.search.verifiers import Extract, Verdict, VoteVerifier, tally
from unspool.engine.generation import Generation, Generations
from unspool.engine.request import Options
from unspool.errors import SettingsError, UnspoolError
from unspool.notebook import bar_html, escape_html, note_html, notebook_html, table_html
from unspool.session import Session


def samples(lm: Session, prompt: Prompt, n: int, **options: Unpack[Options]) -> Generations:
    """Generate `n` samples of a prompt in one batch; options as in `lm.generate`."""
    check_int("n", n)
    if options.get("seed") is None:
        options["seed"] = secrets.randbits(32)  # one seed for all; the sample index differs
    # Validate prompt and options once; the requests differ only in the sample index.
    draft = lm.prepare_generation(prompt, **options)
    limits = draft.request.limits
    numbered_limits = [
        replace(limits, sample=number) for number in range(limits.sample, limits.sample + n)
    ]
    texts = Generations(
        replace(draft, steps=[], request=replace(draft.request, limits=sample_limits))
        for sample_limits in numbered_limits
    )
    run_all(lm, texts, patient=False)
    return texts


def best_of(
    lm: Session, prompt: Prompt, n: int, *, scorer: Scorer | None = None, **options: Unpack[Options]
) -> Ranking:
    """Rank `n` samples by mean log-probability or by a scorer (higher is better), best first.

    The policy "best-of" of `lm.think` without a budget. Texts that the scorer fails on are left
    out; if it fails on all of them, that is an error.
    """
    thought = think(lm, prompt, policy="best-of", judge=scorer, budget=None, n=n, **options)
    ranked = sorted(
        (
            (node.score, node.generation)
            for node in thought.tree.root.children
            if node.score is not None
        ),
        key=lambda entry: -entry[0],
    )
    return Ranking(tuple(text for _, text in ranked), tuple(score for score, _ in ranked))


@dataclass(frozen=True, slots=True)
class Vote:
    """The result of a majority vote."""

    answer: Hashable | None  # None if no text had one
    winner: Generation | None  # the likeliest text with that answer
    counts: dict[Hashable, int]  # most votes first
    answers: tuple[Hashable | None, ...]  # per text
    generations: tuple[Generation, ...]  # all texts, in the order of their sample index

    def __repr__(self) -> str:
        votes = self.counts.get(self.answer, 0)
        answer = reprlib.repr(self.answer)
        return f"<Vote {answer}: {votes} of {len(self.answers)}, {len(self.counts)} answers>"

    def _repr_html_(self) -> str:
        most = max(self.counts.values(), default=0)
        rows = [
            (escape_html(str(answer)), bar_html(votes, most) + f" {votes}")
            for answer, votes in self.counts.items()
        ]
        return notebook_html(
            table_html(("answer", "votes"), rows), note_html(f"of {len(self.answers)} texts")
        )


class _Votes(VoteVerifier):
    """Votes in which a text without an answer loses, and does not fail."""

    def score(self, texts: Sequence[Generation]) -> list[Verdict]:
        return [replace(verdict, score=verdict.score or 0.0) for verdict in super().score(texts)]


def vote(
    lm: Session, prompt: Prompt, n: int, *, extract: Extract, **options: Unpack[Options]
) -> Vote:
    """Majority vote over the answers of `n` samples (self-consistency; Wang et al. 2022).

    The policy "vote" of `lm.think` without a budget. `extract` finds a text's answer: a function of
    the `Generation` (None: no answer), or a pattern, whose last match counts (its first group, if
    any). Ties go to the answer with the likeliest text.
    """
    judge = _Votes(extract)
    thought = think(lm, prompt, policy="vote", judge=judge, budget=None, n=n, **options)
    nodes = thought.tree.root.children
    texts, answers = tuple(n.generation for n in nodes), tuple(n.answer for n in nodes)
    counts = {answer: int(votes) for answer, votes in tally(texts, answers).items()}
    return Vote(thought.answer, thought.best if counts else None, counts, answers, texts)


# -- Tree search: continue texts in several ways, score, keep the best, repeat


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
