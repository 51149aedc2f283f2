"""Repetition loops: how often texts end in one, by temperature and length, and remedies."""

from __future__ import annotations

from collections.abc import Sequence
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
    mean_bounds,
    mean_figure,
    share_bounds,
    share_figure,
)
from unspool.costs.texts import GeneratedBatch, distinct_n, excerpts, generate_batch
from unspool.decoding.branches import mean_logprob
from unspool.lm import LanguageModel
from unspool.sampling.monitors import repetition_rate

LONGEST = 16  # tokens of a period
_MIN_REPEATED = 12  # tokens that equal the one a period before
_TEMPERATURES = (0.0, 0.6, 1.0)
# Remedies, measured with greedy decoding, which loops the most.
REMEDIES: dict[str, dict[str, Any]] = {
    "loop guard": {"guard": "loop"},
    "DRY 0.8": {"dry_multiplier": 0.8},
    "repetition penalty 1.15": {"repetition_penalty": 1.15},
    "frequency penalty 0.5": {"frequency_penalty": 0.5},
}
_FORMULA = (
    f"A text loops if its last max(3p, {_MIN_REPEATED} + p) tokens have a period p ≤ {LONGEST}: "
    "t[i] = t[i − p], at least three repetitions. Repeated n-grams = 1 − different / all runs of "
    "4 tokens. Likelihood cost = mean log p(greedy) − mean log p(with the remedy), nats a token, "
    "without penalties. Variety = different / all pairs of tokens in all texts (distinct-2)."
)


def loop_period(tokens: Sequence[int], longest: int = LONGEST) -> int | None:
    """Return the period of the loop that a text ends in, None if it does not loop.

    A loop has at least three repetitions and a dozen repeated tokens.

    >>> period([5, 1, 2, 3] + [1, 2, 3] * 5)
    3
    """
    for size in range(1, longest + 1):
        repeated = max(2 * size, _MIN_REPEATED)
        if len(tokens) < repeated + size:
            continue
        tail = tokens[-repeated - size :]
        if all(tail[at] == tail[at - size] for at in range(size, len(tail))):
            return size
    return None


def loop_start(tokens: Sequence[int], size: int) -> int:
    """Return where the loop at the end of a text begins."""
    start = len(tokens) - size
    while start > 0 and tokens[start - 1] == tokens[start - 1 + size]:
        start -= 1
    return start


@dataclass(frozen=True)
class _LoopRun:
    """Texts generated with one setting."""

    name: str
    written: GeneratedBatch

    def tokens(self) -> list[list[int]]:
        return [text.tokens for text in self.written.texts]

    def looping(self, length: int | None = None) -> int:
        """Count the texts that loop at this length; shorter ones do not."""
        return sum(
            loop_period(text[:length]) is not None
            for text in self.tokens()
            if length is None or len(text) >= length
        )

    def repeated(self) -> list[float]:
        return [repetition_rate(text) for text in self.tokens() if len(text) >= 4]


def measure(lm: LanguageModel, plan: MeasurementPlan) -> CostPart:
    room = lm.context - 40
    length = min(plan.pick(64, 192), room)
    prompts = excerpts(lm, plan.texts, plan.pick(5, 16), min(32, lm.context // 4))
    temperatures = plan.pick((0.0, 1.0), _TEMPERATURES)
    remedies = dict(list(REMEDIES.items())[: plan.pick(2, len(REMEDIES))])
    total = len(temperatures) + len(remedies)
    runs: list[_LoopRun] = []

    def run(name: str, **options: Any) -> _LoopRun:
        written = generate_batch(lm, prompts, max_tokens=length, seed=plan.seed, **options)
        runs.append(_LoopRun(name, written))
        plan.on_progress(len(runs) / total)
        return runs[-1]

    by_heat = [run(f"temperature {heat:g}", temperature=heat) for heat in temperatures]
    greedy = by_heat[0]
    helped = [run(name, temperature=0.0, **options) for name, options in remedies.items()]
    lengths = [size for size in (32, 64, 128, 192) if size <= length]
    return CostPart(
        "loops",
        "Loops: texts that repeat themselves",
        _FORMULA,
        [*_figures(by_heat), *_remedy_figures(greedy, helped)],
        [*_by_temperature(temperatures, by_heat), *_by_length([*by_heat, *helped], lengths)],
        _example(runs),
        [
            f"{len(prompts)} openings of human text, each continued by up to {length} tokens with "
            "default sampling except for the temperature; a text that ended by itself does not "
            "loop.",
            "The guard rewinds a loop and forbids the token that led to it: the removed tokens are "
            "part of its cost.",
        ],
        _table(greedy, helped),
    )


def _figures(by_heat: Sequence[_LoopRun]) -> list[Figure]:
    figures: list[Figure] = []
    for run in by_heat:
        texts = run.tokens()
        figures.append(
            share_figure(f"loops, {run.name}", run.looping(), len(texts), better="lower")
        )
        figures.append(
            mean_figure(f"repeated 4-grams, {run.name}", run.repeated(), "%", better="lower")
        )
    return figures


def _remedy_figures(greedy: _LoopRun, helped: Sequence[_LoopRun]) -> list[Figure]:
    figures: list[Figure] = []
    for run in helped:
        texts = run.tokens()
        figures.append(
            share_figure(
                f"loops, {run.name}",
                run.looping(),
                len(texts),
                why="greedy with it",
                better="lower",
            )
        )
        figures.append(_likelihood_cost(greedy, run))
    return figures


def _likelihood_cost(greedy: _LoopRun, run: _LoopRun) -> Figure:
    """Return the nats per token that a remedy costs, paired by text."""
    pairs = [
        mean_logprob(before) - mean_logprob(after)
        for before, after in zip(greedy.written.texts, run.written.texts, strict=True)
        if before.steps and after.steps
    ]
    return mean_figure(f"likelihood cost, {run.name}", pairs, "nats/token", why="paired by opening")


def _table(greedy: _LoopRun, helped: Sequence[_LoopRun]) -> list[list[str]]:
    rows = [
        [
            "greedy with",
            "loops",
            "repeated 4-grams",
            "log p per token",
            "variety",
            "tokens computed / kept",
        ]
    ]
    for run in (greedy, *helped):
        count = len(run.written.texts)
        price = run.written.computed / max(1, run.written.num_kept)
        rows.append(
            [
                "nothing" if run is greedy else run.name,
                f"{100 * run.looping() / count:.0f} %",
                f"{100 * float(np.mean(run.repeated() or [0.0])):.0f} %",
                f"{float(np.mean(run.written.mean_logprobs() or [0.0])):.2f}",
                f"{100 * distinct_n(run.tokens()):.0f} %",
                f"{price:.2f}",
            ]
        )
    return rows


def _by_temperature(heats: Sequence[float], runs: Sequence[_LoopRun]) -> list[Series]:
    line = partial(Series, x_label="temperature", y_label="share", plot="By temperature")
    loops = share_bounds([run.looping() for run in runs], len(runs[0].written.texts))
    repeats = mean_bounds([run.repeated() for run in runs])
    return [
        line("texts that end in a loop", heats, *loops),
        line("repeated 4-grams", heats, *repeats),
        line("variety (distinct-2)", heats, [distinct_n(run.tokens()) for run in runs]),
    ]


def _by_length(runs: Sequence[_LoopRun], lengths: Sequence[int]) -> list[Series]:
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


def _example(runs: Sequence[_LoopRun]) -> Example | None:
    """Return the text with the most repetition, of those that loop if any does."""
    every = [(run, text) for run in runs for text in run.written.texts if text.steps]
    if not every:
        return None
    looping = [(run, text) for run, text in every if loop_period(text.tokens) is not None]
    run, text = max(looping or every, key=lambda pair: repetition_rate(pair[1].tokens))
    size = loop_period(text.tokens)
    if size is None:
        caption = f"No text looped; the one that repeats the most ({run.name})."
        return Example(text.text, (), caption)
    start = loop_start(text.tokens, size)
    pieces = [step.text for step in text.steps]
    marks = []
    at = len("".join(pieces[:start]))
    for first in range(start, len(pieces), size):
        end = at + len("".join(pieces[first : first + size]))
        kind = "repetition" if (first - start) // size % 2 == 0 else "next repetition"
        marks.append(TextMark(at, end, kind, f"tokens {first} to {first + size - 1}"))
        at = end
    caption = f"{run.name}: from token {start} on the text repeats {size} tokens."
    return Example(text.text, marks, caption)
