"""Shared by the tests of packing: tensors of floats as files have them."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize

from unspool.model.stored import Stored

FLOATS = ("F32", "F16", "BF16")


def floats(kind: str, values: Any) -> Stored:
    """A tensor of floats of some type, from values that it can hold."""
    values = np.asarray(values, np.float32)
    if kind == "BF16":
        raw = quantize(values, gguf.GGMLQuantizationType.BF16).view("<u2").reshape(values.shape)
        return Stored(kind, raw, values.shape)
    return Stored(kind, values.astype({"F32": "<f4", "F16": "<f2"}[kind]), values.shape)
