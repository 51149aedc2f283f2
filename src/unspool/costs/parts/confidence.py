"""Calibration: does confidence match accuracy? And where in a text is the model uncertain?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from unspool.costs.part import (
    CostPart,
    Example,
    Figure,
    MeasurementPlan,
    Series,
    TextMark,
    bootstrap,
    bootstrap_means,
    join_notes,
    mean_bounds,
    mean_figure,
    share_figure,
)
from unspool.costs.texts import encode_with_start, excerpts
from unspool.engine.results import Score
from unspool.lm import LanguageModel
from unspool.train.evaluation.bits_per_byte import score_continuations


@dataclass(frozen=True)
class Item:
    """A question and its answers, the correct one first."""

    question: str
    answers: tuple[str, ...]


_ITEMS = """
What is the capital of France? | Paris | London | Madrid | Vienna
What is the capital of Japan? | Tokyo | Seoul | Bangkok | Beijing
What is the capital of Egypt? | Cairo | Tunis | Tripoli | Amman
What is the capital of Canada? | Ottawa | Toronto | Montreal | Vancouver
What is the capital of Australia? | Canberra | Sydney | Melbourne | Perth
What is the capital of Brazil? | Brasília | São Paulo | Salvador | Recife
What is the capital of Turkey? | Ankara | Istanbul | Izmir | Antalya
What is the capital of Kenya? | Nairobi | Kampala | Lagos | Accra
Which planet is closest to the Sun? | Mercury | Venus | Mars | Jupiter
Which planet is the largest in the solar system? | Jupiter | Saturn | Neptune | Earth
Which planet is known for its bright rings? | Saturn | Mars | Venus | Mercury
What do we call the star at the center of our solar system? | the Sun | the Moon | Sirius | Polaris
How many legs does a spider have? | eight | six | four | ten
How many legs does an insect have? | six | eight | four | two
How many days are there in a week? | seven | five | ten | twelve
How many months have 31 days? | seven | six | eight | five
How many sides does a hexagon have? | six | five | seven | eight
How many strings does a violin have? | four | five | six | three
What is two plus three? | five | four | six | seven
What is seven times eight? | 56 | 54 | 64 | 48
What is one hundred divided by four? | 25 | 20 | 40 | 50
What is the square root of 81? | nine | eight | seven | six
Which of these numbers is prime? | 17 | 15 | 21 | 27
What is half of ninety? | 45 | 40 | 50 | 35
Which gas do plants take in from the air? | carbon dioxide | oxygen | helium | hydrogen
Which gas do people need to breathe? | oxygen | methane | helium | chlorine
What is the chemical symbol of gold? | Au | Ag | Fe | Pb
What is the chemical symbol of iron? | Fe | Ir | In | Au
What is water made of? | hydrogen and oxygen | carbon and oxygen | iron and sulfur | salt and sugar
At what temperature in Celsius does water freeze? | zero | ten | fifty | one hundred
Which part of a plant takes up water from the soil? | the roots | the leaves | the flowers | the fruit
Which organ pumps blood through the body? | the heart | the liver | the lungs | the stomach
Which organ do people think with? | the brain | the kidney | the spleen | the skin
What do bees make? | honey | milk | silk | wool
What do cows mostly eat? | grass | meat | fish | bark
Which animal is known for changing its color? | the chameleon | the elephant | the penguin | the cow
Which animal is the largest on Earth? | the blue whale | the elephant | the giraffe | the polar bear
Which bird cannot fly? | the ostrich | the eagle | the swallow | the gull
What is a young dog called? | a puppy | a kitten | a calf | a foal
What is a young sheep called? | a lamb | a chick | a cub | a kid
Who wrote Romeo and Juliet? | William Shakespeare | Charles Dickens | Mark Twain | Jane Austen
Who wrote Pride and Prejudice? | Jane Austen | Emily Brontë | Virginia Woolf | Mary Shelley
Who painted the Mona Lisa? | Leonardo da Vinci | Pablo Picasso | Claude Monet | Vincent van Gogh
Who composed the Moonlight Sonata? | Beethoven | Mozart | Vivaldi | Chopin
Who developed the theory of relativity? | Albert Einstein | Isaac Newton | Niels Bohr | Galileo Galilei
Who was the first president of the United States? | George Washington | Abraham Lincoln | John Adams | Thomas Jefferson
In which year did the Second World War end? | 1945 | 1918 | 1939 | 1963
In which year did people first walk on the Moon? | 1969 | 1957 | 1975 | 1981
In which country are the pyramids of Giza? | Egypt | Mexico | Peru | India
In which country is the Eiffel Tower? | France | Italy | Spain | England
Which ocean lies between Europe and America? | the Atlantic | the Pacific | the Indian Ocean | the Arctic
Which river flows through London? | the Thames | the Seine | the Rhine | the Danube
Which continent is the Sahara desert on? | Africa | Asia | Australia | South America
Which language is mostly spoken in Brazil? | Portuguese | Spanish | French | Italian
What is the opposite of hot? | cold | warm | dry | bright
What is the opposite of early? | late | soon | often | quick
Which word means the same as big? | large | small | narrow | quiet
What do you use to cut paper? | scissors | a spoon | a pillow | a rope
What do you open a lock with? | a key | a candle | a hammer | a book
What falls from the sky when it is very cold? | snow | sand | leaves | dust
Which season comes after winter? | spring | summer | autumn | fall
Where does the sun rise? | in the east | in the west | in the north | in the south
What do people wear on their feet? | shoes | gloves | hats | scarves
What is frozen water called? | ice | steam | fog | dew
"""  # noqa: E501 (a line is a question)


def load_items() -> list[Item]:
    """Return all questions, with subjects mixed: the first n are a fair sample."""
    every = []
    for line in _ITEMS.strip().splitlines():
        question, *answers = (cell.strip() for cell in line.split("|"))
        every.append(Item(question, tuple(answers)))
    step = 27  # coprime with their number, so each comes once
    return [every[number * step % len(every)] for number in range(len(every))]


BINS = 10
_UNSURE = 4.0  # nats of entropy: about fifty equally likely tokens
_SURE = 0.8
_FORMULA = (
    "Items: P(answer a) = p(a | question) / Σ p(a' | question) over the four answers, confidence "
    "= the largest. ECE = Σ over ten bins of confidence (n_b / n) · |accuracy_b − confidence_b|. "
    "Brier = mean of Σ_a (P(a) − [a is right])². The same ECE for next tokens of human text: "
    "confidence = p of the likeliest token, right if it is the one that follows. Entropy = "
    "−Σ p log p of the next token, nats."
)


def expected_calibration_error(confidence: ArrayLike, right: ArrayLike, bins: int = BINS) -> float:
    """Return the expected calibration error (ECE) over bins of equal width."""
    sure, hits = np.asarray(confidence, np.float64), np.asarray(right, np.float64)
    if not len(sure):
        return float("nan")
    number = np.minimum((sure * bins).astype(int), bins - 1)
    gaps = np.bincount(number, hits, bins) - np.bincount(number, sure, bins)
    return float(np.abs(gaps).sum() / len(sure))


def brier(probabilities: ArrayLike, right: ArrayLike) -> NDArray[np.float64]:
    """Return the Brier score of each item: 0 is sure and right, 2 is sure and wrong."""
    table = np.asarray(probabilities, np.float64)
    target = np.eye(table.shape[1])[np.asarray(right, int)]
    scores: NDArray[np.float64] = ((table - target) ** 2).sum(1)
    return scores


def reliability(
    confidence: ArrayLike, right: ArrayLike, bins: int = BINS
) -> tuple[list[float], list[list[float]]]:
    """Return the mean confidence and the correctness of each non-empty bin."""
    sure, hits = np.asarray(confidence, np.float64), np.asarray(right, np.float64)
    number = np.minimum((sure * bins).astype(int), bins - 1)
    used = [index for index in range(bins) if (number == index).any()]
    return (
        [float(sure[number == index].mean()) for index in used],
        [hits[number == index].tolist() for index in used],
    )


def item_probabilities(lm: LanguageModel, questions: Sequence[Item]) -> NDArray[np.float64]:
    """Return the model's probabilities of the answers: [items, answers]."""
    pairs = []
    for item in questions:
        context = encode_with_start(lm, f"Question: {item.question}\nAnswer:")
        pairs += [(context, lm.tokenizer.encode(f" {answer}")) for answer in item.answers]
    totals = np.array([likelihood.total for likelihood in score_continuations(lm, pairs)])
    table = totals.reshape(len(questions), -1)
    odds = np.exp(table - table.max(1, keepdims=True))
    probabilities: NDArray[np.float64] = odds / odds.sum(1, keepdims=True)
    return probabilities


def measure(lm: LanguageModel, plan: MeasurementPlan) -> CostPart:
    questions = load_items()[: plan.pick(16, 64)]
    belief = item_probabilities(lm, questions)
    plan.on_progress(0.4)
    length = min(plan.pick(96, 320), lm.context)
    windows = excerpts(lm, plan.texts, plan.pick(5, 16), length)
    scores: list[Score] = []
    for window in windows:
        scores.append(lm.score(window, top=1))
        plan.on_progress(0.4 + 0.6 * len(scores) / len(windows))
    sure, hits, entropy = _tokens(scores)
    return CostPart(
        "confidence",
        "Confidence: is the model calibrated?",
        _FORMULA,
        [*_item_figures(belief), *_token_figures(sure, hits, entropy)],
        [*_reliability_series(belief, sure, hits), _along(entropy)],
        _example(scores[0]),
        [
            f"{len(questions)} general knowledge questions, each with four answers, scored as "
            "text.",
            f"Next tokens: {len(windows)} excerpts of {length} tokens of human text; intervals "
            "resample whole excerpts.",
        ],
    )


def _item_figures(belief: NDArray[np.float64]) -> list[Figure]:
    sure, right = belief.max(1), belief.argmax(1) == 0
    rows = np.stack([sure, right], 1)
    low, high = bootstrap(
        rows, lambda sample: expected_calibration_error(sample[:, 0], sample[:, 1])
    )
    count = len(belief)
    gap = (sure - right).tolist()
    return [
        share_figure("items answered right", int(right.sum()), count, why="by chance 25 %",
                     better="higher"),
        mean_figure("confidence in them", sure.tolist(), "%"),
        mean_figure("overconfidence", gap, "%", why="confidence less accuracy"),
        Figure("ECE, items", expected_calibration_error(sure, right), "%", low, high, count,
               join_notes("0: calibrated", "bootstrap over items; few items raise it"), "lower"),
        mean_figure("Brier score, items", brier(belief, np.zeros(count, int)).tolist(), "",
                    why="0: sure and right, 0.75: no idea, 2: sure and wrong", better="lower"),
    ]  # fmt: skip


def _tokens(
    scores: Sequence[Score],
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return p of the likeliest token, whether it followed, and entropy: each [texts, n]."""
    sure, hits, entropy = [], [], []
    for score in scores:
        scored = [position for position in score.positions if position.logprob is not None]
        sure.append([position.candidates[0].probability for position in scored])
        hits.append([float(position.rank == 0) for position in scored])
        entropy.append([float(position.entropy or 0.0) for position in scored])
    return np.array(sure), np.array(hits), np.array(entropy)


def _token_figures(
    sure: NDArray[np.float64], hits: NDArray[np.float64], entropy: NDArray[np.float64]
) -> list[Figure]:
    def error(rows: NDArray[Any]) -> float:
        return expected_calibration_error(rows[:, 0].ravel(), rows[:, 1].ravel())

    rows = np.stack([sure, hits], 1)  # [texts, 2, places]
    low, high = bootstrap(rows, error, draws=300)
    has_interval = len(sure) > 1
    return [
        mean_figure("next token predicted", hits.mean(1).tolist(), "%",
                    why="the likeliest token is the one that follows", better="higher"),
        Figure("ECE, next token", error(rows), "%", low if has_interval else None,
               high if has_interval else None, sure.size,
               join_notes("0: calibrated", "bootstrap over texts"), "lower"),
        mean_figure("entropy of the next token", entropy.mean(1).tolist(), "nats"),
        share_figure("positions with entropy above 4 nats", int((entropy > _UNSURE).sum()),
                     entropy.size, why="about fifty equally likely tokens"),
    ]  # fmt: skip


def _reliability_series(
    belief: NDArray[np.float64], sure: NDArray[np.float64], hits: NDArray[np.float64]
) -> list[Series]:
    line = partial(Series, x_label="confidence", y_label="how often right", plot="Calibration")
    x_items, right = reliability(belief.max(1), belief.argmax(1) == 0, 5)
    x_tokens, came = reliability(sure.ravel(), hits.ravel())
    return [
        line("perfect", [0.0, 1.0], [0.0, 1.0], kind="reference"),
        line("next tokens", x_tokens, *mean_bounds(came)),
        line("items", x_items, *mean_bounds(right)),
    ]


def _along(entropy: NDArray[np.float64]) -> Series:
    """Return the mean entropy by position, in widening bins."""
    length = entropy.shape[1]
    edges = sorted({*(min(length, round(2**power)) for power in np.arange(1, 12, 0.5)), 0, length})
    starts, ends = edges[:-1], edges[1:]
    table = np.stack([entropy[:, a:b].mean(1) for a, b in zip(starts, ends, strict=True)], 1)
    low, high = bootstrap_means(table)
    return Series(
        "entropy",
        [(a + b + 1) / 2 for a, b in zip(starts, ends, strict=True)],
        table.mean(0).tolist(),
        low.tolist(),
        high.tolist(),
        x_label="position, tokens",
        y_label="entropy, nats",
        plot="Entropy along a text",
        log_x=True,
    )


def _example(score: Score) -> Example:
    """Return a human text with marks where the model was unsure, or sure and wrong."""
    text, marks = "", []
    for position in score.positions[1:120]:  # without the start token
        start = len(text)
        text += position.text
        if position.logprob is None or position.entropy is None or not position.candidates:
            continue
        best = position.candidates[0]
        if position.entropy > _UNSURE:
            marks.append(
                TextMark(start, len(text), "unsure", f"entropy {position.entropy:.1f} nats")
            )
        elif position.rank and best.probability > _SURE:
            title = f"{best.probability:.0%} sure of {best.text!r}"
            marks.append(TextMark(start, len(text), "sure and wrong", title))
    caption = (
        "A human text as the model reads it: where it was uncertain, and where it was sure of "
    )
    caption += "another token."
    return Example(text, marks, caption)
