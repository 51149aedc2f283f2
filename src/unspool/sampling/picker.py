"""Batched sampling with ordinary settings, as a backend does it inside the step.

Penalties, top-k, top-p, min-p and temperature in the default order. The result is the token of the
sampling chain and its log-probability; for the places of a canvas also what the order of unmasking
needs. The settings of a row are encoded as small arrays, so that they can be part of a `StepBatch`.

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
from unspool.sampling.chain import Chain, active_stages, score
from unspool.sampling.draw import TOKEN_STREAM, pass_of_stream, seed_bits, stream_of_pass
from unspool.sampling.rows import RowInput
from unspool.sampling.settings import SamplingSettings

FLOATS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
)  # fmt: skip
"""Columns of `SamplingRows.floats`."""
TOP_K, SEED, SAMPLE, POSITION, HISTORY_START, HISTORY_END = range(6)
"""Columns of `SamplingRows.ints`. The upper half of POSITION is the stream of random numbers (0:
ordinary text). The history is the tokens that penalties count."""
EXCLUDED, TARGET = range(2)
"""Columns of `SamplingRows.canvas`: a token that is not a candidate, and a token whose
log-probability is returned; -1: none."""
ENTROPY, MARGIN, TARGET_LOGPROB = range(3)
"""Columns of `PickedTokens.details`: entropy in nats, difference between the two largest
probabilities, and the log-probability of the target (0 without one)."""

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
    canvas: Ints | None = None  # [rows, 2]; None: no row is a place of a canvas

    def settings(self, row: int) -> SamplingSettings:
        return _decode_settings(*self.floats[row].tolist(), *self.ints[row, : SEED + 1].tolist())

    def row_input(self, row: int) -> RowInput:
        start, end = self.ints[row, HISTORY_START], self.ints[row, HISTORY_END]
        stream, position = divmod(int(self.ints[row, POSITION]), 1 << 32)
        return RowInput(
            self.history[start:end],
            sample=int(self.ints[row, SAMPLE]),
            position=position,
            canvas_pass=pass_of_stream(stream),
        )


@dataclass(frozen=True, slots=True)
class PickedTokens:
    """Picked tokens; -1 and an entry in `failures` where that failed."""

    tokens: Ints
    logprobs: npt.NDArray[np.float64]
    failures: dict[int, Exception]
    details: npt.NDArray[np.float64] | None = None  # [rows, 3], with `SamplingRows.canvas`


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


def encode_canvas(
    settings: SamplingSettings, sample: int, positions: Sequence[int], canvas_pass: int,
    history: Sequence[int], history_bounds: tuple[int, int], excluded: int, targets: Sequence[int],
) -> SamplingRows:  # fmt: skip
    """Encode the sampling of a canvas's places in one denoising step.

    Args:
        positions: of the places.
        history: tokens that penalties may count; they count those within `history_bounds`.
        excluded: a token that is never sampled: the mask token.
        targets: the token of each place whose log-probability is returned; -1: none.
    """
    floats, ints = encode_settings(settings, sample)
    rows = SamplingRows(
        np.array([floats] * len(positions)),
        np.array([ints] * len(positions), np.int64),
        np.array(history, np.int64),
        np.array([[excluded, target] for target in targets], np.int64),
    )
    rows.ints[:, POSITION] = positions
    rows.ints[:, POSITION] += stream_of_pass(TOKEN_STREAM, canvas_pass) << 32
    rows.ints[:, HISTORY_START], rows.ints[:, HISTORY_END] = history_bounds
    return rows


def pick_tokens(logits: Array, rows: SamplingRows, threads: int = 1) -> PickedTokens:
    """Pick a token for each row of logits [rows, vocabulary], numpy or torch.

    The excluded tokens of a canvas are set to -inf in `logits` itself.
    """
    count, canvas = len(rows.ints), rows.canvas
    if canvas is not None:
        at = np.flatnonzero(canvas[:, EXCLUDED] >= 0)
        logits[at, canvas[at, EXCLUDED]] = -np.inf
    is_float32 = isinstance(logits, np.ndarray) and logits.dtype == np.float32
    # For narrow rows the chain uses numpy, which rounds sums differently from the kernels.
    if not is_float32 or logits.shape[-1] < MIN_NATIVE_WIDTH or native.missing_reason() is not None:
        return _pick_with_chain(logits, rows, range(count))
    logits = np.ascontiguousarray(logits)
    tokens, logprobs = np.empty(count, np.int64), np.zeros(count)
    targets = details = None
    if canvas is not None:
        targets, details = np.ascontiguousarray(canvas[:, TARGET]), np.zeros((count, 3))
    _native_pick()(
        _data_address(logits), count, logits.shape[-1], _data_address(rows.floats),
        _data_address(rows.ints), _data_address(rows.history), threads, _data_address(tokens),
        _data_address(logprobs), None if targets is None else _data_address(targets),
        None if details is None else _data_address(details),
    )  # fmt: skip
    failed = np.flatnonzero(tokens < 0)  # NaN, infinite or no candidate: the chain finds out
    if not len(failed):
        return PickedTokens(tokens, logprobs, {}, details)
    fallback = _pick_with_chain(logits[failed], rows, failed.tolist())
    tokens[failed], logprobs[failed] = fallback.tokens, fallback.logprobs
    if details is not None and fallback.details is not None:
        details[failed] = fallback.details
    failures = {int(failed[n]): error for n, error in fallback.failures.items()}
    return PickedTokens(tokens, logprobs, failures, details)


def _pick_with_chain(logits: Array, rows: SamplingRows, row_index: Sequence[int]) -> PickedTokens:
    """Pick with the chain. Row n of `logits` belongs to row `row_index[n]` of `rows`."""
    tokens, logprobs = np.full(len(row_index), -1, np.int64), np.zeros(len(row_index))
    details = None if rows.canvas is None else np.zeros((len(row_index), 3))
    failures: dict[int, Exception] = {}
    pending = list(range(len(row_index)))
    logits = array_operations(logits).prepare(logits)
    while pending:
        indices = [row_index[n] for n in pending]
        chain = _cached_chain(
            rows.floats[indices].tobytes(), rows.ints[indices].T[: SEED + 1].tobytes()
        )
        part = logits if len(pending) == len(row_index) else logits[pending]
        inputs = [rows.row_input(row) for row in indices]
        try:
            picks = chain.pick(part, inputs, top=0 if details is None else 2)
        except ROW_ERRORS as error:
            for row in error.rows:
                failures[pending[row]] = error
            pending = [n for n in pending if n not in failures]
            continue
        for n, choice in zip(pending, picks, strict=True):
            tokens[n], logprobs[n] = choice.token, choice.logprob
        if details is not None and rows.canvas is not None:
            details[pending, ENTROPY] = [choice.entropy for choice in picks]
            details[pending, MARGIN] = [choice.margin for choice in picks]
            targets = rows.canvas[indices, TARGET]
            scored = np.flatnonzero(targets >= 0)
            if len(scored):
                scores = score(part[scored], targets[scored])
                details[np.array(pending)[scored], TARGET_LOGPROB] = scores.logprobs
        break
    return PickedTokens(tokens, logprobs, failures, details)


@functools.lru_cache(maxsize=256)
def _decode_settings(*values: Any) -> SamplingSettings:
    """Settings of a row from its FLOATS, TOP_K and SEED."""
    names = (*FLOATS, "top_k", "seed")
    return SamplingSettings(**dict(zip(names, values, strict=True)))


@functools.lru_cache(maxsize=32)
def _cached_chain(floats: bytes, ints: bytes) -> Chain:
    """Chain of rows with these settings, which are mostly those of the last step."""
    columns = np.frombuffer(ints, np.int64).reshape(SEED + 1, -1)
    rows = np.frombuffer(floats).reshape(-1, len(FLOATS)).tolist()
    return Chain([_decode_settings(*row, *columns[:, n].tolist()) for n, row in enumerate(rows)])


@functools.cache
def _native_pick() -> Any:
    function = native.library().unspool_pick
    function.argtypes = [
        c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int32, c_void_p, c_void_p,
        c_void_p, c_void_p,
    ]  # fmt: skip
    function.restype = None
    return function


def _data_address(array: npt.NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])
