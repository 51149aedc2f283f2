"""Snowball: what one wrong token does to what follows, and what one's own words do to the next.

First, one token of a text is replaced by one that the model itself finds likely there, and the true
continuation is read behind it: what the slip costs, and how soon it is forgotten. Then the model
writes on behind its own words and behind a person's, as many of each, and both are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unspool.costing.part import Example, Figure, Mark, Part, Series
from unspool.costing.plan import Plan
from unspool.costing.reading import last_logits, surprises
from unspool.costing.statistics import Better, bootstrap_means, interval_around, mean_figure
from unspool.costing.writing import excerpts, write
from unspool.engine.generation import Generation
from unspool.language_model import LanguageModel
from unspool.sampling import score

_REACH = 64  # tokens before the places that are looked at for an error, and behind the error
_LOOKED_AT = 16  # places of each text: the most plausible error among them is made
_START, _NEXT = 32, 32  # tokens that a person's text begins with, and that are written on
_TITLE = "Snowball: one wrong token, and what it does to the rest"
_FORMULA = (
    "excess(d) = mean NLL(x_{p+d} | x_<p, wrong, …) − NLL(x_{p+d} | x_<p, x_p, …), in nats, the "
    "wrong token being the model's likeliest other one at p. Area = Σ_d excess(d); half-life = the "
    "distance by which half of the area is paid. Own words: new 4-grams and surprise of "
    f"{_NEXT} tokens written behind l of the model's own tokens, less those behind l human ones."
)


@dataclass(frozen=True)
class Slip:
    """One text with a wrong token in it."""

    tokens: list[int]  # as it was written
    place: int
    wrong: int
    likely: float  # the wrong token's probability
    reach: int  # how many tokens behind it are looked at

    def texts(self) -> tuple[list[int], list[int]]:
        """The text up to the last token that is looked at, right and wrong."""
        right = self.tokens[: self.place + 1 + self.reach]
        return right, [*right[: self.place], self.wrong, *right[self.place + 1 :]]


def measure(lm: LanguageModel, plan: Plan) -> Part:
    """Both measurements."""
    reach = min(_REACH, (lm.context - _LOOKED_AT - 1) // 2)
    texts = excerpts(lm, plan.texts, plan.pick(6, 48), 2 * reach + _LOOKED_AT + 1)
    slips = find_slips(lm, texts, reach)
    plan.tell(0.15)
    costs = excess(lm, slips, lambda share: plan.tell(0.15 + 0.35 * share))
    gaps = _own_words(lm, plan)
    return Part(
        "snowball",
        _TITLE,
        _FORMULA,
        [*_figures(slips, costs), *gaps.figures],
        [*_series(costs), *gaps.series],
        _example(lm, slips, costs),
        [
            "The wrong token is what the model would most likely have written in that place had it "
            "not been the right one: at the place, of 16 in a row, where that is likeliest.",
            "Excess below zero is possible: a wrong word may make a later one easier to guess.",
            *gaps.notes,
        ],
    )


# -- one wrong token ------------------------------------------------------------------------


def find_slips(lm: LanguageModel, texts: Sequence[list[int]], reach: int) -> list[Slip]:
    """In each text the place with the likeliest wrong token, and that token."""
    upto = [text[: reach + _LOOKED_AT] for text in texts]
    found: list[Slip] = []
    for text, logits in zip(texts, last_logits(lm, upto, _LOOKED_AT), strict=True):
        said = score(logits, text[reach : reach + _LOOKED_AT], 2)
        slips = []
        for row in range(_LOOKED_AT):
            place = reach + row
            first, second = (int(token) for token in said.top_tokens[row])
            other = int(first == text[place])
            likely = float(np.exp(float(said.top_logprobs[row][other])))
            slips.append(Slip(text, place, second if other else first, likely, reach))
        found.append(max(slips, key=lambda slip: slip.likely))
    return found


def excess(
    lm: LanguageModel,
    slips: Sequence[Slip],
    tell: Callable[[float], object] = lambda share: None,
) -> NDArray[np.float64]:
    """NLL of the true continuation behind the wrong token, less that behind the right one."""
    texts = [text for slip in slips for text in slip.texts()]
    losses = surprises(lm, texts, slips[0].reach, tell)
    difference: NDArray[np.float64] = losses[1::2] - losses[::2]
    return difference


def half_life(costs: NDArray[np.float64]) -> float:
    """The distance by which half of what the mean text pays is paid; nan if it pays nothing."""
    paid = costs.mean(0).cumsum()
    if paid[-1] <= 0:
        return float("nan")
    return float(np.flatnonzero(paid >= paid[-1] / 2)[0] + 1)


def _figures(slips: Sequence[Slip], costs: NDArray[np.float64]) -> list[Figure]:
    found = half_life(costs)
    known = not np.isnan(found)
    low, high = interval_around(found, costs, half_life)
    return [
        mean_figure(
            "area", costs.sum(1).tolist(), "nats", better="lower",
            why=f"all that one wrong token costs the {costs.shape[1]} that follow it",
        ),
        mean_figure("excess of the next token", costs[:, 0].tolist(), "nats", better="lower"),
        mean_figure(
            "excess at the end", costs[:, -16:].mean(1).tolist(), "nats a token", better="lower",
            why=f"the last 16 of the {costs.shape[1]} tokens",
        ),
        Figure(
            "half-life", found if known else None, "tokens",
            low if known else None, high if known else None, len(costs),
            "by then half of the area is paid; bootstrap over texts" if known
            else "the wrong token cost nothing", "lower",
        ),
        mean_figure(
            "probability of the wrong token", [slip.likely for slip in slips], "%",
            why="how plausible the errors were",
        ),
    ]  # fmt: skip


def _series(costs: NDArray[np.float64]) -> list[Series]:
    """In steps that grow with the distance, so that single tokens do not hide the course."""
    reach = costs.shape[1]
    steps = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
    edges = [*[edge for edge in steps if edge < reach], reach]
    pairs = list(itertools.pairwise(edges))
    binned = np.array([[row[a:b].mean() for a, b in pairs] for row in costs])
    low, high = bootstrap_means(binned)
    distance = [(a + 1 + b) / 2 for a, b in pairs]
    plot = "What a wrong token costs the true ones behind it"
    return [
        Series(
            "excess", distance, binned.mean(0).tolist(), low.tolist(), high.tolist(),
            "distance d, tokens", "nats", plot, log_x=True,
        ),
        Series("none", distance, [0.0] * len(distance), plot=plot, log_x=True, kind="reference"),
    ]  # fmt: skip


def _example(lm: LanguageModel, slips: Sequence[Slip], costs: NDArray[np.float64]) -> Example:
    """The text of middling cost, with the tokens marked that the wrong one made harder."""
    middle = int(np.argsort(costs.sum(1))[len(costs) // 2])
    slip, row = slips[middle], costs[middle]
    tokens, hidden = slip.texts()[1], lm.tokenizer.special_ids
    read = zip(lm.readable_all(tokens), tokens, strict=True)
    pieces = ["" if token in hidden else piece for piece, token in read]
    text, marks = "".join(pieces[: slip.place]), list[Mark]()
    start, right = len(text), lm.readable(slip.tokens[slip.place])
    text += pieces[slip.place]
    marks.append(Mark(start, len(text), "wrong", f"it said {right!r}"))
    for piece, cost in zip(pieces[slip.place + 1 :], row, strict=True):
        if cost > 0.5:
            title = f"{cost:.2f} nats more than behind {right!r}"
            marks.append(Mark(len(text), len(text) + len(piece), "harder", title))
        text += piece
    return Example(
        text, marks, "One token is wrong; those that became harder to guess by more than half a nat"
    )


# -- one's own words ------------------------------------------------------------------------


@dataclass(frozen=True)
class _Gaps:
    figures: list[Figure]
    series: list[Series]
    notes: list[str]


def _own_words(lm: LanguageModel, plan: Plan) -> _Gaps:
    """What is written behind so many of the model's own tokens and behind as many human ones."""
    room = lm.context - _START - _NEXT
    lengths = [each for each in plan.pick((32, 64), (32, 96, 160, 224)) if each <= room] or [room]
    humans = excerpts(lm, plan.texts, plan.pick(5, 24), _START + lengths[-1])
    # One text of its own is enough for all lengths: what stands behind its first l tokens is what
    # the model writes behind l tokens of its own.
    own = _drawn(lm, [text[:_START] for text in humans], lengths[-1] + _NEXT, plan.seed)
    plan.tell(0.75)
    fresh = np.zeros((2, len(lengths), len(humans)))  # [own or human, length, text]
    surprise = np.zeros_like(fresh)
    for number, length in enumerate(lengths):
        prompts = [text[: _START + length] for text in humans]
        more = _drawn(lm, prompts, _NEXT, plan.seed + 1)
        for side, (texts, start) in enumerate(((own, length), (more, 0))):
            ends = [_stretch(text, start) for text in texts]
            fresh[side, number] = [new_runs(tokens, _NEXT) for tokens, _ in ends]
            surprise[side, number] = [surprised for _, surprised in ends]
        plan.tell(0.75 + 0.25 * (number + 1) / len(lengths))
    return _told(lengths, fresh, surprise)


def _stretch(text: Generation, start: int) -> tuple[list[int], float]:
    """A text up to the end of the stretch that starts there, and the mean surprise at that."""
    steps = text.steps[start : start + _NEXT]
    surprised = -float(np.mean([step.logprob for step in steps]))
    return [*text.prompt, *text.tokens[: start + _NEXT]], surprised


def _drawn(
    lm: LanguageModel, prompts: Sequence[list[int]], tokens: int, seed: int
) -> Sequence[Generation]:
    """Pure sampling: what a stage cuts off would be the stage's merit, and not the model's."""
    return write(
        lm, prompts, max_tokens=tokens, seed=seed, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0,
        end=False,
    ).texts  # fmt: skip


def new_runs(tokens: Sequence[int], last: int, size: int = 4) -> float:
    """Of the runs of tokens that end in the last so many, the share that is new to the text."""
    runs = [tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1)]
    seen, new = set(runs[: len(runs) - last]), 0
    for run in runs[len(runs) - last :]:
        new += run not in seen
        seen.add(run)
    return new / last


def _told(
    lengths: Sequence[int], fresh: NDArray[np.float64], surprise: NDArray[np.float64]
) -> _Gaps:
    """`fresh` and `surprise` are [own or human, length, text]."""
    figures, series = list[Figure](), list[Series]()
    last = lengths[-1]
    kinds: list[tuple[NDArray[np.float64], str, str, Better]] = [
        (fresh, "new 4-grams", "%", "higher"),
        (surprise, "surprise", "nats a token", ""),
    ]
    for values, name, unit, better in kinds:
        gap = mean_figure(
            f"own words: {name}, gap", (values[0, -1] - values[1, -1]).tolist(), unit,
            why=f"behind {last} tokens of its own, less behind {last} human ones, pure sampling",
            better=better,
        )  # fmt: skip
        figures.append(gap)
        for side, whose in enumerate(("its own", "human")):
            low, high = bootstrap_means(values[side].T)
            series.append(
                Series(
                    f"behind {whose} words", list(lengths), values[side].mean(1).tolist(),
                    low.tolist(), high.tolist(), "tokens before, l", name,
                    f"What it writes behind its own words: {name}",
                )
            )  # fmt: skip
    note = (
        "Own words are drawn at temperature 1 with no stage cutting anything off. Surprise is the "
        "model's own of what it writes: a model that stays as sure behind its own words as behind "
        "a person's has a gap of 0; below 0 it narrows down, above 0 it drifts off."
    )
    return _Gaps(figures, series, [note])
