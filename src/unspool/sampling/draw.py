"""The draw: one number in [0,1), a pure function of who asks, falls on the candidates in a line.

`uniform(seed, sample, position)` is counter-based (Philox4x32-10, Salmon et al. 2011): there is no
generator whose state moves on, so a step's number does not depend on what else is in the batch, on
rewinding, or on how often anyone looked. `stream` gives a stage that tosses its own coin (XTC) a
number of its own at the same step. Where a position is guessed again and again (a canvas), each
pass has streams of its own: `in_pass`.

The candidates lie end to end, likeliest first, each as wide as its probability; `landing` says on
which one the number falls.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]

TOKEN_STREAM = 0
"""The stream of the number that picks the token."""
XTC_STREAM = 1
"""The stream of XTC's coin."""
ORDER_STREAM = 2
"""The stream of the number by which a canvas is filled in random order."""

_WORD = 0xFFFFFFFF
_PASS_BITS = 8  # of the counter's last word: the stream lies below, the pass above
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

Words = tuple[Any, Any, Any, Any]  # Python ints or uint64 arrays alike
Keys = tuple[tuple[Any, Any], ...]  # two words for each round


def philox(counter: Words, key: tuple[Any, Any]) -> Words:
    """Philox4x32-10: four 32-bit words of counter and two of key to four random words."""
    return _scrambled(counter, _round_keys(*key))


def _round_keys(k0: Any, k1: Any) -> Keys:
    by0, by1 = _KEY_STEPS
    return tuple(((k0 + n * by0) & _WORD, (k1 + n * by1) & _WORD) for n in range(_ROUNDS))


def _scrambled(counter: Words, keys: Keys) -> Words:
    c0, c1, c2, c3 = counter
    for k0, k1 in keys:
        p0 = c0 * 0xD2511F53  # a product of two words fits 64 bits
        p1 = c2 * 0xCD9E8D57
        c0, c1, c2, c3 = p1 >> 32 ^ c1 ^ k0, p1 & 0xFFFFFFFF, p0 >> 32 ^ c3 ^ k1, p0 & 0xFFFFFFFF
    return c0, c1, c2, c3


@functools.lru_cache(maxsize=256)
def _keys_of(seed: int) -> Keys:
    """Made once for a text, not at each of its tokens."""
    bits = seed_bits(seed)
    return _round_keys(bits & _WORD, bits >> 32)


def seed_bits(seed: int) -> int:
    """Any Python int to the 64 bits of the key.

    What fits 64 bits, signed or not, is taken modulo 2**64 (so -1 and 2**64-1 are one seed);
    a larger number is hashed (BLAKE2b, 8 bytes of its two's complement).
    """
    if -(1 << 63) <= seed < (1 << 64):
        return seed & 0xFFFFFFFFFFFFFFFF
    width = seed.bit_length() // 8 + 1
    digest = hashlib.blake2b(seed.to_bytes(width, "little", signed=True), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def uniform(seed: int, sample: int, position: int, stream: int = TOKEN_STREAM) -> float:
    """The number in [0,1), 53 bits fine, of this (seed, sample, position, stream)."""
    counter = (position & _WORD, sample & _WORD, sample >> 32 & _WORD, stream & _WORD)
    w0, w1, _, _ = _scrambled(counter, _keys_of(seed))
    return float(((w0 << 32) | w1) >> 11) * 2.0**-53


def in_pass(stream: int, canvas_pass: int | None) -> int:
    """A stream as one pass over a canvas has it; None: a text that is written once."""
    return stream if canvas_pass is None else stream | (canvas_pass + 1) << _PASS_BITS


def uniforms(
    seeds: Sequence[int],
    samples: Sequence[int],
    positions: Sequence[int],
    stream: int = TOKEN_STREAM,
    passes: Sequence[int | None] | None = None,
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """`uniform` for many rows at once; the same numbers, bit for bit."""
    streams = [in_pass(stream, one) for one in passes or [None] * len(seeds)]
    if len(seeds) <= 8:  # array arithmetic costs 100 µs however few the rows; ints 5 µs a row
        rows = zip(seeds, samples, positions, streams, strict=True)
        return np.array([uniform(*row) for row in rows], dtype=np.float64)
    bits = np.array([seed_bits(seed) for seed in seeds], dtype=np.uint64)
    sample = np.array([s & 0xFFFFFFFFFFFFFFFF for s in samples], dtype=np.uint64)
    position = np.array([p & _WORD for p in positions], dtype=np.uint64)
    last = np.array([s & _WORD for s in streams], dtype=np.uint64)
    w0, w1, _, _ = philox(
        (position, sample & _WORD, sample >> 32, last),
        (bits & _WORD, bits >> 32),
    )
    drawn = (((w0 << 32) | w1) >> 11).astype(np.float64) * 2.0**-53
    return np.asarray(drawn)


def landing(target: float, running: Floats, weights: Floats) -> int:
    """The first column whose running sum exceeds the target; the last of any weight at most.

    `weights` [K] are probabilities up to a factor, likeliest first, 0 where removed; `running` are
    their sums from left to right, so columns of zeros at the end change nothing: a row falls alike
    alone and among wider rows. A candidate of weight 0 is never hit.
    """
    column = int(running.searchsorted(target, side="right"))
    last = int(np.count_nonzero(weights)) - 1  # u times the total may round up to the total itself
    return min(column, last)
