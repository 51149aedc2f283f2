"""Tokens for many rows at once, with the settings that most texts have.

Penalties, top-k, top-p, min-p and temperature in the usual order: this is what a backend can do by
itself, right where the logits are. It gives the token that the chain of stages gives, and its
log-probability, and tells nothing else. What a row needs travels as two small arrays, so that it
can be part of a step that is sent elsewhere.

The compiled library does it where it is; otherwise, and for tensors, the chain does.
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
from unspool.sampling.arrays import Array
from unspool.sampling.chain import Chain, active_stages
from unspool.sampling.draw import seed_bits
from unspool.sampling.faults import ROW_FAULTS
from unspool.sampling.native_arrays import WIDE
from unspool.sampling.operations import operations
from unspool.sampling.rows import RowInput
from unspool.sampling.settings import SamplingSettings

FLOATS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
)  # fmt: skip
"""What a row's floats are."""
TOP_K, SEED, SAMPLE, POSITION, HISTORY_START, HISTORY_END = range(6)
"""What a row's whole numbers are. The history is what the penalties see."""

_ORDER = ("repetition_penalty", "frequency_penalty", "presence_penalty", "top_k", "top_p", "min_p",
          "temperature")  # fmt: skip
_PENALTIES = frozenset(_ORDER[:3])

Ints = npt.NDArray[np.int64]


@dataclass(slots=True)
class PickRows:
    """How each of several rows is to be picked from."""

    floats: npt.NDArray[np.float64]  # [rows, 6]
    ints: Ints  # [rows, 6]
    history: Ints  # tokens; a row's are history[start:end]

    def settings(self, row: int) -> SamplingSettings:
        named = dict(zip(FLOATS, self.floats[row].tolist(), strict=True))
        top_k, seed = self.ints[row, TOP_K], self.ints[row, SEED]
        return SamplingSettings(top_k=int(top_k), seed=int(seed), **named)

    def row_input(self, row: int) -> RowInput:
        start, end = self.ints[row, HISTORY_START], self.ints[row, HISTORY_END]
        return RowInput(
            self.history[start:end],
            sample=int(self.ints[row, SAMPLE]),
            position=int(self.ints[row, POSITION]),
        )


@dataclass(frozen=True, slots=True)
class Picked:
    """The tokens, -1 where there is none, and why not."""

    tokens: Ints
    logprobs: npt.NDArray[np.float64]
    failures: dict[int, Exception]


def is_ordinary(settings: SamplingSettings) -> bool:
    """Whether these settings can be picked with here: no unusual stage, and the usual order."""
    stages = active_stages(settings)
    return list(stages) == [name for name in _ORDER if name in stages]


def sees_history(settings: SamplingSettings) -> bool:
    return not _PENALTIES.isdisjoint(active_stages(settings))


def row_numbers(settings: SamplingSettings, sample: int) -> tuple[list[float], list[int]]:
    """The two lines of a row that stay the same from token to token."""
    floats = [float(getattr(settings, name)) for name in FLOATS]
    bits = seed_bits(settings.seed)
    signed = bits - (1 << 64) if bits >> 63 else bits
    wrapped = sample & 0xFFFFFFFFFFFFFFFF
    wrapped = wrapped - (1 << 64) if wrapped >> 63 else wrapped
    return floats, [settings.top_k, signed, wrapped, 0, 0, 0]


def history_range(settings: SamplingSettings, prompt_length: int, length: int) -> tuple[int, int]:
    """Which part of a text of so many tokens its penalties see."""
    start = 0 if settings.penalize_prompt else prompt_length
    if settings.penalty_window >= 0:
        start = max(start, length - settings.penalty_window)
    return start, length


def pick(logits: Array, rows: PickRows, threads: int = 1) -> Picked:
    """A token for each row of logits [rows, vocabulary], numpy or torch."""
    plain = isinstance(logits, np.ndarray) and logits.dtype == np.float32
    # Over a few tokens the chain sums with numpy, whose last digit is another than the kernels'.
    if not plain or logits.shape[-1] < WIDE or native.missing() is not None:
        return _by_chain(logits, rows, range(len(rows.ints)))
    logits = np.ascontiguousarray(logits)
    count = len(rows.ints)
    tokens, logprobs = np.empty(count, np.int64), np.zeros(count)
    _compiled()(
        _address(logits), count, logits.shape[-1], _address(rows.floats), _address(rows.ints),
        _address(rows.history), threads, _address(tokens), _address(logprobs),
    )  # fmt: skip
    odd = np.flatnonzero(tokens < 0)  # NaN, infinite, or nothing left: the chain says what it is
    if not len(odd):
        return Picked(tokens, logprobs, {})
    by_chain = _by_chain(logits[odd], rows, odd.tolist())
    tokens[odd], logprobs[odd] = by_chain.tokens, by_chain.logprobs
    return Picked(tokens, logprobs, {int(odd[n]): error for n, error in by_chain.failures.items()})


def _by_chain(logits: Array, rows: PickRows, numbers: Sequence[int]) -> Picked:
    """The same by the chain of stages. `logits` has a row for each of the numbered rows."""
    tokens, logprobs = np.full(len(numbers), -1, np.int64), np.zeros(len(numbers))
    failures: dict[int, Exception] = {}
    left = list(range(len(numbers)))
    logits = operations(logits).prepare(logits)
    while left:
        chain = Chain([rows.settings(numbers[n]) for n in left])
        part = logits if len(left) == len(numbers) else logits[left]
        try:
            picks = chain.pick(part, [rows.row_input(numbers[n]) for n in left])
        except ROW_FAULTS as error:
            for row in error.rows:
                failures[left[row]] = error
            left = [n for n in left if n not in failures]
            continue
        for n, one in zip(left, picks, strict=True):
            tokens[n], logprobs[n] = one.token, one.logprob
        break
    return Picked(tokens, logprobs, failures)


@functools.cache
def _compiled() -> Any:
    function = native.library().unspool_pick
    function.argtypes = [
        c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_void_p,
    ]  # fmt: skip
    function.restype = None
    return function


def _address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])
