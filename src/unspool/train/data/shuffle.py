"""A fixed shuffle: an order drawn by a key, the same on every machine, and stored nowhere."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.uint64]]
Indices = np.ndarray[Any, np.dtype[np.int64]]


def permuted(places: Indices, count: int, key: str) -> Indices:
    """Where each place of `count` goes in an order that is drawn by `key`.

    A Feistel network: half of a number's bits is mixed into the other half, in turn, which can
    be undone and so is a permutation. It runs over the next power of four; a result that is too
    large goes round again until it fits. Nothing is stored, and no library's generator is asked,
    so the order stays the same everywhere.
    """
    half = max(1, -(-int(count - 1).bit_length() // 2))
    mask = np.uint64((1 << half) - 1)
    keys = np.frombuffer(hashlib.blake2b(key.encode(), digest_size=48).digest(), np.uint64)
    found = places.astype(np.uint64)
    outside = np.ones(len(found), bool)
    while outside.any():
        left, right = found[outside] >> np.uint64(half), found[outside] & mask
        for each in keys:
            left, right = right, left ^ (mixed(right + each) & mask)
        found[outside] = (left << np.uint64(half)) | right
        outside = found >= count
    return found.astype(np.int64)


def mixed(numbers: Numbers) -> Numbers:
    """SplitMix64's last steps: each bit of the result depends on each bit of the number."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers = (numbers ^ (numbers >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(numbers ^ (numbers >> np.uint64(31)))
