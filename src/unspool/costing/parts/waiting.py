"""Waiting: each token waits for the one before. How long, for what, and what would be possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from unspool.costing.drafted import Drafted, drafted
from unspool.costing.limits import bandwidth, bytes_per_token, weight_bytes
from unspool.costing.part import Example, Figure, Mark, Part, Series
from unspool.costing.plan import Plan
from unspool.costing.split import Split, split_at
from unspool.costing.statistics import bootstrap, mean_bounds, median_figure
from unspool.costing.writing import excerpts, write
from unspool.language_model import LanguageModel

_MS = 1000.0
_FORMULA = (
    "Per token = median seconds between two tokens. Split: seconds in the products with weights, "
    "in attention, and in picking the token; everything else = the rest. Perfect machine = (bytes "
    "of weights + bytes of keys and values of the past) / measured memory bandwidth. What drafts "
    "save = seconds without / seconds with, for the same text."
)


@dataclass(frozen=True)
class Behind:
    """Times in ms behind a past of so many tokens: to the first token, and of those after it."""

    past: int
    first: list[float]
    after: list[float]


def measure(lm: LanguageModel, plan: Plan) -> Part:
    page = lm.engine.backend.page_size
    pasts = _pasts(plan.pick((64, 192), (64, 256, 1024, 4096)), lm.context, page)
    prompts = excerpts(lm, _joined(plan.texts, pasts[-1]), 40, min(33, pasts[-1]))
    write(lm, prompts[:2], max_tokens=4, end=False)  # the first text waits for threads and memory
    grown = []
    for number, past in enumerate(pasts):
        rounds = plan.pick(2, 4) if past <= 100 else plan.pick(1, 3) if past <= 1100 else 1
        grown.append(_behind(lm, plan, past, rounds, number))
        plan.tell(0.4 * (number + 1) / len(pasts))
    speeds = bandwidth(lm)
    splits = [split_at(lm, _text_of(lm, plan, past, 0), plan.pick(16, 32)) for past in pasts[:3]]
    plan.tell(0.55)
    sizes = [size for size in plan.pick((1, 4), (1, 2, 4, 8, 16)) if size <= len(prompts)]
    batches = [_batch_ms(lm, prompts[:size], plan.pick(16, 24)) for size in sizes]
    plan.tell(0.75)
    bare = [_uncached(lm, plan, past) for past in pasts[plan.pick(1, 0) : 3] if past <= 1100]
    plan.tell(0.85)
    ids = _text_of(lm, plan, min(129, pasts[-1]), 3)
    drafts = drafted(lm, ids, plan.pick(1, 3), plan.pick(16, 32))
    limit = _limit(lm, pasts, speeds)
    return Part(
        "waiting",
        "Waiting: each token waits for the one before",
        _FORMULA,
        [
            *_token_figures(lm, grown, speeds),
            *_split_figures(splits),
            *_cache_figures(grown, bare),
            *_batch_figures(sizes, batches),
            *(figure for one in drafts for figure in one.figures()),
        ],
        [*_growth(grown, bare, limit), *_split_series(splits), *_batch_series(sizes, batches)],
        _example(drafts),
        _notes(lm, splits, speeds, drafts),
    )


def _pasts(wanted: Sequence[int], context: int, page: int) -> list[int]:
    """Lengths that the context holds, each one token more than whole pages: when such a text is
    read again, its last token alone is computed."""
    room = context - 40
    found = sorted({min(past, room // page * page) // page * page + 1 for past in wanted})
    return [past for past in found if past > 1] or [min(wanted[0], max(1, room))]


def _joined(texts: Sequence[str], tokens: int) -> list[str]:
    """Texts put together, again and again if need be, where single ones are too short."""
    long = [text for text in texts if len(text) > 8 * tokens]
    whole = "\n\n".join(texts)
    return long or ["\n\n".join([whole] * (2 + 16 * tokens // len(whole)))]


def _text_of(lm: LanguageModel, plan: Plan, past: int, number: int) -> list[int]:
    """A stretch of human text of so many tokens; other numbers give other texts, as far as there
    are any."""
    found = excerpts(lm, _joined(plan.texts, past), number + 1, past)
    return found[number % len(found)]


def _behind(lm: LanguageModel, plan: Plan, past: int, rounds: int, number: int) -> Behind:
    """Each round has a text of its own, so that nothing of it was read before."""
    first, after = [], []
    for turn in range(rounds):
        ids = _text_of(lm, plan, past, 4 * number + turn)
        # The first token names the round: what follows it cannot be found in the cache.
        ids = [(ids[1] + 7 * number + turn) % lm.vocab_size, *ids[1:]]
        text = lm.generate(ids, max_tokens=16, seed=plan.seed, end=False)
        times = [step.seconds * _MS for step in text.steps]
        first.append(times[0])
        after += times[1:]
    return Behind(past, first, after)


def _batch_ms(lm: LanguageModel, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Ms of a step that writes a token for each; the prompts were read the first time."""
    for count in (1, tokens):
        written = write(lm, prompts, max_tokens=count, seed=0, end=False)
    return _MS * written.seconds / tokens


def _uncached(lm: LanguageModel, plan: Plan, past: int) -> Behind:
    ids = _text_of(lm, plan, past, 0)
    text = lm.generate(ids, max_tokens=plan.pick(3, 5), seed=plan.seed, cache=False, end=False)
    times = [step.seconds * _MS for step in text.steps]
    return Behind(past, times[:1], times[1:])


def _limit(lm: LanguageModel, pasts: Sequence[int], speeds: Sequence[float]) -> Series:
    best = max(speeds)
    return Series(
        "perfect machine",
        pasts,
        [_MS * bytes_per_token(lm, past) / best for past in pasts],
        x_label="tokens read before",
        y_label="ms a token",
        plot="A token, by context",
        log_x=True,
        kind="reference",
    )


# -- figures --------------------------------------------------------------------------------------


def _token_figures(
    lm: LanguageModel, grown: Sequence[Behind], speeds: Sequence[float]
) -> list[Figure]:
    found = [
        median_figure(
            f"first token behind {one.past} tokens", one.first, "ms",
            why="nothing of the prompt was read before", better="lower",
        )
        for one in (grown[0], grown[-1])
    ]  # fmt: skip
    found += [
        median_figure(f"per token behind {one.past}", one.after, "ms", better="lower")
        for one in (grown[0], grown[-1])
    ]
    short, best = grown[0], max(speeds)
    limit = bytes_per_token(lm, short.past) / best
    ratio = np.array(short.after) / _MS / limit
    low, high = bootstrap(ratio, lambda rows: float(np.median(rows)), draws=500)
    return [
        *found,
        Figure("memory bandwidth", best / 1e9, "GB/s", min(speeds) / 1e9, best / 1e9, len(speeds),
               "the best of the runs; the interval is from the slowest to the best"),
        Figure("bytes read for a token", weight_bytes(lm) / 1e6, "MB", why="of the weights"),
        Figure("a perfect machine, per token", limit * _MS, "ms", why="bytes over bandwidth"),
        Figure("times the perfect machine", float(np.median(ratio)), "×", low, high, len(ratio),
               "median, bootstrap", "lower"),
    ]  # fmt: skip


def _split_figures(splits: Sequence[Split]) -> list[Figure]:
    split = splits[-1]
    return [
        Figure(f"{name}, behind {split.past}", value, "ms", n=split.steps, why=why)
        for name, value, why in split.rows()
    ]


def _cache_figures(grown: Sequence[Behind], bare: Sequence[Behind]) -> list[Figure]:
    found = []
    for one in bare[-1:]:
        with_cache = next(other for other in grown if other.past == one.past)
        found.append(median_figure(f"per token behind {one.past} without cache", one.after, "ms"))
        times = np.array(one.after) / float(np.median(with_cache.after))
        found.append(
            median_figure(
                f"what the cache saves behind {one.past}", times.tolist(), "×", better="higher",
                why="the whole text is read again for every token, against reading one",
            )
        )  # fmt: skip
    return found


def _batch_figures(sizes: Sequence[int], batches: Sequence[float]) -> list[Figure]:
    size, ms = sizes[-1], batches[-1]
    return [
        Figure(f"{size} texts at once", _MS * size / ms, "tokens/s", why="all together, one run"),
        Figure("one text", _MS / batches[0], "tokens/s", why="the same way"),
    ]


# -- pictures -------------------------------------------------------------------------------------


def _growth(grown: Sequence[Behind], bare: Sequence[Behind], limit: Series) -> list[Series]:
    pasts = [one.past for one in grown]
    line = partial(Series, x_label="tokens read before", log_x=True)
    found = [
        line("to the first token", pasts, *mean_bounds([one.first for one in grown]),
             y_label="ms", plot="To the first token, by prompt"),
        line("with cache", pasts, *mean_bounds([one.after for one in grown]),
             y_label="ms a token", plot=limit.plot),
        limit,
    ]  # fmt: skip
    if len(bare) > 1:
        found.append(
            line("without cache", [one.past for one in bare],
                 *mean_bounds([one.after for one in bare]), y_label="ms a token",
                 plot="A token without the cache")
        )  # fmt: skip
    return found


def _split_series(splits: Sequence[Split]) -> list[Series]:
    pasts = [split.past for split in splits]
    line = partial(
        Series, x_label="tokens read before", y_label="ms a token", plot="Where the time goes"
    )
    names = [name for name, value, _ in splits[0].rows() if value is not None]
    columns: list[list[Any]] = [
        [dict((row[0], row[1]) for row in split.rows())[name] for split in splits] for name in names
    ]
    return [
        line(name, pasts, column, kind="bars") for name, column in zip(names, columns, strict=True)
    ]


def _batch_series(sizes: Sequence[int], batches: Sequence[float]) -> list[Series]:
    line = partial(Series, x_label="texts at once", plot="Batches", y_label="tokens/s")
    return [
        line("all together", sizes, [_MS * n / ms for n, ms in zip(sizes, batches, strict=True)]),
        line("each of them", sizes, [_MS / ms for ms in batches]),
    ]


def _example(drafts: Sequence[Drafted]) -> Example | None:
    if not drafts:
        return None
    chosen = max(drafts, key=lambda one: one.accepted)
    text, marks = "", []
    for step in chosen.text.steps:
        start = len(text)
        text += step.text
        if step.draft == "accepted" and len(text) > start:
            marks.append(Mark(start, len(text), "came with a draft"))
    caption = (
        f"What is marked was guessed ({chosen.name}) and only checked: {chosen.accepted:.0%} of "
        "the tokens did not wait for the one before. The text is the same as without."
    )
    return Example(text, marks, caption)


def _notes(
    lm: LanguageModel, splits: Sequence[Split], speeds: Sequence[float], drafts: Sequence[Drafted]
) -> list[str]:
    found = [
        "Times are this machine's, with whatever else ran on it: compare only what was measured "
        "together.",
        "Bandwidth: 128 MB read by as many threads as the model has. A cache that holds the whole "
        "model can be quicker than this perfect machine.",
    ]
    if not splits[0].profiled:
        found.append(
            f"On {lm.model.device} the operations are not timed one by one: attention is what "
            "grows with the context, and weights are in everything else."
        )
    if len(speeds) > 1 and min(speeds) < 0.6 * max(speeds):
        found.append("The machine was busy while this was measured: the bandwidth swayed.")
    if not drafts:
        found.append("Drafts could not be tried with this model.")
    return found
