"""Global coherence: are swapped sentences noticed, and do stories contradict their beginning?"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from unspool.costs.part import (
    CostPart,
    Example,
    Figure,
    MeasurementPlan,
    Series,
    TextMark,
    auc,
    bootstrap,
    join_notes,
    share_bounds,
    share_figure,
)
from unspool.costs.texts import encode_with_start, generate_batch
from unspool.decoding.infill.masked import add_special_tokens, masked_model, text_logprobs
from unspool.lm import LanguageModel
from unspool.session import Session
from unspool.train.evaluation.bits_per_byte import score_continuations


@dataclass(frozen=True)
class Story:
    """A beginning that states a fact, and a question that asks for it."""

    beginning: str
    question: str
    values: tuple[str, ...]  # possible answers, all of one kind
    answer: str  # the correct one of `values`


# Values by kind of fact; values of one kind are about equally common words.
_COLOURS = ("red", "blue", "green", "yellow")
_PLACES = ("kitchen", "garden", "garage", "attic")
_ANIMALS = ("dog", "cat", "horse", "rabbit")
_DRINKS = ("tea", "coffee", "milk", "water")
_NUMBERS = ("two", "three", "four", "five")
_TOWNS = ("London", "Paris", "Rome", "Berlin")

# Beginning, question, values. {} is the correct value.
_TEMPLATES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (
        "{name} had a {} bicycle. Every morning {name} rode it to school, and all the other "
        "children knew it from far away. One day it rained very hard.",
        "In the evening {name} put the bicycle away. The colour of the bicycle was",
        _COLOURS,
    ),
    (
        "Before the guests came, {name} hid the key in the {}. Nobody saw it. Then the doorbell "
        "rang, and the party began.",
        "When everybody had left, {name} went to get the key. The key was in the",
        _PLACES,
    ),
    (
        "{name} lived alone with a {}. It slept beside the stove, and it was the only company "
        "that {name} had in the long winter.",
        "In spring a neighbour asked what kind of animal {name} had. It was a",
        _ANIMALS,
    ),
    (
        "At breakfast {name} always drank {}, and nothing else. The others at the table laughed "
        "about it. That morning a letter came.",
        "The next day at breakfast {name} had the same drink as always: a cup of",
        _DRINKS,
    ),
    (
        "{name} had {} sisters, all of them older. They shared one room under the roof. In "
        "summer the whole family went to the sea.",
        "On the train a stranger asked how many sisters {name} had. The answer was",
        _NUMBERS,
    ),
    (
        "{name} was born in {} and had never lived anywhere else. The house stood beside a "
        "bakery. When the war was over, work was hard to find.",
        "Many years later {name} still lived in the town of birth, the city of",
        _TOWNS,
    ),
    (
        "The old man gave {name} a {} coat. It was too large, but it was warm. With the coat on, "
        "{name} went out into the snow.",
        "Back at home {name} hung the coat on the door. The colour of the coat was",
        _COLOURS,
    ),
    (
        "{name} found a small {} behind the house and took it in. It ate everything it was given. "
        "After a week it had grown.",
        "The children came to see what {name} had found behind the house. It was a",
        _ANIMALS,
    ),
    (
        "The box of letters stood in the {}, where {name} had left it. Years went by. Then the "
        "house was to be sold.",
        "Before the house was sold, {name} took the box of letters from where it stood, in the",
        _PLACES,
    ),
    (
        "{name} bought {} tickets for the theatre and put them on the table. The play was to "
        "begin at eight. At six the telephone rang.",
        "{name} counted the tickets on the table once more. The number of tickets was",
        _NUMBERS,
    ),
    (
        "The train that {name} took went to {}. The journey lasted all night. In the same "
        "carriage sat a woman with a violin.",
        "In the morning the train arrived, and {name} got out in",
        _TOWNS,
    ),
    (
        "In the bottle that {name} carried there was only {}. The road was long and the sun was "
        "high. At noon there was a tree with some shade.",
        "Under the tree {name} opened the bottle and drank the",
        _DRINKS,
    ),
)
_NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry")


def make_stories(seed: int) -> list[Story]:
    """Return every template with every value, mixed: the first n are a fair sample."""
    draw = random.Random(seed)
    result = []
    for turn in range(4):
        for number, (beginning, question, values) in enumerate(_TEMPLATES):
            answer = values[(number + turn) % len(values)]
            name = draw.choice(_NAMES)
            result.append(
                Story(
                    beginning.format(answer, name=name),
                    " " + question.format(name=name),
                    values,
                    answer,
                )
            )
    return result


_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z“\"])")
_FORMULA = (
    "For a text x and the same text x' with two sentences swapped: noticed = share of pairs with "
    "log p(x) > log p(x'), by chance 50 %; AUC = P(score(x) > score(y')) over all x and all y', "
    "score = mean log p per token. Stories: a fact is stated, the model generates k tokens, then "
    "the fact is asked for; contradiction = another value of the same kind is likelier than the "
    "stated one."
)


@dataclass(frozen=True)
class Swap:
    """A text in sentences, and the two to swap."""

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
        """Return the sentences after the swap."""
        order = list(self.sentences)
        order[self.first], order[self.second] = order[self.second], order[self.first]
        return order


def swaps(texts: Sequence[str], count: int, distances: Sequence[int], seed: int) -> list[Swap]:
    """Return passages of human text with two sentences to swap, each distance equally often.

    The first sentence is not swapped: an unusual first sentence is noticed without any context.
    """
    draw = random.Random(seed)
    lines = [_sentences(text) for text in texts]
    draw.shuffle(lines)
    results: list[Swap] = []
    while lines and len(results) < count:
        for sentences in lines:
            distance = distances[len(results) % len(distances)]
            passage = tuple(sentences[: distance + 3])  # one before the two, one after them
            del sentences[: distance + 3]
            if len(passage) == distance + 3 and passage[1] != passage[1 + distance]:
                results.append(Swap(passage, 1, 1 + distance))
        lines = [sentences for sentences in lines if len(sentences) >= 4]
    return results[:count]


def _sentences(text: str) -> list[str]:
    """Return the sentences of a usual length, each on one line."""
    every = [line for part in text.split("\n\n") for line in _SENTENCE.split(part.strip())]
    return [" ".join(line.split()) for line in every if 30 <= len(line) <= 300]


def log_likelihoods(lm: Session, texts: Sequence[str], tell: Callable[[int], object]) -> list[Any]:
    """Return the logprobs of each text's tokens."""
    ids = [encode_with_start(lm, text)[: lm.context] for text in texts]
    scored = score_continuations(lm, [(tokens[:1], tokens[1:]) for tokens in ids], tell)
    return [np.array(likelihood.logprobs) for likelihood in scored]


def masked_likelihoods(
    twin: Any, texts: Sequence[str], tell: Callable[[int], object], groups: int = 8
) -> list[Any]:
    """Return the logprobs by a masked model: an eighth of the tokens is masked at a time."""
    model = masked_model(twin)
    results = []
    for number, text in enumerate(texts):
        ids, before = add_special_tokens(model.tokenizer, model.tokenizer.encode(text))
        places = range(before, before + len(model.tokenizer.encode(text)))
        logprobs = np.zeros(len(places))
        for group in range(groups):
            hidden = list(places)[group::groups]
            if not hidden:
                continue
            row = [model.mask_id if at in set(hidden) else token for at, token in enumerate(ids)]
            table = text_logprobs(model, row, hidden)
            logprobs[group::groups] = table[np.arange(len(hidden)), [ids[at] for at in hidden]]
        results.append(logprobs)
        tell(number + 1)
    return results


def measure(lm: LanguageModel, plan: MeasurementPlan) -> CostPart:
    distances = plan.pick((1, 2), (1, 2, 4))
    swapped = swaps(plan.texts, plan.pick(4, 36), distances, plan.seed)
    figures, series, example = (
        _swapping(lm, plan, swapped, distances) if swapped else ([], [], None)
    )
    selected = make_stories(plan.seed)[: plan.pick(6, 48)]
    story_figures, line = _measure_stories(lm, plan, selected)
    no_swaps = ["No passage has enough sentences: nothing was swapped."]
    return CostPart(
        "whole",
        "Coherence: are swapped sentences and contradictions noticed?",
        _FORMULA,
        [*figures, *story_figures],
        [*series, line],
        example,
        [
            "The first and the last sentence of a passage are never swapped.",
            f"{len(selected)} of 48 stories; every value of a kind occurs equally often, so that "
            "always preferring one value gains nothing.",
            *([] if swapped else no_swaps),
        ],
    )


def _swapping(
    lm: LanguageModel, plan: MeasurementPlan, swapped: Sequence[Swap], distances: Sequence[int]
) -> tuple[list[Figure], list[Series], Example]:
    texts = [swap.original for swap in swapped] + [swap.swapped for swap in swapped]
    scores = log_likelihoods(lm, texts, lambda done: plan.on_progress(0.5 * done / len(texts)))
    figures = _swap_figures(scores, len(swapped), "the model")
    if plan.twin is not None:
        by_twin = masked_likelihoods(
            plan.twin, texts, lambda done: plan.on_progress(0.5 + 0.1 * done / len(texts))
        )
        figures += _swap_figures(by_twin, len(swapped), "the masked model")
    return figures, _by_distance(swapped, scores, distances), _swap_example(swapped, scores)


def _measure_stories(
    lm: LanguageModel, plan: MeasurementPlan, selected: Sequence[Story]
) -> tuple[list[Figure], Series]:
    """Continue each story once, and ask the question after different numbers of tokens."""
    lengths = [min(length, lm.context // 4) for length in plan.pick((0, 24), (0, 24, 72))]
    prompts = [encode_with_start(lm, story.beginning) for story in selected]
    options: dict[str, Any] = {"seed": plan.seed, "temperature": 0.7}
    continuations = generate_batch(lm, prompts, max_tokens=lengths[-1], **options).texts
    wrong = []
    for number, length in enumerate(lengths):
        texts = zip(prompts, continuations, strict=True)
        started = [[*prompt, *text.tokens[:length]] for prompt, text in texts]
        wrong.append(contradictions(lm, selected, started))
        plan.on_progress(0.6 + 0.4 * (number + 1) / len(lengths))
    num_values = len(selected[0].values)
    why = f"of {num_values} values; by chance {1 - 1 / num_values:.0%}"
    figures = [
        share_figure(
            f"contradictions after {length} own tokens", sum(results), len(results), why=why,
            better="lower",
        )
        for length, results in zip(lengths, wrong, strict=True)
    ]  # fmt: skip
    return figures, _by_length(lengths, wrong)


def _swap_figures(scores: Sequence[Any], count: int, model: str) -> list[Figure]:
    """Return how often the original is likelier, and the AUC over single texts."""
    totals = np.array([[float(score.sum()), float(score.mean())] for score in scores])
    noticed = int((totals[:count, 0] > totals[count:, 0]).sum())
    pairs = np.stack([totals[:count, 1], totals[count:, 1]], 1)
    low, high = bootstrap(pairs, lambda rows: auc(rows[:, 0], rows[:, 1]), draws=500)
    value = auc(pairs[:, 0], pairs[:, 1])
    why = "two different passages, one of them swapped: which?"
    return [
        share_figure(
            f"swap noticed by {model}", noticed, count, why="by chance 50 %", better="higher"
        ),
        Figure(
            f"AUC of {model}", value, "", low, high, count,
            join_notes(why, "bootstrap over passages"), "higher",
        ),
    ]  # fmt: skip


def _by_distance(
    swapped: Sequence[Swap], scores: Sequence[Any], distances: Sequence[int]
) -> list[Series]:
    better = [
        float(before.sum()) > float(after.sum())
        for before, after in zip(scores[: len(swapped)], scores[len(swapped) :], strict=True)
    ]
    line = partial(
        Series, x_label="sentences apart", y_label="swap noticed", plot="Swaps by distance"
    )
    bounds: list[list[float]] = [[], [], []]
    for distance in distances:
        pairs = zip(better, swapped, strict=True)
        hits = [is_better for is_better, swap in pairs if swap.distance == distance]
        shares = share_bounds([sum(hits)], max(1, len(hits)))
        for column, value in zip(bounds, shares, strict=True):
            column += value
    flat = [0.5] * len(distances)
    return [line("noticed", distances, *bounds), line("chance", distances, flat, kind="reference")]


def _swap_example(swapped: Sequence[Swap], scores: Sequence[Any]) -> Example:
    """Return the swap with the largest gain in likelihood, an unnoticed one if there is any."""
    gains = [
        float(after.sum() - before.sum())
        for before, after in zip(scores[: len(swapped)], scores[len(swapped) :], strict=True)
    ]
    number = int(np.argmax(gains))
    swap, gain = swapped[number], gains[number]
    order, at, marks = swap.order(), 0, []
    for index, sentence in enumerate(order):
        if index in (swap.first, swap.second):
            was = swap.second if index == swap.first else swap.first
            marks.append(TextMark(at, at + len(sentence), "swapped", f"was sentence {was + 1}"))
        at += len(sentence) + 1
    if gain > 0:
        caption = f"Two sentences are swapped, and the model finds the result {gain:.1f} nats more "
        caption += "likely."
    else:
        caption = f"Two sentences are swapped: {-gain:.1f} nats less likely, the smallest loss of "
        caption += "all swaps; the model noticed all of them."
    return Example(swap.swapped, marks, caption)


def contradictions(
    lm: LanguageModel, selected: Sequence[Story], started: Sequence[Sequence[int]]
) -> list[bool]:
    """Return, for each partly written story, whether the model contradicts its fact."""
    pairs = []
    for story, ids in zip(selected, started, strict=True):
        # Drop end tokens, except a first token: the text continues with the question.
        context = [*ids[:1], *(token for token in ids[1:] if token not in lm.end_ids)]
        context += lm.tokenizer.encode(story.question)
        pairs += [(context, lm.tokenizer.encode(f" {value}")) for value in story.values]
    scored = iter(score_continuations(lm, pairs))
    wrong = []
    for story in selected:
        totals = [next(scored).total for _ in story.values]
        wrong.append(story.values[int(np.argmax(totals))] != story.answer)
    return wrong


def _by_length(lengths: Sequence[int], wrong: Sequence[Sequence[bool]]) -> Series:
    return Series(
        "contradictions",
        lengths,
        *share_bounds([sum(results) for results in wrong], len(wrong[0])),
        x_label="own tokens between fact and question",
        y_label="contradictions",
        plot="Stories against their own beginning",
    )
