"""Long context: how much of the distant context a model uses.

Three measurements: a needle in a haystack, a fact hidden in a long text and asked for at its end;
the NLL of tokens by position and by the amount of context; and the NLL when only a window of the
context is kept, with and without the first tokens (attention sinks).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from unspool.costs.part import (
    CostPart,
    Example,
    Figure,
    MeasurementPlan,
    Series,
    TextMark,
    bootstrap_means,
    interval_around,
    mean_figure,
    share_figure,
    wilson,
)
from unspool.costs.texts import excerpts, last_logits, token_nlls
from unspool.engine.request import SINKS
from unspool.lm import LanguageModel

_MAX_WEIGHT_BYTES = 2 << 30  # of a model to load a second time


def truncate_context(
    tokens: Sequence[int], judged: int, width: int, num_sinks: int = 0
) -> list[int]:
    """Return the last `judged` tokens of a text after `width` tokens of context.

    The context is the first `kept` tokens, and the ones directly before.
    """
    before, end = list(tokens[: len(tokens) - judged]), list(tokens[len(tokens) - judged :])
    if len(before) <= width:
        return [*before, *end]
    return [*before[:num_sinks], *before[len(before) - (width - num_sinks) :], *end]


def truncate_with_sinks(tokens: Sequence[int], judged: int, width: int) -> list[int]:
    """As `truncate_context`, with the attention sinks (the first four tokens) in the context."""
    return truncate_context(tokens, judged, width, min(SINKS, width // 2))


def load_with_window(lm: LanguageModel, width: int) -> LanguageModel | str:
    """Load the model again with sliding-window attention of `width` tokens in every layer.

    Returns the reason as text if that is not possible. The caller closes the model.
    """
    from unspool.loading import check_load_options, load_weights
    from unspool.model.files.checkpoint import open_checkpoint

    if lm.path is None or lm.adapter is not None:
        return "the model was not loaded from a file, so it cannot be loaded again"
    if any(lm.config.windows):
        return "the model already has sliding-window attention"
    checkpoint = open_checkpoint(lm.path)
    size = lm.path.stat().st_size if lm.path.is_file() else _folder_size(lm)
    if size > _MAX_WEIGHT_BYTES:
        return "the model is too large to be loaded again for this"
    checkpoint.config = replace(checkpoint.config, windows=(width,) * checkpoint.config.layers)
    load_options = check_load_options(device=lm.model.device)
    weights = load_weights(checkpoint, load_options, load_options.resolve())
    return LanguageModel(weights, lm.tokenizer, path=lm.path, context=lm.context, memory=256 << 20)


def _folder_size(lm: LanguageModel) -> int:
    assert lm.path is not None
    return sum(file.stat().st_size for file in lm.path.glob("*.safetensors"))


_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_PLACES = ("Lisbon", "Cairo", "Oslo", "Lima", "Seoul", "Quito", "Tunis", "Delhi")
_JUDGED = 32  # tokens at the end of a text whose NLL is measured
_NEAR = 0.05  # nats: as good as the full context
_TITLE = "Long context: how much of it is used"
_FORMULA = (
    "Needle: “The secret number of CITY is NNNN.” is inserted at a depth of a long text; found = "
    "every token of NNNN is the likeliest after the same words at the end. NLL(c) = mean −log p "
    f"of the last {_JUDGED} tokens of a text after only the c tokens before them; effective "
    f"length = the smallest c with NLL(c) ≤ NLL(all) + {_NEAR} nats. Windows: NLL of the same "
    "tokens when w tokens of context are kept."
)
_NOTE = (
    "`--endless` keeps the first and the last tokens and reads them again as one text: that is the "
    "curve “first 4 + last, read again”. The tokens in between are dropped, not summarized. "
    "“Windowed cache” is a cache that drops its oldest entries without computing the others again: "
    "without the first tokens, which serve as attention sinks, the model can break down completely "
    "(Xiao et al. 2023)."
)


def measure(lm: LanguageModel, plan: MeasurementPlan) -> CostPart:
    """Run all three measurements."""
    room = lm.context - 2 * _JUDGED
    lengths = [length for length in plan.pick((64, 192), (128, 512, 1024, 2048)) if length <= room]
    lengths = lengths or [max(64, room // 2)]
    needles = find_needles(lm, plan, lengths)
    far = min(room, plan.pick(192, 1024))
    texts = excerpts(lm, plan.texts, plan.pick(3, 8), far + _JUDGED)
    steps = plan.pick((8, 32, 64), (8, 16, 32, 64, 128, 256, 512))
    widths = [*[width for width in steps if width < far], far]
    positions = np.array([[-(value or 0.0) for value in lm.score(text).logprobs] for text in texts])
    plan.on_progress(0.6)
    losses = _by_shown(
        lm, texts, positions, widths, lambda share: plan.on_progress(0.6 + 0.2 * share)
    )
    window_sizes = [width for width in plan.pick((64,), (128, 512)) if width < far]
    windows = _measure_windows(
        lm, texts, dict(zip(widths, losses.T, strict=True)), window_sizes or widths[-2:-1]
    )
    plan.on_progress(1.0)
    figures = [_effective(losses, widths), *_needle_figures(needles), *windows.figures]
    series = [
        *_needle_series(needles), _shown_series(losses, widths), _by_position(positions),
        *windows.series,
    ]  # fmt: skip
    return CostPart(
        "fading", _TITLE, _FORMULA, figures, series, needles.example, [_NOTE, *windows.notes]
    )


@dataclass(frozen=True)
class Needles:
    """Results of the needle test: `hits` is [length, depth, try]."""

    lengths: Sequence[int]
    hits: NDArray[np.bool_]
    example: Example


def find_needles(lm: LanguageModel, plan: MeasurementPlan, lengths: Sequence[int]) -> Needles:
    """Insert a number at each depth of a text of each length, and ask for it."""
    tries = plan.pick(1, 2)
    hay = excerpts(lm, plan.texts, tries, max(lengths))
    random = np.random.default_rng(plan.seed)
    cases: list[tuple[list[int], list[int]]] = []  # the text, and the number's tokens
    for length in lengths:
        for depth in _DEPTHS:
            for straw in hay:
                place, number = random.choice(_PLACES), f" {random.integers(1000, 10000)}"
                cases.append(insert_needle(lm, straw, length, depth, str(place), number))
    hits: list[bool] = []
    for done, (text, answer) in enumerate(cases, start=1):
        (logits,) = last_logits(lm, [text], len(answer))
        hits.append([int(row.argmax()) for row in logits] == answer)
        plan.on_progress(0.5 * done / len(cases))
    middle = len(_DEPTHS) // 2 * tries
    shape = (len(lengths), len(_DEPTHS), tries)
    return Needles(lengths, np.array(hits).reshape(shape), _example(lm, *cases[middle]))


def insert_needle(
    lm: LanguageModel, straw: list[int], length: int, depth: float, place: str, number: str
) -> tuple[list[int], list[int]]:
    """Return a text of `length` tokens with the number at a depth, and question and answer at its
    end; and the answer's tokens."""
    words = f" The secret number of {place} is"
    statement = lm.tokenizer.encode(f"{words}{number}.")
    answer = lm.tokenizer.encode(number)
    question = lm.tokenizer.encode(f"\n\n{words.strip()}")
    room = max(8, length - len(statement) - len(question) - len(answer))
    at = 1 + round(depth * (room - 1))  # after the start token
    body = [*straw[:at], *statement, *straw[at:room]]
    return [*body, *question, *answer], answer


def _needle_figures(needles: Needles) -> list[Figure]:
    shares = needles.hits.reshape(len(needles.lengths), -1)
    return [
        share_figure(
            f"needle found in {length:,} tokens", int(row.sum()), row.size, better="higher",
            why="at five depths",
        )
        for length, row in zip(needles.lengths, shares, strict=True)
    ]  # fmt: skip


def _needle_series(needles: Needles) -> list[Series]:
    plot = "Needle in a haystack: share found by depth"
    series = []
    for length, rows in zip(needles.lengths, needles.hits, strict=True):
        bounds = [wilson(int(row.sum()), row.size) for row in rows]
        series.append(
            Series(
                f"{length:,} tokens", list(_DEPTHS), rows.mean(1).tolist(),
                [low for low, _ in bounds], [high for _, high in bounds],
                "depth: 0 at the beginning, 1 directly before the question", "found", plot,
            )
        )  # fmt: skip
    return series


def _example(lm: LanguageModel, text: list[int], answer: list[int]) -> Example:
    """Return a text with marks at the needle and at the answer."""
    decoded = lm.tokenizer.decode(text, specials=False)
    number = lm.tokenizer.decode(answer).strip()
    first, last = decoded.find(number), decoded.rfind(number)
    marks = [TextMark(first, first + len(number), "needle", "hidden here")]
    marks.append(TextMark(last, last + len(number), "asked for", "to be retrieved"))
    return Example(decoded, marks, "A number hidden in a text, and asked for at its end")


def _by_shown(
    lm: LanguageModel,
    texts: Sequence[list[int]],
    positions: NDArray[np.float64],
    widths: Sequence[int],
    tell: Callable[[float], object],
) -> NDArray[np.float64]:
    """Return the mean NLL at the end of each text by the width of the context: [text, width].

    The last width is the full context, which `positions` already has.
    """
    columns = []
    for number, width in enumerate(widths[:-1]):
        views = [truncate_context(text, _JUDGED, width) for text in texts]
        columns.append(token_nlls(lm, views, _JUDGED).mean(1))
        tell((number + 1) / len(widths))
    return np.array([*columns, positions[:, -_JUDGED:].mean(1)]).T


def effective_length(losses: NDArray[np.float64], widths: Sequence[int]) -> float:
    """Return the smallest width whose mean NLL is as good as with the full context."""
    means = losses.mean(0)
    return float(widths[int(np.flatnonzero(means <= means[-1] + _NEAR)[0])])


def _effective(losses: NDArray[np.float64], widths: Sequence[int]) -> Figure:
    length = effective_length(losses, widths)
    low, high = interval_around(length, losses, lambda rows: effective_length(rows, widths))
    bound = ": it may be longer" if length == widths[-1] else ""
    return Figure(
        "effective length", length, "tokens", low, high, len(losses),
        f"of {widths[-1]:,} tokens of context{bound}; bootstrap over texts", "higher",
    )  # fmt: skip


def _shown_series(losses: NDArray[np.float64], widths: Sequence[int]) -> Series:
    low, high = bootstrap_means(losses)
    return Series(
        "last c tokens", list(widths), losses.mean(0).tolist(), low.tolist(), high.tolist(),
        "tokens of context, c", "NLL, nats", "NLL by context length", log_x=True,
    )  # fmt: skip


def _by_position(positions: NDArray[np.float64]) -> Series:
    """Return the mean NLL by position, in doubling bins."""
    length = positions.shape[1]
    edges = [1, *[edge for edge in (8, 16, 32, 64, 128, 256, 512, 1024) if edge < length], length]
    pairs = list(itertools.pairwise(edges))
    rows = np.array([positions[:, a:b].mean(1) for a, b in pairs]).T
    low, high = bootstrap_means(rows)
    middle = [(a + b) / 2 for a, b in pairs]
    return Series(
        "full context", middle, rows.mean(0).tolist(), low.tolist(), high.tolist(),
        "position", "NLL, nats", "NLL by position", log_x=True,
    )  # fmt: skip


@dataclass(frozen=True)
class _WindowResults:
    figures: list[Figure]
    series: list[Series]
    notes: list[str]


def _measure_windows(
    lm: LanguageModel,
    texts: Sequence[list[int]],
    losses_by_width: Mapping[int, NDArray[np.float64]],
    widths: Sequence[int],
) -> _WindowResults:
    """Measure the NLL at the ends of the texts after a window of context.

    `shown` is the NLL after the last tokens by width, the full context included.
    """
    full = losses_by_width[max(losses_by_width)]
    rows: dict[str, list[NDArray[np.float64]]] = {
        "last, read again": [losses_by_width[width] for width in widths],
        "first 4 + last, read again": [],
    }
    notes: list[str] = []
    for width in widths:
        views = [truncate_with_sinks(text, _JUDGED, width) for text in texts]
        rows["first 4 + last, read again"].append(token_nlls(lm, views, _JUDGED).mean(1))
        narrow = load_with_window(lm, width)
        if isinstance(narrow, str):
            notes = [f"A windowed cache could not be measured: {narrow}."]
            continue
        with narrow:
            losses = token_nlls(narrow, texts, _JUDGED).mean(1)
        rows.setdefault("windowed cache, first tokens lost", []).append(losses)
    figures, series = [], []
    plot = "NLL after w tokens of context"
    for name, columns in rows.items():
        figures.append(
            mean_figure(
                f"lost: {name}", (columns[-1] - full).tolist(), "nats/token", better="lower",
                why=f"after {widths[-1]} tokens, minus after all {len(texts[0]) - _JUDGED:,}",
            )
        )  # fmt: skip
        low, high = bootstrap_means(np.array(columns).T)
        series.append(
            Series(
                name, widths, [float(column.mean()) for column in columns], low.tolist(),
                high.tolist(),
                "tokens kept, w", "NLL, nats", plot, log_x=True,
            )
        )  # fmt: skip
    flat = [float(full.mean())] * len(widths)
    series.append(Series("full context", widths, flat, plot=plot, log_x=True, kind="reference"))
    return _WindowResults(figures, series, notes)
