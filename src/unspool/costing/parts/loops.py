"""Loops: how often a text ends in going round, by temperature and length, and what helps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from unspool.costing.part import Example, Figure, Mark, Part, Series
from unspool.costing.plan import Plan
from unspool.costing.statistics import mean_bounds, mean_figure, share_bounds, share_figure
from unspool.costing.writing import Written, distinct, excerpts, write
from unspool.decoding.written import mean_logprob
from unspool.language_model import LanguageModel
from unspool.sampling.loops import repetition_rate

LONGEST = 16  # tokens of a period
_LEAST = 12  # tokens that must go round
_TEMPERATURES = (0.0, 0.6, 1.0)
# What is set against loops, on texts that always take the likeliest token: they loop the most.
REMEDIES: dict[str, dict[str, Any]] = {
    "loop guard": {"guard": "loop"},
    "DRY 0.8": {"dry_multiplier": 0.8},
    "repetition penalty 1.15": {"repetition_penalty": 1.15},
    "frequency penalty 0.5": {"frequency_penalty": 0.5},
}
_FORMULA = (
    f"A text loops if its last max(3p, {_LEAST} + p) tokens have a period p ≤ {LONGEST}: "
    "t[i] = t[i − p], at least three rounds. Repeated n-grams = 1 − different / all runs of "
    "4 tokens. Likelihood cost = mean log p(greedy) − mean log p(with the remedy), nats a token, "
    "by the bare model. Variety = different / all pairs of tokens in all texts (distinct-2)."
)


def period(tokens: Sequence[int], longest: int = LONGEST) -> int | None:
    """The period that a text ends in: at least three rounds and a dozen tokens; None: it does not.

    >>> period([5, 1, 2, 3] + [1, 2, 3] * 5)
    3
    """
    for size in range(1, longest + 1):
        same = max(2 * size, _LEAST)  # tokens that equal the one a period before
        if len(tokens) < same + size:
            continue
        tail = tokens[-same - size :]
        if all(tail[at] == tail[at - size] for at in range(size, len(tail))):
            return size
    return None


def loop_start(tokens: Sequence[int], size: int) -> int:
    """Where the rounds at the end of a text begin."""
    start = len(tokens) - size
    while start > 0 and tokens[start - 1] == tokens[start - 1 + size]:
        start -= 1
    return start


@dataclass(frozen=True)
class _Run:
    """Texts written with one setting."""

    name: str
    written: Written

    def tokens(self) -> list[list[int]]:
        return [text.tokens for text in self.written.texts]

    def looping(self, length: int | None = None) -> int:
        """How many texts have ended in a loop by this length; one that ended before has not."""
        return sum(
            period(text[:length]) is not None
            for text in self.tokens()
            if length is None or len(text) >= length
        )

    def repeated(self) -> list[float]:
        return [repetition_rate(text) for text in self.tokens() if len(text) >= 4]


def measure(lm: LanguageModel, plan: Plan) -> Part:
    room = lm.context - 40
    length = min(plan.pick(64, 192), room)
    prompts = excerpts(lm, plan.texts, plan.pick(5, 16), min(32, lm.context // 4))
    temperatures = plan.pick((0.0, 1.0), _TEMPERATURES)
    remedies = dict(list(REMEDIES.items())[: plan.pick(2, len(REMEDIES))])
    total = len(temperatures) + len(remedies)
    runs: list[_Run] = []

    def run(name: str, **options: Any) -> _Run:
        written = write(lm, prompts, max_tokens=length, seed=plan.seed, **options)
        runs.append(_Run(name, written))
        plan.tell(len(runs) / total)
        return runs[-1]

    by_heat = [run(f"temperature {heat:g}", temperature=heat) for heat in temperatures]
    greedy = by_heat[0]
    helped = [run(name, temperature=0.0, **options) for name, options in remedies.items()]
    lengths = [size for size in (32, 64, 128, 192) if size <= length]
    return Part(
        "loops",
        "Loops: texts that go round and round",
        _FORMULA,
        [*_figures(by_heat), *_remedy_figures(greedy, helped)],
        [*_by_temperature(temperatures, by_heat), *_by_length([*by_heat, *helped], lengths)],
        _example(runs),
        [
            f"{len(prompts)} openings of human text, each continued by up to {length} tokens with "
            "the usual sampling and only the temperature changed; a text that ended by itself does "
            "not loop.",
            "The guard takes a loop back and forbids what led there: the tokens it took back are "
            "in its price.",
        ],
        _table(greedy, helped),
    )


def _figures(by_heat: Sequence[_Run]) -> list[Figure]:
    found: list[Figure] = []
    for run in by_heat:
        texts = run.tokens()
        found.append(share_figure(f"loops, {run.name}", run.looping(), len(texts), better="lower"))
        found.append(
            mean_figure(f"repeated 4-grams, {run.name}", run.repeated(), "%", better="lower")
        )
    return found


def _remedy_figures(greedy: _Run, helped: Sequence[_Run]) -> list[Figure]:
    found: list[Figure] = []
    for run in helped:
        texts = run.tokens()
        found.append(
            share_figure(
                f"loops, {run.name}",
                run.looping(),
                len(texts),
                why="greedy with it",
                better="lower",
            )
        )
        found.append(_likelihood_cost(greedy, run))
    return found


def _likelihood_cost(greedy: _Run, run: _Run) -> Figure:
    """Nats a token that a remedy costs, text by text."""
    pairs = [
        mean_logprob(before) - mean_logprob(after)
        for before, after in zip(greedy.written.texts, run.written.texts, strict=True)
        if before.steps and after.steps
    ]
    return mean_figure(f"likelihood cost, {run.name}", pairs, "nats/token", why="paired by opening")


def _table(greedy: _Run, helped: Sequence[_Run]) -> list[list[str]]:
    rows = [
        [
            "greedy with",
            "loops",
            "repeated 4-grams",
            "log p a token",
            "variety",
            "tokens computed / kept",
        ]
    ]
    for run in (greedy, *helped):
        count = len(run.written.texts)
        price = run.written.computed / max(1, run.written.kept)
        rows.append(
            [
                "nothing" if run is greedy else run.name,
                f"{100 * run.looping() / count:.0f} %",
                f"{100 * float(np.mean(run.repeated() or [0.0])):.0f} %",
                f"{float(np.mean(run.written.mean_logprobs() or [0.0])):.2f}",
                f"{100 * distinct(run.tokens()):.0f} %",
                f"{price:.2f}",
            ]
        )
    return rows


def _by_temperature(heats: Sequence[float], runs: Sequence[_Run]) -> list[Series]:
    line = partial(Series, x_label="temperature", y_label="share", plot="By temperature")
    loops = share_bounds([run.looping() for run in runs], len(runs[0].written.texts))
    repeats = mean_bounds([run.repeated() for run in runs])
    return [
        line("texts that end in a loop", heats, *loops),
        line("repeated 4-grams", heats, *repeats),
        line("variety (distinct-2)", heats, [distinct(run.tokens()) for run in runs]),
    ]


def _by_length(runs: Sequence[_Run], lengths: Sequence[int]) -> list[Series]:
    line = partial(Series, x_label="tokens written", y_label="texts in a loop", plot="By length")
    return [
        line(
            run.name,
            lengths,
            *share_bounds([run.looping(size) for size in lengths], len(run.written.texts)),
        )
        for run in runs
        if len(lengths) > 1
    ]


def _example(runs: Sequence[_Run]) -> Example | None:
    """The text that goes round the longest; failing one, that which repeats the most."""
    every = [(run, text) for run in runs for text in run.written.texts if text.steps]
    if not every:
        return None
    looping = [(run, text) for run, text in every if period(text.tokens) is not None]
    run, text = max(looping or every, key=lambda pair: repetition_rate(pair[1].tokens))
    size = period(text.tokens)
    if size is None:
        caption = f"No text looped; the one that repeats the most ({run.name})."
        return Example(text.text, (), caption)
    start = loop_start(text.tokens, size)
    shown = [step.text for step in text.steps]
    marks = []
    at = len("".join(shown[:start]))
    for first in range(start, len(shown), size):
        end = at + len("".join(shown[first : first + size]))
        kind = "round" if (first - start) // size % 2 == 0 else "round again"
        marks.append(Mark(at, end, kind, f"tokens {first} to {first + size - 1}"))
        at = end
    caption = f"{run.name}: from token {start} on the text repeats {size} tokens."
    return Example(text.text, marks, caption)
