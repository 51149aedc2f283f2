"""Batched sampling with ordinary settings, as a backend does it inside the step.

Penalties, top-k, top-p, min-p and temperature in the default order. The result is the token of the
sampling chain and its log-probability, without further details. The settings of a row are encoded
as two small arrays, so that they can be part of a `StepBatch`.

Uses the compiled library if it is there; otherwise, and for tensors, the chain.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from unspool import native
from unspool.sampling.arrays import MIN_NATIVE_WIDTH, Array, array_operations
from unspool.sampling.candidates import ROW_ERRORS
from unspool.sampling.chain import Chain, active_stages
from unspool.sampling.draw import seed_bits
from unspool.sampling.rows import RowInput
from unspool.sampling.settings import SamplingSettings

FLOATS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
)  # fmt: skip
"""Columns of `PickRows.floats`."""
TOP_K, SEED, SAMPLE, POSITION, HISTORY_START, HISTORY_END = range(6)
"""Columns of `PickRows.ints`. The history is the tokens that penalties count."""

_ORDER = ("repetition_penalty", "frequency_penalty", "presence_penalty", "top_k", "top_p", "min_p",
          "temperature")  # fmt: skip
_PENALTIES = frozenset(_ORDER[:3])

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class SamplingRows:
    """Sampling settings of several rows."""

    floats: npt.NDArray[np.float64]  # [rows, 6]
    ints: Ints  # [rows, 6]
    history: Ints  # tokens of all rows; a row's are history[start:end]

    def settings(self, row: int) -> SamplingSettings:
        values = dict(zip(FLOATS, self.floats[row].tolist(), strict=True))
        top_k, seed = self.ints[row, TOP_K], self.ints[row, SEED]
        return SamplingSettings(top_k=int(top_k), seed=int(seed), **values)

    def row_input(self, row: int) -> RowInput:
        start, end = self.ints[row, HISTORY_START], self.ints[row, HISTORY_END]
        return RowInput(
            self.history[start:end],
            sample=int(self.ints[row, SAMPLE]),
            position=int(self.ints[row, POSITION]),
        )


@dataclass(frozen=True, slots=True)
class PickedTokens:
    """Picked tokens; -1 and an entry in `failures` where that failed."""

    tokens: Ints
    logprobs: npt.NDArray[np.float64]
    failures: dict[int, Exception]


def can_sample_on_device(settings: SamplingSettings) -> bool:
    """Whether a backend can sample with these settings: only common stages in the default order."""
    stages = active_stages(settings)
    return list(stages) == [name for name in _ORDER if name in stages]


def needs_history(settings: SamplingSettings) -> bool:
    return not _PENALTIES.isdisjoint(active_stages(settings))


def encode_settings(settings: SamplingSettings, sample: int) -> tuple[list[float], list[int]]:
    """Encode the settings of a row that do not change from token to token: floats, ints."""
    floats = [float(getattr(settings, name)) for name in FLOATS]
    bits = seed_bits(settings.seed)
    signed_seed = bits - (1 << 64) if bits >> 63 else bits
    wrapped_sample = sample & 0xFFFFFFFFFFFFFFFF
    wrapped_sample = wrapped_sample - (1 << 64) if wrapped_sample >> 63 else wrapped_sample
    return floats, [settings.top_k, signed_seed, wrapped_sample, 0, 0, 0]


def history_range(settings: SamplingSettings, prompt_length: int, length: int) -> tuple[int, int]:
    """Range of a sequence's tokens that penalties count."""
    start = 0 if settings.penalize_prompt else prompt_length
    if settings.penalty_window >= 0:
        start = max(start, length - settings.penalty_window)
    return start, length


def pick_tokens(logits: Array, rows: SamplingRows, threads: int = 1) -> PickedTokens:
    """Pick a token for each row of logits [rows, vocabulary], numpy or torch."""
    is_float32 = isinstance(logits, np.ndarray) and logits.dtype == np.float32
    # For narrow rows the chain uses numpy, which rounds sums differently from the kernels.
    if not is_float32 or logits.shape[-1] < MIN_NATIVE_WIDTH or native.missing_reason() is not None:
        return _pick_with_chain(logits, rows, range(len(rows.ints)))
    logits = np.ascontiguousarray(logits)
    count = len(rows.ints)
    tokens, logprobs = np.empty(count, np.int64), np.zeros(count)
    _native_pick()(
        _data_address(logits), count, logits.shape[-1], _data_address(rows.floats),
        _data_address(rows.ints), _data_address(rows.history), threads, _data_address(tokens),
        _data_address(logprobs),
    )  # fmt: skip
    failed = np.flatnonzero(tokens < 0)  # NaN, infinite or no candidate: the chain finds out
    if not len(failed):
        return PickedTokens(tokens, logprobs, {})
    fallback = _pick_with_chain(logits[failed], rows, failed.tolist())
    tokens[failed], logprobs[failed] = fallback.tokens, fallback.logprobs
    return PickedTokens(
        tokens, logprobs, {int(failed[n]): error for n, error in fallback.failures.items()}
    )


def _pick_with_chain(logits: Array, rows: SamplingRows, row_index: Sequence[int]) -> PickedTokens:
    """Pick with the chain. Row n of `logits` belongs to row `row_index[n]` of `rows`."""
    tokens, logprobs = np.full(len(row_index), -1, np.int64), np.zeros(len(row_index))
    failures: dict[int, Exception] = {}
    pending = list(range(len(row_index)))
    logits = array_operations(logits).prepare(logits)
    while pending:
        chain = Chain([rows.settings(row_index[n]) for n in pending])
        part = logits if len(pending) == len(row_index) else logits[pending]
        try:
            picks = chain.pick(part, [rows.row_input(row_index[n]) for n in pending])
        except ROW_ERRORS as error:
            for row in error.rows:
                failures[pending[row]] = error
            pending = [n for n in pending if n not in failures]
            continue
        for n, choice in zip(pending, picks, strict=True):
            tokens[n], logprobs[n] = choice.token, choice.logprob
        break
    return PickedTokens(tokens, logprobs, failures)


@functools.cache
def _native_pick() -> Any:
    function = native.library().unspool_pick
    function.argtypes = [
        c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_void_p,
    ]  # fmt: skip
    function.restype = None
    return function


def _data_address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])
