"""No view of the whole: swapped sentences that pass unnoticed, and stories that contradict their
own beginning."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from unspool.costing.part import Example, Figure, Mark, Part, Series
from unspool.costing.plan import Plan
from unspool.costing.statistics import auc, bootstrap, said, share_bounds, share_figure
from unspool.costing.stories import Story, stories
from unspool.costing.writing import encoded, write
from unspool.decoding.fill.masked import framed, masked_model, text_logprobs
from unspool.language_model import LanguageModel
from unspool.session import Session
from unspool.train.judging.likelihood import likelihoods

_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z“\"])")
_FORMULA = (
    "For a text x and the same text x' with two sentences swapped: noticed = share of pairs with "
    "log p(x) > log p(x'), by chance 50 %; AUC = P(score(x) > score(y')) over all x and all y', "
    "score = mean log p a token. Stories: a fact is told, the model writes k tokens of its own, "
    "then the fact is asked for; contradiction = another value of the same kind is likelier than "
    "the one that was told."
)


@dataclass(frozen=True)
class Swap:
    """A text in sentences, and which two of them change places."""

    sentences: tuple[str, ...]
    first: int
    second: int

    @property
    def original(self) -> str:
        return " ".join(self.sentences)

    @property
    def swapped(self) -> str:
        return " ".join(self.order())

    @property
    def distance(self) -> int:
        return self.second - self.first

    def order(self) -> list[str]:
        """The sentences as they stand after the swap."""
        found = list(self.sentences)
        found[self.first], found[self.second] = found[self.second], found[self.first]
        return found


def swaps(texts: Sequence[str], count: int, distances: Sequence[int], seed: int) -> list[Swap]:
    """Passages of human text with two sentences to swap, each distance equally often.

    The first sentence of a passage stays: that texts do not begin like this is no view of the
    whole.
    """
    draw = random.Random(seed)
    lines = [_sentences(text) for text in texts]
    draw.shuffle(lines)
    found: list[Swap] = []
    while lines and len(found) < count:
        for own in lines:
            distance = distances[len(found) % len(distances)]
            passage = tuple(own[: distance + 3])  # one before the two, one behind them
            del own[: distance + 3]
            if len(passage) == distance + 3 and passage[1] != passage[1 + distance]:
                found.append(Swap(passage, 1, 1 + distance))
        lines = [own for own in lines if len(own) >= 4]
    return found[:count]


def _sentences(text: str) -> list[str]:
    """Those of a usual length, each on one line."""
    every = [one for part in text.split("\n\n") for one in _SENTENCE.split(part.strip())]
    return [" ".join(one.split()) for one in every if 30 <= len(one) <= 300]


def log_likelihoods(lm: Session, texts: Sequence[str], tell: Callable[[int], object]) -> list[Any]:
    """Of each text: the log-probability of its tokens, one by one."""
    room = lm.context
    ids = [encoded(lm, text)[:room] for text in texts]
    found = likelihoods(lm, [(own[:1], own[1:]) for own in ids], tell)
    return [np.array(one.logprobs) for one in found]


def masked_likelihoods(
    twin: Any, texts: Sequence[str], tell: Callable[[int], object], groups: int = 8
) -> list[Any]:
    """The same by a masked model: each token hidden in turn, an eighth of them at a time."""
    model = masked_model(twin)
    found = []
    for number, text in enumerate(texts):
        ids, before = framed(model.tokenizer, model.tokenizer.encode(text))
        places = range(before, before + len(model.tokenizer.encode(text)))
        own = np.zeros(len(places))
        for group in range(groups):
            hidden = list(places)[group::groups]
            if not hidden:
                continue
            row = [model.mask_id if at in set(hidden) else token for at, token in enumerate(ids)]
            told = text_logprobs(model, row, hidden)
            own[group::groups] = told[np.arange(len(hidden)), [ids[at] for at in hidden]]
        found.append(own)
        tell(number + 1)
    return found


def measure(lm: LanguageModel, plan: Plan) -> Part:
    distances = plan.pick((1, 2), (1, 2, 4))
    chosen = swaps(plan.texts, plan.pick(4, 36), distances, plan.seed)
    figures, series, example = _swapping(lm, plan, chosen, distances) if chosen else ([], [], None)
    told = stories(plan.seed)[: plan.pick(6, 48)]
    more, line = _telling(lm, plan, told)
    none = ["The texts have no passage of enough sentences: nothing was swapped."]
    return Part(
        "whole",
        "No view of the whole: are swapped sentences and contradictions noticed?",
        _FORMULA,
        [*figures, *more],
        [*series, line],
        example,
        [
            "The first and the last sentence of a passage are never swapped.",
            f"{len(told)} stories, of 48 in which every value of a kind is told equally often: a "
            "favourite word gains nothing.",
            *([] if chosen else none),
        ],
    )


def _swapping(
    lm: LanguageModel, plan: Plan, chosen: Sequence[Swap], distances: Sequence[int]
) -> tuple[list[Figure], list[Series], Example]:
    both = [one.original for one in chosen] + [one.swapped for one in chosen]
    scores = log_likelihoods(lm, both, lambda done: plan.tell(0.5 * done / len(both)))
    figures = _swap_figures(scores, len(chosen), "the model")
    if plan.twin is not None:
        by_twin = masked_likelihoods(
            plan.twin, both, lambda done: plan.tell(0.5 + 0.1 * done / len(both))
        )
        figures += _swap_figures(by_twin, len(chosen), "the masked twin")
    return figures, _by_distance(chosen, scores, distances), _swap_example(chosen, scores)


def _telling(lm: LanguageModel, plan: Plan, told: Sequence[Story]) -> tuple[list[Figure], Series]:
    """Stories are gone on with once, and asked after so many of those tokens."""
    lengths = [min(length, lm.context // 4) for length in plan.pick((0, 24), (0, 24, 72))]
    prompts = [encoded(lm, story.beginning) for story in told]
    own = write(lm, prompts, max_tokens=lengths[-1], seed=plan.seed, temperature=0.7).texts
    wrong = []
    for number, length in enumerate(lengths):
        texts = zip(prompts, own, strict=True)
        wrong.append(contradictions(lm, told, [[*p, *text.tokens[:length]] for p, text in texts]))
        plan.tell(0.6 + 0.4 * (number + 1) / len(lengths))
    why = f"of {len(told[0].values)} values; by chance {1 - 1 / len(told[0].values):.0%}"
    figures = [
        share_figure(
            f"contradictions after {length} own tokens", sum(found), len(found), why=why,
            better="lower",
        )
        for length, found in zip(lengths, wrong, strict=True)
    ]  # fmt: skip
    return figures, _by_length(lengths, wrong)


def _swap_figures(scores: Sequence[Any], count: int, who: str) -> list[Figure]:
    """How often the whole text is likelier, and how well single texts can be told apart."""
    whole = np.array([[float(one.sum()), float(one.mean())] for one in scores])
    noticed = int((whole[:count, 0] > whole[count:, 0]).sum())
    pairs = np.stack([whole[:count, 1], whole[count:, 1]], 1)
    low, high = bootstrap(pairs, lambda rows: auc(rows[:, 0], rows[:, 1]), draws=500)
    value = auc(pairs[:, 0], pairs[:, 1])
    why = "two passages apart, one of them swapped: which?"
    return [
        share_figure(
            f"swap noticed by {who}", noticed, count, why="by chance 50 %", better="higher"
        ),
        Figure(
            f"AUC of {who}", value, "", low, high, count, said(why, "bootstrap over passages"),
            "higher",
        ),
    ]  # fmt: skip


def _by_distance(
    chosen: Sequence[Swap], scores: Sequence[Any], distances: Sequence[int]
) -> list[Series]:
    better = [
        float(before.sum()) > float(after.sum())
        for before, after in zip(scores[: len(chosen)], scores[len(chosen) :], strict=True)
    ]
    line = partial(
        Series, x_label="sentences apart", y_label="swap noticed", plot="Swaps by distance"
    )
    bounds: list[list[float]] = [[], [], []]
    for distance in distances:
        own = [one for one, swap in zip(better, chosen, strict=True) if swap.distance == distance]
        for column, value in zip(bounds, share_bounds([sum(own)], max(1, len(own))), strict=True):
            column += value
    flat = [0.5] * len(distances)
    return [line("noticed", distances, *bounds), line("chance", distances, flat, kind="reference")]


def _swap_example(chosen: Sequence[Swap], scores: Sequence[Any]) -> Example:
    """A swap that the model took for the better text, if there is one."""
    gains = [
        float(after.sum() - before.sum())
        for before, after in zip(scores[: len(chosen)], scores[len(chosen) :], strict=True)
    ]
    number = int(np.argmax(gains))
    swap, gain = chosen[number], gains[number]
    order, at, marks = swap.order(), 0, []
    for place, sentence in enumerate(order):
        if place in (swap.first, swap.second):
            was = swap.second if place == swap.first else swap.first
            marks.append(Mark(at, at + len(sentence), "swapped", f"was sentence {was + 1}"))
        at += len(sentence) + 1
    if gain > 0:
        caption = f"Two sentences have changed places, and the model finds it {gain:.1f} nats "
        caption += "likelier so."
    else:
        caption = f"Two sentences have changed places: {-gain:.1f} nats less likely, the least of "
        caption += "all swaps; the model noticed every one."
    return Example(swap.swapped, marks, caption)


# -- stories ------------------------------------------------------------------------------------


def contradictions(
    lm: LanguageModel, told: Sequence[Story], begun: Sequence[Sequence[int]]
) -> list[bool]:
    """Of each story, as far as it was written, whether the model contradicts what was told."""
    pairs = []
    for story, ids in zip(told, begun, strict=True):
        # A text that the model had ended goes on: all but the first token that ends texts.
        context = [*ids[:1], *(token for token in ids[1:] if token not in lm.end_ids)]
        context += lm.tokenizer.encode(story.question)
        pairs += [(context, lm.tokenizer.encode(f" {value}")) for value in story.values]
    found = iter(likelihoods(lm, pairs))
    wrong = []
    for story in told:
        own = [next(found).total for _ in story.values]
        wrong.append(story.values[int(np.argmax(own))] != story.told)
    return wrong


def _by_length(lengths: Sequence[int], wrong: Sequence[Sequence[bool]]) -> Series:
    return Series(
        "contradictions",
        lengths,
        *share_bounds([sum(own) for own in wrong], len(wrong[0])),
        x_label="own tokens between fact and question",
        y_label="contradictions",
        plot="Stories against their own beginning",
    )
