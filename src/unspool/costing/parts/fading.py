"""The fading context: how much of what stands far back still counts.

Three looks: a fact hidden in a long text and asked for at its end (a needle); the surprise at a
text's tokens by their position, and by how much of the text before them is shown; and what is left
of that when only a window is kept, with and without the first tokens (attention sinks).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unspool.costing.part import Example, Figure, Mark, Part, Series
from unspool.costing.plan import Plan
from unspool.costing.reading import last_logits, surprises
from unspool.costing.statistics import (
    bootstrap_means,
    interval_around,
    mean_figure,
    share_figure,
    wilson,
)
from unspool.costing.windows import last_of, sinks_and_last, with_window
from unspool.costing.writing import excerpts
from unspool.language_model import LanguageModel

_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_PLACES = ("Lisbon", "Cairo", "Oslo", "Lima", "Seoul", "Quito", "Tunis", "Delhi")
_JUDGED = 32  # tokens at the end of a text whose surprise is measured
_NEAR = 0.05  # nats: as good as the whole context
_TITLE = "The fading context"
_FORMULA = (
    "Needle: “The secret number of CITY is NNNN.” stands at a depth of a text of so many tokens; "
    "found = every token of NNNN is the likeliest behind the same words at the end. NLL(c) = mean "
    f"−log p of the last {_JUDGED} tokens of a text behind its last c tokens alone; effective "
    f"length = the smallest c with NLL(c) ≤ NLL(all) + {_NEAR} nats. Windows: NLL of the same "
    "tokens when w of those before them are kept."
)
_FORGOTTEN = (
    "`--endless` keeps the first tokens and the last ones and reads them again as one text: "
    "that is the curve “first 4 + last, read again”. What lies between is gone, not summarized. "
    "“Windowed cache” is what a cache does that drops its oldest entries while everything else "
    "stays as computed: without the first tokens, on which models rest attention that nothing else "
    "wants, it can break down altogether (Xiao et al. 2023)."
)


def measure(lm: LanguageModel, plan: Plan) -> Part:
    """All three looks."""
    room = lm.context - 2 * _JUDGED
    lengths = [length for length in plan.pick((64, 192), (128, 512, 1024, 2048)) if length <= room]
    lengths = lengths or [max(64, room // 2)]
    needles = find_needles(lm, plan, lengths)
    far = min(room, plan.pick(192, 1024))
    texts = excerpts(lm, plan.texts, plan.pick(3, 8), far + _JUDGED)
    steps = plan.pick((8, 32, 64), (8, 16, 32, 64, 128, 256, 512))
    widths = [*[width for width in steps if width < far], far]
    positions = np.array([[-(value or 0.0) for value in lm.score(text).logprobs] for text in texts])
    plan.tell(0.6)
    shown = _by_shown(lm, texts, positions, widths, lambda share: plan.tell(0.6 + 0.2 * share))
    kept = [width for width in plan.pick((64,), (128, 512)) if width < far]
    windows = _windows(lm, texts, dict(zip(widths, shown.T, strict=True)), kept or widths[-2:-1])
    plan.tell(1.0)
    figures = [_effective(shown, widths), *_needle_figures(needles), *windows.figures]
    series = [
        *_needle_series(needles), _shown_series(shown, widths), _by_position(positions),
        *windows.series,
    ]  # fmt: skip
    return Part(
        "fading", _TITLE, _FORMULA, figures, series, needles.example, [_FORGOTTEN, *windows.notes]
    )


# -- a needle -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Needles:
    """Whether each needle was found: [length, depth, try]."""

    lengths: Sequence[int]
    found: NDArray[np.bool_]
    example: Example


def find_needles(lm: LanguageModel, plan: Plan, lengths: Sequence[int]) -> Needles:
    """Hide a number at each depth of a text of each length, and ask for it."""
    tries = plan.pick(1, 2)
    hay = excerpts(lm, plan.texts, tries, max(lengths))
    random = np.random.default_rng(plan.seed)
    asked: list[tuple[list[int], list[int]]] = []  # what is read, and the number's tokens
    for length in lengths:
        for depth in _DEPTHS:
            for straw in hay:
                place, number = random.choice(_PLACES), f" {random.integers(1000, 10000)}"
                asked.append(needle(lm, straw, length, depth, str(place), number))
    found: list[bool] = []
    for done, (text, answer) in enumerate(asked, start=1):
        (logits,) = last_logits(lm, [text], len(answer))
        found.append([int(row.argmax()) for row in logits] == answer)
        plan.tell(0.5 * done / len(asked))
    middle = len(_DEPTHS) // 2 * tries
    shape = (len(lengths), len(_DEPTHS), tries)
    return Needles(lengths, np.array(found).reshape(shape), _example(lm, *asked[middle]))


def needle(
    lm: LanguageModel, straw: list[int], length: int, depth: float, place: str, number: str
) -> tuple[list[int], list[int]]:
    """A text of so many tokens with the number at a depth, asked for at its end and answered; and
    the answer's tokens."""
    words = f" The secret number of {place} is"
    said = lm.tokenizer.encode(f"{words}{number}.")
    answer = lm.tokenizer.encode(number)
    question = lm.tokenizer.encode(f"\n\n{words.strip()}")
    room = max(8, length - len(said) - len(question) - len(answer))
    at = 1 + round(depth * (room - 1))  # the first token of a text stays its first
    body = [*straw[:at], *said, *straw[at:room]]
    return [*body, *question, *answer], answer


def _needle_figures(needles: Needles) -> list[Figure]:
    whole = needles.found
    shares = whole.reshape(len(needles.lengths), -1)
    figures = [
        share_figure(
            f"needle found in {length:,} tokens", int(row.sum()), row.size, better="higher",
            why="at five depths",
        )
        for length, row in zip(needles.lengths, shares, strict=True)
    ]  # fmt: skip
    return figures


def _needle_series(needles: Needles) -> list[Series]:
    plot = "A needle by depth: share found"
    series = []
    for length, rows in zip(needles.lengths, needles.found, strict=True):
        bounds = [wilson(int(row.sum()), row.size) for row in rows]
        series.append(
            Series(
                f"{length:,} tokens", list(_DEPTHS), rows.mean(1).tolist(),
                [low for low, _ in bounds], [high for _, high in bounds],
                "depth: 0 at the beginning, 1 right before the question", "found", plot,
            )
        )  # fmt: skip
    return series


def _example(lm: LanguageModel, text: list[int], answer: list[int]) -> Example:
    """A text with its needle marked, and the answer that was asked for."""
    whole = lm.tokenizer.decode(text, specials=False)
    number = lm.tokenizer.decode(answer).strip()
    first, last = whole.find(number), whole.rfind(number)
    marks = [Mark(first, first + len(number), "needle", "hidden here")]
    marks.append(Mark(last, last + len(number), "asked for", "to be found again"))
    return Example(whole, marks, "A number hidden in a text, and asked for at its end")


# -- how much of what came before counts ----------------------------------------------------


def _by_shown(
    lm: LanguageModel,
    texts: Sequence[list[int]],
    positions: NDArray[np.float64],
    widths: Sequence[int],
    tell: Callable[[float], object],
) -> NDArray[np.float64]:
    """The mean surprise at each text's end behind its last so many tokens: [text, width].

    The last width is everything, which was read for the surprise by position.
    """
    columns = []
    for number, width in enumerate(widths[:-1]):
        views = [last_of(text, _JUDGED, width) for text in texts]
        columns.append(surprises(lm, views, _JUDGED).mean(1))
        tell((number + 1) / len(widths))
    return np.array([*columns, positions[:, -_JUDGED:].mean(1)]).T


def effective_length(losses: NDArray[np.float64], widths: Sequence[int]) -> float:
    """The fewest tokens behind which the mean text is as good as behind all of them."""
    means = losses.mean(0)
    return float(widths[int(np.flatnonzero(means <= means[-1] + _NEAR)[0])])


def _effective(losses: NDArray[np.float64], widths: Sequence[int]) -> Figure:
    found = effective_length(losses, widths)
    low, high = interval_around(found, losses, lambda rows: effective_length(rows, widths))
    more = ": it may be more" if found == widths[-1] else ""
    return Figure(
        "effective length", found, "tokens", low, high, len(losses),
        f"of {widths[-1]:,} that were shown{more}; bootstrap over texts", "higher",
    )  # fmt: skip


def _shown_series(losses: NDArray[np.float64], widths: Sequence[int]) -> Series:
    low, high = bootstrap_means(losses)
    return Series(
        "last c tokens shown", list(widths), losses.mean(0).tolist(), low.tolist(), high.tolist(),
        "tokens shown, c", "NLL, nats", "How much of what came before counts", log_x=True,
    )  # fmt: skip


def _by_position(positions: NDArray[np.float64]) -> Series:
    """The mean surprise by where a token stands, in steps that double."""
    length = positions.shape[1]
    edges = [1, *[edge for edge in (8, 16, 32, 64, 128, 256, 512, 1024) if edge < length], length]
    pairs = list(itertools.pairwise(edges))
    rows = np.array([positions[:, a:b].mean(1) for a, b in pairs]).T
    low, high = bootstrap_means(rows)
    middle = [(a + b) / 2 for a, b in pairs]
    return Series(
        "all before it shown", middle, rows.mean(0).tolist(), low.tolist(), high.tolist(),
        "position", "NLL, nats", "NLL by position", log_x=True,
    )  # fmt: skip


# -- windows --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Windows:
    figures: list[Figure]
    series: list[Series]
    notes: list[str]


def _windows(
    lm: LanguageModel,
    texts: Sequence[list[int]],
    shown: Mapping[int, NDArray[np.float64]],
    widths: Sequence[int],
) -> _Windows:
    """The same ends of the same texts behind a few kept tokens; `shown` has the surprise there
    behind the last so many, and behind all of them."""
    whole = shown[max(shown)]
    rows: dict[str, list[NDArray[np.float64]]] = {
        "last, read again": [shown[width] for width in widths], "first 4 + last, read again": [],
    }  # fmt: skip
    notes: list[str] = []
    for width in widths:
        views = [sinks_and_last(text, _JUDGED, width) for text in texts]
        rows["first 4 + last, read again"].append(surprises(lm, views, _JUDGED).mean(1))
        narrow = with_window(lm, width)
        if isinstance(narrow, str):
            notes = [f"A windowed cache could not be measured: {narrow}."]
            continue
        with narrow:
            losses = surprises(narrow, texts, _JUDGED).mean(1)
        rows.setdefault("windowed cache, first ones lost", []).append(losses)
    figures, series = [], []
    plot = "NLL behind w kept tokens"
    for name, columns in rows.items():
        figures.append(
            mean_figure(
                f"lost: {name}", (columns[-1] - whole).tolist(), "nats a token", better="lower",
                why=f"behind {widths[-1]} tokens, less behind all {len(texts[0]) - _JUDGED:,}",
            )
        )  # fmt: skip
        low, high = bootstrap_means(np.array(columns).T)
        series.append(
            Series(
                name, widths, [float(one.mean()) for one in columns], low.tolist(), high.tolist(),
                "tokens kept, w", "NLL, nats", plot, log_x=True,
            )
        )  # fmt: skip
    everything = [float(whole.mean())] * len(widths)
    series.append(Series("everything", widths, everything, plot=plot, log_x=True, kind="reference"))
    return _Windows(figures, series, notes)
