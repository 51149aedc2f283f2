"""Latency: time to first token, time per token by operation, and the lower bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from unspool.costs.part import (
    CostPart,
    Example,
    Figure,
    MeasurementPlan,
    Series,
    TextMark,
    bootstrap,
    mean_bounds,
    median_figure,
)
from unspool.costs.texts import excerpts, generate_batch
from unspool.engine.generation import Generation
from unspool.errors import UnspoolError
from unspool.lm import LanguageModel
from unspool.sampling.picker import SamplingRows, encode_settings, pick_tokens
from unspool.session import Session

if TYPE_CHECKING:
    from unspool.backends.cpu.model import CpuModel


# -- The lower bound of the time per token: bytes to read divided by memory bandwidth

_BLOCK = 128_000_000  # bytes: larger than processor caches
_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}


def bytes_per_token(lm: Session, past: int) -> int:
    """Return the bytes to read for one token after `past` tokens."""
    backend = lm.engine.backend
    return weight_bytes(lm) + past * backend.page_bytes // backend.page_size


def weight_bytes(lm: Session) -> int:
    """Return the bytes of the weights read per token: all matrices, of experts the active ones.

    Of the embedding only one row is read, unless it is also the output head.
    """
    if is_native(lm):
        return _packed_bytes(lm.model)  # type: ignore[arg-type]
    from unspool.model.weights import parameter_count, weight_shapes

    config = lm.config
    share = config.experts_per_token / config.experts if config.experts else 1.0
    read = 0.0
    for name, shape in weight_shapes(config).items():
        if name == "embed.weight" and not config.tied:
            continue
        read += math.prod(shape) * (share if len(shape) == 3 else 1.0)
    if lm.model.precision in _BYTES:
        return round(read * _BYTES[lm.model.precision])
    from unspool.model.hub.inspect import summarize_model

    stored = summarize_model(lm.path).bytes if lm.path is not None else 2 * parameter_count(config)
    return round(read * stored / parameter_count(config))


def is_native(lm: Session) -> bool:
    """Return whether the native CPU backend runs the model; it can profile each operation."""
    return hasattr(lm.model, "plan") and hasattr(lm.engine.backend, "profile")


def _packed_bytes(model: CpuModel) -> int:
    total = 0.0
    for operation in model.plan.operations:
        if operation.kind in ("linear", "route", "experts"):
            nbytes = sum(model.packed[name].nbytes for name in operation.matrices)
            experts, per_token = operation.experts, operation.experts_per_token
            total += nbytes * (per_token / experts if experts else 1)
    return round(total)


def bandwidth(lm: Session, repeat: int = 7) -> list[float]:
    """Measure memory bandwidth in bytes per second, by reading a block larger than any cache."""
    read = _native_reader(lm) if is_native(lm) else _torch_reader(lm)
    read()
    speeds = []
    for _ in range(repeat):
        started = perf_counter()
        read()
        speeds.append(_BLOCK / (perf_counter() - started))
    return speeds


def _native_reader(lm: Session) -> Callable[[], object]:
    from unspool.backends.cpu.structures import address_of, native_functions

    block = np.ones(_BLOCK, np.uint8)  # written, as untouched memory is one page of zeros
    threads = int(getattr(lm.model, "threads", 1))
    return lambda: native_functions().unspool_read_memory(
        address_of(block), block.nbytes, threads, 1
    )


def _torch_reader(lm: Session) -> Callable[[], object]:
    import torch

    block = torch.ones(_BLOCK // 4, device=lm.model.device)

    def read() -> Any:
        return block.sum().item()  # item() waits for the device

    return read


# -- The time per token by operation: weights, attention, sampling, everything else

_MS_PER_S = 1000.0
_WEIGHTS = ("linear", "embed", "route", "experts", "combine")
_ATTENTION = ("attention", "rope")
_PICKS = 15  # repetitions of the sampling measurement


@dataclass(frozen=True)
class TimeSplit:
    """Milliseconds per token after `past` tokens, by operation; None if not measurable."""

    past: int
    total: float
    weights: float | None
    attention: float
    sampling: float | None
    steps: int
    profiled: bool

    def rows(self) -> list[tuple[str, float | None, str]]:
        """Return name, milliseconds and method of each operation."""
        how = "each operation was timed" if self.profiled else "what grows with the context"
        remainder = self.total - self.attention - (self.weights or 0.0) - (self.sampling or 0.0)
        hidden = "not measured separately: in everything else"
        alone = "sampling timed alone, on this model's logits"
        return [
            ("reading weights", self.weights, how if self.profiled else hidden),
            ("attention", self.attention, how),
            ("sampling", self.sampling, hidden if self.sampling is None else alone),
            ("everything else", max(0.0, remainder), "norms, Python, scheduling"),
        ]


def measure_split(lm: LanguageModel, ids: Sequence[int], tokens: int) -> TimeSplit:
    """Measure the time per token after these tokens, by operation."""
    options: Any = {"max_tokens": tokens, "temperature": 0.8, "seed": 0, "end": False}
    lm.generate(ids, **{**options, "max_tokens": 1})  # fills the prefix cache
    if is_native(lm):
        return _profiled(lm, ids, options)
    short = _mean(lm, ids[: max(1, len(ids) // 4)], options)
    total = _mean(lm, ids, options)
    slope = max(0.0, total - short) / max(1, len(ids) - len(ids) // 4)
    sampling = _sampling_ms(lm, ids) if lm.model.device == "cpu" else None
    return TimeSplit(len(ids), total, None, slope * len(ids), sampling, tokens, False)


def _profiled(lm: LanguageModel, ids: Sequence[int], options: Any) -> TimeSplit:
    backend: Any = lm.engine.backend
    plan: Any = getattr(lm.model, "plan")  # noqa: B009 (the native model's)
    backend.profile()  # reset
    total = _mean(lm, ids, options)
    seconds = backend.profile()
    kinds = [operation.kind for operation in plan.operations]
    steps = int(options["max_tokens"])

    def ms_of(selected: Sequence[str]) -> float:
        times = [s for s, kind in zip(seconds, kinds, strict=True) if kind in selected]
        return _MS_PER_S * float(sum(times)) / steps

    return TimeSplit(
        len(ids), total, ms_of(_WEIGHTS), ms_of(_ATTENTION), _sampling_ms(lm, ids), steps, True
    )


def _mean(lm: LanguageModel, ids: Sequence[int], options: Any) -> float:
    """Return the mean milliseconds between two tokens, without the prefill."""
    text = lm.generate(ids, **options)
    return _MS_PER_S * float(np.mean([step.seconds for step in text.steps[1:]] or [0.0]))


def _sampling_ms(lm: LanguageModel, ids: Sequence[int]) -> float:
    """Return the milliseconds to sample one token from this model's logits, default settings."""
    settings = lm.prepare_generation(ids, seed=0).request.settings
    with lm.open_branch(ids[-16:]) as branch:
        logits: Any = lm.engine.extend(branch)
    floats, ints = encode_settings(settings, 0)
    rows = SamplingRows(np.array([floats]), np.array([ints], np.int64), np.empty(0, np.int64))
    times = []
    for _ in range(_PICKS):
        started = perf_counter()
        pick_tokens(logits, rows, int(getattr(lm.model, "threads", 1)))
        times.append(perf_counter() - started)
    return _MS_PER_S * float(np.median(times))


# -- The speedup of speculative decoding: the same text with and without drafts


@dataclass(frozen=True)
class DraftResult:
    """One drafter on one kind of text."""

    name: str
    savings: list[float]  # per round: seconds without / with drafts
    text: Generation

    @property
    def accepted(self) -> float:
        """The share of tokens that came from a draft."""
        steps = self.text.steps
        return sum(step.draft == "accepted" for step in steps) / max(1, len(steps))

    def figures(self) -> list[Figure]:
        count = len(self.text.steps)
        return [
            median_figure(f"speed with {self.name}", self.savings, "×", better="higher",
                          why="seconds without / with, the same text"),
            Figure(f"accepted from {self.name}", self.accepted, "%", n=count, why="of the tokens"),
        ]  # fmt: skip


def measure_drafts(
    lm: LanguageModel, ids: Sequence[int], rounds: int, tokens: int
) -> list[DraftResult]:
    """Measure drafters on free text and on text to copy; MTP layers if the model has them."""
    half = len(ids) // 2
    copying = [*ids[:half], *ids[:half], *ids[: half // 2]]  # the third copy can be looked up
    results = []
    for drafter, spec in (("lookup drafts", "lookup"), ("MTP drafts", "mtp")):
        with suppress(UnspoolError):  # a model without MTP layers, or that cannot be rewound
            results.append(_measure_drafter(lm, f"{drafter}, free text", ids, spec, rounds, tokens))
            results.append(
                _measure_drafter(lm, f"{drafter}, copying", copying, spec, rounds, tokens)
            )
    return results


def _measure_drafter(
    lm: LanguageModel, name: str, ids: Sequence[int], spec: str, rounds: int, tokens: int
) -> DraftResult:
    savings = []
    lm.generate(ids, max_tokens=1)  # prefill before both
    for _ in range(rounds):
        plain = lm.generate(ids, max_tokens=tokens, temperature=0.0, end=False)
        text = lm.generate(ids, max_tokens=tokens, temperature=0.0, end=False, speculate=spec)
        savings.append(plain.usage.total_seconds / text.usage.total_seconds)
    return DraftResult(name, savings, text)


_MS = 1000.0
_FORMULA = (
    "Per token = median seconds between two tokens. Split: seconds in matrix products with "
    "weights, in attention and in sampling; everything else = the remainder. Lower bound = (bytes "
    "of weights + bytes of KV cache) / measured memory bandwidth. Speedup by drafts = seconds "
    "without / seconds with, for the same text."
)


@dataclass(frozen=True)
class Latency:
    """Times in ms after `past` tokens of context: to the first token, and of those after it."""

    past: int
    first: list[float]
    after: list[float]


def measure(lm: LanguageModel, plan: MeasurementPlan) -> CostPart:
    page = lm.engine.backend.page_size
    pasts = _pasts(plan.pick((64, 192), (64, 256, 1024, 4096)), lm.context, page)
    prompts = excerpts(lm, _joined(plan.texts, pasts[-1]), 40, min(33, pasts[-1]))
    generate_batch(lm, prompts[:2], max_tokens=4, end=False)  # warm up threads and memory
    grown = []
    for number, past in enumerate(pasts):
        rounds = plan.pick(2, 4) if past <= 100 else plan.pick(1, 3) if past <= 1100 else 1
        grown.append(_measure_latency(lm, plan, past, rounds, number))
        plan.on_progress(0.4 * (number + 1) / len(pasts))
    speeds = bandwidth(lm)
    splits = [
        measure_split(lm, _text_of(lm, plan, past, 0), plan.pick(16, 32)) for past in pasts[:3]
    ]
    plan.on_progress(0.55)
    sizes = [size for size in plan.pick((1, 4), (1, 2, 4, 8, 16)) if size <= len(prompts)]
    batches = [_batch_ms(lm, prompts[:size], plan.pick(16, 24)) for size in sizes]
    plan.on_progress(0.75)
    bare = [_uncached(lm, plan, past) for past in pasts[plan.pick(1, 0) : 3] if past <= 1100]
    plan.on_progress(0.85)
    ids = _text_of(lm, plan, min(129, pasts[-1]), 3)
    drafts = measure_drafts(lm, ids, plan.pick(1, 3), plan.pick(16, 32))
    limit = _limit(lm, pasts, speeds)
    return CostPart(
        "waiting",
        "Waiting: latency of sequential decoding",
        _FORMULA,
        [
            *_token_figures(lm, grown, speeds),
            *_split_figures(splits),
            *_cache_figures(grown, bare),
            *_batch_figures(sizes, batches),
            *(figure for draft in drafts for figure in draft.figures()),
        ],
        [*_growth(grown, bare, limit), *_split_series(splits), *_batch_series(sizes, batches)],
        _example(drafts),
        _notes(lm, splits, speeds, drafts),
    )


def _pasts(requested: Sequence[int], context: int, page: int) -> list[int]:
    """Return context lengths that fit, each one token more than full pages.

    A text of such a length is found in the prefix cache up to its last token.
    """
    room = context - 40
    lengths = sorted({min(past, room // page * page) // page * page + 1 for past in requested})
    return [past for past in lengths if past > 1] or [min(requested[0], max(1, room))]


def _joined(texts: Sequence[str], tokens: int) -> list[str]:
    """Return the texts that are long enough, or all texts joined and repeated."""
    long = [text for text in texts if len(text) > 8 * tokens]
    joined = "\n\n".join(texts)
    return long or ["\n\n".join([joined] * (2 + 16 * tokens // len(joined)))]


def _text_of(lm: LanguageModel, plan: MeasurementPlan, past: int, number: int) -> list[int]:
    """Return an excerpt of `past` tokens; different numbers give different texts if possible."""
    candidates = excerpts(lm, _joined(plan.texts, past), number + 1, past)
    return candidates[number % len(candidates)]


def _measure_latency(
    lm: LanguageModel, plan: MeasurementPlan, past: int, rounds: int, number: int
) -> Latency:
    """Measure latency; each round has a new text, so that nothing of it is cached."""
    first, after = [], []
    for turn in range(rounds):
        ids = _text_of(lm, plan, past, 4 * number + turn)
        # A different first token per round: no prefix can be in the cache.
        ids = [(ids[1] + 7 * number + turn) % lm.vocab_size, *ids[1:]]
        text = lm.generate(ids, max_tokens=16, seed=plan.seed, end=False)
        times = [step.seconds * _MS for step in text.steps]
        first.append(times[0])
        after += times[1:]
    return Latency(past, first, after)


def _batch_ms(lm: LanguageModel, prompts: Sequence[Sequence[int]], tokens: int) -> float:
    """Return the ms of a decode step for all prompts, without prefill."""
    for count in (1, tokens):
        written = generate_batch(lm, prompts, max_tokens=count, seed=0, end=False)
    return _MS * written.seconds / tokens


def _uncached(lm: LanguageModel, plan: MeasurementPlan, past: int) -> Latency:
    ids = _text_of(lm, plan, past, 0)
    text = lm.generate(ids, max_tokens=plan.pick(3, 5), seed=plan.seed, cache=False, end=False)
    times = [step.seconds * _MS for step in text.steps]
    return Latency(past, times[:1], times[1:])


def _limit(lm: LanguageModel, pasts: Sequence[int], speeds: Sequence[float]) -> Series:
    best = max(speeds)
    return Series(
        "lower bound",
        pasts,
        [_MS * bytes_per_token(lm, past) / best for past in pasts],
        x_label="context, tokens",
        y_label="ms per token",
        plot="Time per token by context",
        log_x=True,
        kind="reference",
    )


# -- figures --------------------------------------------------------------------------------------


def _token_figures(
    lm: LanguageModel, grown: Sequence[Latency], speeds: Sequence[float]
) -> list[Figure]:
    figures = [
        median_figure(
            f"time to first token, {latency.past} prompt tokens", latency.first, "ms",
            why="nothing of the prompt was cached", better="lower",
        )
        for latency in (grown[0], grown[-1])
    ]  # fmt: skip
    figures += [
        median_figure(f"time per token after {latency.past}", latency.after, "ms", better="lower")
        for latency in (grown[0], grown[-1])
    ]
    short, best = grown[0], max(speeds)
    limit = bytes_per_token(lm, short.past) / best
    ratio = np.array(short.after) / _MS / limit
    low, high = bootstrap(ratio, lambda rows: float(np.median(rows)), draws=500)
    return [
        *figures,
        Figure("memory bandwidth", best / 1e9, "GB/s", min(speeds) / 1e9, best / 1e9, len(speeds),
               "best run; the interval is from the slowest to the best"),
        Figure("bytes read per token", weight_bytes(lm) / 1e6, "MB", why="of the weights"),
        Figure("lower bound per token", limit * _MS, "ms", why="bytes / bandwidth"),
        Figure("times the lower bound", float(np.median(ratio)), "×", low, high, len(ratio),
               "median, bootstrap", "lower"),
    ]  # fmt: skip


def _split_figures(splits: Sequence[TimeSplit]) -> list[Figure]:
    split = splits[-1]
    return [
        Figure(f"{name}, after {split.past}", value, "ms", n=split.steps, why=why)
        for name, value, why in split.rows()
    ]


def _cache_figures(grown: Sequence[Latency], bare: Sequence[Latency]) -> list[Figure]:
    figures = []
    for uncached in bare[-1:]:
        past = uncached.past
        cached = next(other for other in grown if other.past == past)
        figures.append(
            median_figure(f"time per token after {past} without cache", uncached.after, "ms")
        )
        times = np.array(uncached.after) / float(np.median(cached.after))
        figures.append(
            median_figure(
                f"speedup by the KV cache after {past}", times.tolist(), "×", better="higher",
                why="the full text is computed again for every token, against one token",
            )
        )  # fmt: skip
    return figures


def _batch_figures(sizes: Sequence[int], batches: Sequence[float]) -> list[Figure]:
    size, ms = sizes[-1], batches[-1]
    return [
        Figure(f"throughput, batch of {size}", _MS * size / ms, "tokens/s", why="total, one run"),
        Figure("throughput, one text", _MS / batches[0], "tokens/s", why="same method"),
    ]


# -- plots ----------------------------------------------------------------------------------------


def _growth(grown: Sequence[Latency], bare: Sequence[Latency], limit: Series) -> list[Series]:
    pasts = [latency.past for latency in grown]
    line = partial(Series, x_label="context, tokens", log_x=True)
    series = [
        line("time to first token", pasts, *mean_bounds([latency.first for latency in grown]),
             y_label="ms", plot="Time to first token by prompt length"),
        line("with cache", pasts, *mean_bounds([latency.after for latency in grown]),
             y_label="ms per token", plot=limit.plot),
        limit,
    ]  # fmt: skip
    if len(bare) > 1:
        series.append(
            line("without cache", [latency.past for latency in bare],
                 *mean_bounds([latency.after for latency in bare]), y_label="ms per token",
                 plot="Time per token without KV cache")
        )  # fmt: skip
    return series


def _split_series(splits: Sequence[TimeSplit]) -> list[Series]:
    pasts = [split.past for split in splits]
    line = partial(
        Series, x_label="context, tokens", y_label="ms per token", plot="Time by operation"
    )
    names = [name for name, value, _ in splits[0].rows() if value is not None]
    columns: list[list[Any]] = [
        [dict((row[0], row[1]) for row in split.rows())[name] for split in splits] for name in names
    ]
    return [
        line(name, pasts, column, kind="bars") for name, column in zip(names, columns, strict=True)
    ]


def _batch_series(sizes: Sequence[int], batches: Sequence[float]) -> list[Series]:
    line = partial(
        Series, x_label="batch size", plot="Throughput by batch size", y_label="tokens/s"
    )
    return [
        line("total", sizes, [_MS * n / ms for n, ms in zip(sizes, batches, strict=True)]),
        line("per text", sizes, [_MS / ms for ms in batches]),
    ]


def _example(drafts: Sequence[DraftResult]) -> Example | None:
    if not drafts:
        return None
    best = max(drafts, key=lambda draft: draft.accepted)
    text, marks = "", []
    for step in best.text.steps:
        start = len(text)
        text += step.text
        if step.draft == "accepted" and len(text) > start:
            marks.append(TextMark(start, len(text), "from a draft"))
    caption = (
        f"Marked tokens were drafted ({best.name}) and verified: {best.accepted:.0%} of the tokens "
        "did not wait for the one before. The text is the same as without drafts."
    )
    return Example(text, marks, caption)


def _notes(
    lm: LanguageModel,
    splits: Sequence[TimeSplit],
    speeds: Sequence[float],
    drafts: Sequence[DraftResult],
) -> list[str]:
    notes = [
        "Times depend on the machine and its load: compare only times measured together.",
        "Bandwidth: 128 MB read with the model's number of threads. A model that fits into the "
        "processor's cache can be faster than the lower bound.",
    ]
    if not splits[0].profiled:
        notes.append(
            f"On {lm.model.device} operations are not profiled: attention is the time that grows "
            "with the context, and weights are in everything else."
        )
    if len(speeds) > 1 and min(speeds) < 0.6 * max(speeds):
        notes.append("The machine was busy during the measurement: the bandwidth varied.")
    if not drafts:
        notes.append("Speculative decoding is not possible with this model.")
    return notes
