"""Fingerprint of a model's weights: a hash of names, shapes and sampled numbers.

Computed from the checkpoint's file it does not depend on the backend or its dtype; backends that
keep the weights exactly compute the same from memory.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from unspool.model.checkpoint import Checkpoint
from unspool.model.stored import FileTensor

_SAMPLED = 64  # numbers of each weight

Numbers = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]


def fingerprint(checkpoint: Checkpoint) -> str:
    named = sorted(checkpoint.weights(), key=lambda named: named[0])
    return hash_weights((name, stored.shape, _numbers(stored)) for name, stored in named)


def hash_weights(weights: Iterable[tuple[str, tuple[int, ...], npt.NDArray[Any]]]) -> str:
    """Hash the names of all weights in order, their shapes, and the numbers at their `places`."""
    digest = hashlib.sha256()
    for name, shape, numbers in weights:
        digest.update(f"{name} {tuple(shape)}".encode())
        digest.update(numbers.astype("<f4").tobytes())
    return digest.hexdigest()


def sample_indices(shape: tuple[int, ...]) -> Indices:
    """Flat indices of the sampled numbers of a tensor."""
    return np.linspace(0, math.prod(shape) - 1, _SAMPLED).astype(np.int64)


def _numbers(stored: FileTensor) -> Numbers:
    """The sampled numbers of a tensor; only their rows are dequantized."""
    indices = sample_indices(stored.shape)
    if len(stored.shape) == 1:
        return stored.float32()[indices]
    rows, columns = np.divmod(indices, stored.shape[-1])
    if len(stored.shape) == 2:
        return _picked(stored, rows, columns)
    matrices, (matrix_indices, rows) = stored.slices(), np.divmod(rows, stored.shape[-2])
    values = np.empty(len(indices), np.float32)
    for matrix_index in np.unique(matrix_indices).tolist():
        in_matrix = matrix_indices == matrix_index
        values[in_matrix] = _picked(matrices[matrix_index], rows[in_matrix], columns[in_matrix])
    return values


def _picked(matrix: FileTensor, rows: Indices, columns: Indices) -> Numbers:
    unique_rows, row_index = np.unique(rows, return_inverse=True)
    return matrix.part(0, unique_rows).float32()[row_index, columns]
