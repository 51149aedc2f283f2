"""The time per token by operation: weights, attention, sampling, everything else.

The native backend profiles every operation. For other backends the time that grows with the context
is attention, and weights are not separated from everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np

from unspool.costing.limits import is_native
from unspool.language_model import LanguageModel
from unspool.sampling.picker import SamplingRows, encode_settings, pick_tokens

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
