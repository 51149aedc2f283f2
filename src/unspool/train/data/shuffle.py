"""A stateless shuffle: a permutation computed from a key, the same on every machine."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.uint64]]
Indices = np.ndarray[Any, np.dtype[np.int64]]


def permuted(positions: Indices, count: int, key: str) -> Indices:
    """Map positions in 0..count-1 to their positions in the permutation given by `key`.

    A Feistel network: each round mixes half of the bits into the other half, which is invertible
    and therefore a permutation. It works on the next power of four; results >= count are mapped
    again until they fit. No library's random generator is involved, so the order never changes.
    """
    half = max(1, -(-int(count - 1).bit_length() // 2))
    mask = np.uint64((1 << half) - 1)
    keys = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=48).digest(), np.uint64)
    values = positions.astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        high, low = values[outside] >> np.uint64(half), values[outside] & mask
        for round_key in keys:
            high, low = low, high ^ (mixed(low + round_key) & mask)
        values[outside] = (high << np.uint64(half)) | low
        outside = values >= count
    return values.astype(np.int64)


def mixed(numbers: Numbers) -> Numbers:
    """SplitMix64's finalizer: each output bit depends on each input bit."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(numbers ^ (numbers >> np.uint64(31)))
