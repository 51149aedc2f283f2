"""What tells one model's weights from another's: names, shapes, and some numbers of each.

Taken from a checkpoint's file it is the same wherever the model runs and whatever it is rounded to
there; backends that keep the weights exactly find the same in what they hold.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from unspool.model.checkpoint import Checkpoint
from unspool.model.stored import Stored

_SAMPLED = 64  # numbers of each weight

Numbers = npt.NDArray[np.float32]
Places = npt.NDArray[np.int64]


def fingerprint(checkpoint: Checkpoint) -> str:
    named = sorted(checkpoint.weights(), key=lambda named: named[0])
    return hashed((name, stored.shape, _numbers(stored)) for name, stored in named)


def hashed(weights: Iterable[tuple[str, tuple[int, ...], npt.NDArray[Any]]]) -> str:
    """Of the names of all weights in order, their shapes, and the numbers at their `places`."""
    seen = hashlib.sha256()
    for name, shape, numbers in weights:
        seen.update(f"{name} {tuple(shape)}".encode())
        seen.update(numbers.astype("<f4").tobytes())
    return seen.hexdigest()


def places(shape: tuple[int, ...]) -> Places:
    """Some places all over a tensor, counted through."""
    return np.linspace(0, math.prod(shape) - 1, _SAMPLED).astype(np.int64)


def _numbers(stored: Stored) -> Numbers:
    """Those at its places; no more is unpacked than the rows they stand in."""
    at = places(stored.shape)
    if len(stored.shape) == 1:
        return stored.float32()[at]
    rows, columns = np.divmod(at, stored.shape[-1])
    if len(stored.shape) == 2:
        return _picked(stored, rows, columns)
    matrices, (numbers, rows) = stored.slices(), np.divmod(rows, stored.shape[-2])
    found = np.empty(len(at), np.float32)
    for number in np.unique(numbers).tolist():
        here = numbers == number
        found[here] = _picked(matrices[number], rows[here], columns[here])
    return found


def _picked(matrix: Stored, rows: Places, columns: Places) -> Numbers:
    wanted, which = np.unique(rows, return_inverse=True)
    return matrix.part(0, wanted).float32()[which, columns]
