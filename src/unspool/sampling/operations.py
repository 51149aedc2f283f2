"""The operations for an array. Never imports torch: a tensor implies that it is imported."""

from __future__ import annotations

import sys

import numpy as np

from unspool import native
from unspool.sampling.arrays import Array, NumpyOperations, TorchOperations
from unspool.sampling.native_arrays import NativeOperations

Operations = NumpyOperations | TorchOperations

_numpy: NumpyOperations | None = None
_torch: TorchOperations | None = None


def array_operations(array: Array) -> Operations:
    """Operations for a numpy array or a torch tensor."""
    global _torch
    if isinstance(array, np.ndarray):
        return numpy_operations()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        if _torch is None:
            _torch = TorchOperations(torch)
        return _torch
    raise TypeError(f"logits must be a numpy array or a torch tensor, not {type(array).__name__}")


def numpy_operations() -> NumpyOperations:
    """Operations for numpy, with the compiled library if it is there."""
    global _numpy
    if _numpy is None:
        _numpy = NativeOperations() if native.missing_reason() is None else NumpyOperations()
    return _numpy
