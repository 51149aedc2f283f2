"""Error propagation: the effect of one wrong token, and of the model's own output as context.

First, one token of a text is replaced by one that the model finds likely there, and the true
continuation is scored after it: what the error costs, and how fast its effect decays. Then the
model continues its own output and human text of the same length, and both are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unspool.costs.part import (
    Better,
    CostPart,
    Example,
    Figure,
    MeasurementPlan,
    Series,
    TextMark,
    bootstrap_means,
    interval_around,
    mean_figure,
)
from unspool.costs.texts import excerpts, generate_batch, last_logits, token_nlls
from unspool.engine.generation import Generation
from unspool.lm import LanguageModel
from unspool.sampling import score

_REACH = 64  # tokens before the candidate positions, and after the error
_LOOKED_AT = 16  # candidate positions of each text: the most plausible error is used
_START, _NEXT = 32, 32  # tokens of human text at the start, and tokens generated after the context
_TITLE = "Snowball: the effect of one wrong token on the rest"
_FORMULA = (
    "excess(d) = mean NLL(x_{p+d} | x_<p, wrong, …) − NLL(x_{p+d} | x_<p, x_p, …), in nats, the "
    "wrong token being the model's likeliest other one at p. Area = Σ_d excess(d); half-life = the "
    "distance at which half of the area is reached. Own output: new 4-grams and NLL of "
    f"{_NEXT} tokens generated after l of the model's own tokens, minus those after l human tokens."
)


@dataclass(frozen=True)
class TokenError:
    """A text and the wrong token to put into it."""

    tokens: list[int]  # the original text
    position: int
    wrong: int
    probability: float  # the wrong token's probability
    reach: int  # tokens to score after it

    def texts(self) -> tuple[list[int], list[int]]:
        """Return the text up to the last scored token, with the right and the wrong token."""
        right = self.tokens[: self.position + 1 + self.reach]
        return right, [*right[: self.position], self.wrong, *right[self.position + 1 :]]


def measure(lm: LanguageModel, plan: MeasurementPlan) -> CostPart:
    """Run both measurements."""
    reach = min(_REACH, (lm.context - _LOOKED_AT - 1) // 2)
    texts = excerpts(lm, plan.texts, plan.pick(6, 48), 2 * reach + _LOOKED_AT + 1)
    slips = find_errors(lm, texts, reach)
    plan.on_progress(0.15)
    costs = excess(lm, slips, lambda share: plan.on_progress(0.15 + 0.35 * share))
    gaps = _measure_own_output(lm, plan)
    return CostPart(
        "snowball",
        _TITLE,
        _FORMULA,
        [*_figures(slips, costs), *gaps.figures],
        [*_series(costs), *gaps.series],
        _example(lm, slips, costs),
        [
            "The wrong token is the model's likeliest token other than the right one, at the "
            "position, of 16 in a row, where its probability is highest.",
            "Excess below zero is possible: a wrong token may make a later one easier to predict.",
            *gaps.notes,
        ],
    )


def find_errors(lm: LanguageModel, texts: Sequence[list[int]], reach: int) -> list[TokenError]:
    """Find the position with the likeliest wrong token in each text."""
    upto = [text[: reach + _LOOKED_AT] for text in texts]
    results: list[TokenError] = []
    for text, logits in zip(texts, last_logits(lm, upto, _LOOKED_AT), strict=True):
        scores = score(logits, text[reach : reach + _LOOKED_AT], 2)
        slips = []
        for row in range(_LOOKED_AT):
            place = reach + row
            first, second = (int(token) for token in scores.top_tokens[row])
            other = int(first == text[place])
            likely = float(np.exp(float(scores.top_logprobs[row][other])))
            slips.append(TokenError(text, place, second if other else first, likely, reach))
        results.append(max(slips, key=lambda slip: slip.probability))
    return results


def excess(
    lm: LanguageModel,
    slips: Sequence[TokenError],
    tell: Callable[[float], object] = lambda share: None,
) -> NDArray[np.float64]:
    """Return the NLL of the true continuation after the wrong token, minus after the right one."""
    texts = [text for slip in slips for text in slip.texts()]
    losses = token_nlls(lm, texts, slips[0].reach, tell)
    difference: NDArray[np.float64] = losses[1::2] - losses[::2]
    return difference


def half_life(costs: NDArray[np.float64]) -> float:
    """Return the distance at which half of the mean area is reached; nan if it is not positive."""
    area = costs.mean(0).cumsum()
    if area[-1] <= 0:
        return float("nan")
    return float(np.flatnonzero(area >= area[-1] / 2)[0] + 1)


def _figures(slips: Sequence[TokenError], costs: NDArray[np.float64]) -> list[Figure]:
    distance = half_life(costs)
    is_finite = not np.isnan(distance)
    low, high = interval_around(distance, costs, half_life)
    return [
        mean_figure(
            "area", costs.sum(1).tolist(), "nats", better="lower",
            why=f"total cost of one wrong token for the next {costs.shape[1]}",
        ),
        mean_figure("excess of the next token", costs[:, 0].tolist(), "nats", better="lower"),
        mean_figure(
            "excess at the end", costs[:, -16:].mean(1).tolist(), "nats/token", better="lower",
            why=f"the last 16 of the {costs.shape[1]} tokens",
        ),
        Figure(
            "half-life", distance if is_finite else None, "tokens",
            low if is_finite else None, high if is_finite else None, len(costs),
            "half of the area is reached; bootstrap over texts" if is_finite
            else "the wrong token cost nothing", "lower",
        ),
        mean_figure(
            "probability of the wrong token", [slip.probability for slip in slips], "%",
            why="how plausible the errors were",
        ),
    ]  # fmt: skip


def _series(costs: NDArray[np.float64]) -> list[Series]:
    """Return the excess by distance, in growing bins to reduce noise."""
    reach = costs.shape[1]
    steps = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
    edges = [*[edge for edge in steps if edge < reach], reach]
    pairs = list(itertools.pairwise(edges))
    binned = np.array([[row[a:b].mean() for a, b in pairs] for row in costs])
    low, high = bootstrap_means(binned)
    distance = [(a + 1 + b) / 2 for a, b in pairs]
    plot = "Cost of a wrong token by distance"
    return [
        Series(
            "excess", distance, binned.mean(0).tolist(), low.tolist(), high.tolist(),
            "distance d, tokens", "nats", plot, log_x=True,
        ),
        Series("none", distance, [0.0] * len(distance), plot=plot, log_x=True, kind="reference"),
    ]  # fmt: skip


def _example(lm: LanguageModel, slips: Sequence[TokenError], costs: NDArray[np.float64]) -> Example:
    """Return the text of median cost, with marks at tokens that the wrong one made harder."""
    middle = int(np.argsort(costs.sum(1))[len(costs) // 2])
    slip, row = slips[middle], costs[middle]
    tokens, hidden = slip.texts()[1], lm.tokenizer.special_ids
    read = zip(lm.readable_all(tokens), tokens, strict=True)
    pieces = ["" if token in hidden else piece for piece, token in read]
    text, marks = "".join(pieces[: slip.position]), list[TextMark]()
    start, right = len(text), lm.readable(slip.tokens[slip.position])
    text += pieces[slip.position]
    marks.append(TextMark(start, len(text), "wrong", f"originally {right!r}"))
    for piece, cost in zip(pieces[slip.position + 1 :], row, strict=True):
        if cost > 0.5:
            title = f"{cost:.2f} nats more than after {right!r}"
            marks.append(TextMark(len(text), len(text) + len(piece), "harder", title))
        text += piece
    return Example(
        text, marks, "One wrong token, and tokens that became harder to predict by over half a nat"
    )


@dataclass(frozen=True)
class _Gaps:
    figures: list[Figure]
    series: list[Series]
    notes: list[str]


def _measure_own_output(lm: LanguageModel, plan: MeasurementPlan) -> _Gaps:
    """Compare generation after the model's own tokens and after as many human ones."""
    room = lm.context - _START - _NEXT
    lengths = [size for size in plan.pick((32, 64), (32, 96, 160, 224)) if size <= room] or [room]
    humans = excerpts(lm, plan.texts, plan.pick(5, 24), _START + lengths[-1])
    # One generated text serves for all lengths: its tokens after the first l are what the model
    # generates after l of the same tokens.
    model_texts = _sample(lm, [text[:_START] for text in humans], lengths[-1] + _NEXT, plan.seed)
    plan.on_progress(0.75)
    fresh = np.zeros((2, len(lengths), len(humans)))  # [own or human, length, text]
    surprise = np.zeros_like(fresh)
    for number, length in enumerate(lengths):
        prompts = [text[: _START + length] for text in humans]
        after_human = _sample(lm, prompts, _NEXT, plan.seed + 1)
        for side, (texts, start) in enumerate(((model_texts, length), (after_human, 0))):
            ends = [_generated_span(text, start) for text in texts]
            fresh[side, number] = [new_runs(tokens, _NEXT) for tokens, _ in ends]
            surprise[side, number] = [nll for _, nll in ends]
        plan.on_progress(0.75 + 0.25 * (number + 1) / len(lengths))
    return _gaps(lengths, fresh, surprise)


def _generated_span(text: Generation, start: int) -> tuple[list[int], float]:
    """Return a text up to `_NEXT` tokens after `start`, and the mean NLL of these tokens."""
    steps = text.steps[start : start + _NEXT]
    nll = -float(np.mean([step.logprob for step in steps]))
    return [*text.prompt, *text.tokens[: start + _NEXT]], nll


def _sample(
    lm: LanguageModel, prompts: Sequence[list[int]], tokens: int, seed: int
) -> Sequence[Generation]:
    """Generate with pure sampling: truncation stages would hide the model's errors."""
    return generate_batch(
        lm, prompts, max_tokens=tokens, seed=seed, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0,
        end=False,
    ).texts  # fmt: skip


def new_runs(tokens: Sequence[int], last: int, size: int = 4) -> float:
    """Return the share of n-grams ending in the last `last` tokens that are new to the text."""
    runs = [tuple(tokens[at : at + size]) for at in range(len(tokens) - size + 1)]
    previous, new = set(runs[: len(runs) - last]), 0
    for run in runs[len(runs) - last :]:
        new += run not in previous
        previous.add(run)
    return new / last


def _gaps(
    lengths: Sequence[int], fresh: NDArray[np.float64], surprise: NDArray[np.float64]
) -> _Gaps:
    """Return figures and series; `fresh` and `surprise` are [own or human, length, text]."""
    figures, series = list[Figure](), list[Series]()
    last = lengths[-1]
    kinds: list[tuple[NDArray[np.float64], str, str, Better]] = [
        (fresh, "new 4-grams", "%", "higher"),
        (surprise, "NLL", "nats/token", ""),
    ]
    for values, name, unit, better in kinds:
        gap = mean_figure(
            f"own output: {name}, gap", (values[0, -1] - values[1, -1]).tolist(), unit,
            why=f"after {last} tokens of its own, minus after {last} human ones, pure sampling",
            better=better,
        )  # fmt: skip
        figures.append(gap)
        for side, author in enumerate(("its own", "human")):
            low, high = bootstrap_means(values[side].T)
            series.append(
                Series(
                    f"after {author} text", list(lengths), values[side].mean(1).tolist(),
                    low.tolist(), high.tolist(), "tokens before, l", name,
                    f"Generation after its own output: {name}",
                )
            )  # fmt: skip
    note = (
        "Own output is sampled at temperature 1 without truncation. NLL is that of the generated "
        "tokens: a model that is as certain after its own output as after human text has a gap of "
        "0; below 0 it narrows down, above 0 it drifts."
    )
    return _Gaps(figures, series, [note])
