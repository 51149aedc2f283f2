"""Random numbers of sampling: pure functions of seed, sample and position.

`uniform(seed, sample, position)` is counter-based (Philox4x32-10, Salmon et al. 2011): there is no
generator state, so a step's number does not depend on the batch, on rewinding or on observation.
`stream` gives a stage that needs another random number (XTC) a separate one at the same step. Where
a position is sampled repeatedly (a canvas), each denoising step has separate streams: `in_pass`.

`sample_index` finds the candidate on which the number falls in the cumulative distribution.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]

TOKEN_STREAM = 0
"""Stream of the number that picks the token."""
XTC_STREAM = 1
"""Stream of XTC."""
ORDER_STREAM = 2
"""Stream of the random order in which a canvas is filled."""

_WORD = 0xFFFFFFFF
_PASS_BITS = 8  # of the counter's last word: stream in the low bits, pass above
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[Any, Any, Any, Any]  # Python ints or uint64 arrays alike
Keys = tuple[tuple[Any, Any], ...]  # two words for each round


def philox(counter: Words, key: tuple[Any, Any]) -> Words:
    """Philox4x32-10: map four 32-bit words of counter and two of key to four random words."""
    return _run_rounds(counter, _round_keys(*key))


def _round_keys(k0: Any, k1: Any) -> Keys:
    step0, step1 = _KEY_STEPS
    return tuple(((k0 + n * step0) & _WORD, (k1 + n * step1) & _WORD) for n in range(_ROUNDS))


def _run_rounds(counter: Words, keys: Keys) -> Words:
    c0, c1, c2, c3 = counter
    for k0, k1 in keys:
        p0 = c0 * 0xD2511F53  # fits 64 bits
        p1 = c2 * 0xCD9E8D57
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & 0xFFFFFFFF, p0 >> 32 ^ c3 ^ k1, p0 & 0xFFFFFFFF
    return c0, c1, c2, c3


@functools.lru_cache(maxsize=256)
def _cached_keys(seed: int) -> Keys:
    """Round keys of a seed, cached: computed once per sequence, not per token."""
    bits = seed_bits(seed)
    return _round_keys(bits & _WORD, bits >> 32)


def seed_bits(seed: int) -> int:
    """Map any Python int to the 64 bits of the key.

    Numbers of up to 64 bits, signed or not, are taken modulo 2**64 (so -1 and 2**64-1 are the same
    seed); larger ones are hashed (BLAKE2b, 8 bytes, of the two's complement).
    """
    if -(1 << 63) <= seed < (1 << 64):
        return seed & 0xFFFFFFFFFFFFFFFF
    width = seed.bit_length() // 8 + 1
    digest = hashlib.blake2b(seed.to_bytes(width, "little", signed=True), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def uniform(seed: int, sample: int, position: int, stream: int = TOKEN_STREAM) -> float:
    """Random number in [0,1) with 53 bits, for (seed, sample, position, stream)."""
    counter = (position & _WORD, sample & _WORD, sample >> 32 & _WORD, stream & _WORD)
    w0, w1, _, _ = _run_rounds(counter, _cached_keys(seed))
    return float(((w0 << 32) | w1) >> 11) * 2.0**-53


def stream_of_pass(stream: int, canvas_pass: int | None) -> int:
    """Stream of one denoising step of a canvas; None: the stream of ordinary text."""
    return stream if canvas_pass is None else stream | (canvas_pass + 1) << _PASS_BITS


def pass_of_stream(stream: int) -> int | None:
    """Denoising step of a stream; None: ordinary text. The inverse of `stream_of_pass`."""
    return (stream >> _PASS_BITS) - 1 if stream >> _PASS_BITS else None


def uniforms(
    seeds: Sequence[int],
    samples: Sequence[int],
    positions: Sequence[int],
    stream: int = TOKEN_STREAM,
    passes: Sequence[int | None] | None = None,
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """`uniform` for many rows; bit-identical."""
    streams = [stream] * len(seeds)
    if passes is not None:
        streams = [stream_of_pass(stream, canvas_pass) for canvas_pass in passes]
    if len(seeds) <= 8:  # array arithmetic costs 100 µs for any number of rows, ints 5 µs per row
        rows = zip(seeds, samples, positions, streams, strict=True)
        return np.array([uniform(*row) for row in rows], dtype=np.float64)
    bits = np.array([seed_bits(seed) for seed in seeds], dtype=np.uint64)
    sample = np.array([s & 0xFFFFFFFFFFFFFFFF for s in samples], dtype=np.uint64)
    position = np.array([p & _WORD for p in positions], dtype=np.uint64)
    stream_word = np.array([s & _WORD for s in streams], dtype=np.uint64)
    w0, w1, _, _ = philox(
        (position, sample & _WORD, sample >> 32, stream_word),
        (bits & _WORD, bits >> 32),
    )
    numbers = (((w0 << 32) | w1) >> 11).astype(np.float64) * 2.0**-53
    return np.asarray(numbers)


def sample_index(target: float, running: Floats, weights: Floats) -> int:
    """First column whose cumulative sum exceeds the target; at most the last of nonzero weight.

    `weights` [K] are unnormalized probabilities, largest first, 0 where removed; `running` are
    their cumulative sums, so trailing zeros change nothing: a row gives the same token alone and
    beside wider rows. A candidate of weight 0 is never picked.
    """
    column = int(running.searchsorted(target, side="right"))
    stream_word = int(np.count_nonzero(weights)) - 1  # u * total may round up to total
    return min(column, stream_word)
