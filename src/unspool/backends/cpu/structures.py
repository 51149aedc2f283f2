"""The structures that cross to the native library, field by field as in `native/plan.h` and
`native/api.h`, and its functions with their types."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from unspool import native
from unspool.backends.cpu.layout import Matrix

_i32, _i64, _f32, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

KINDS = {
    "embed": 0,
    "norm": 1,
    "linear": 2,
    "place": 3,
    "attend": 4,
    "route": 5,
    "experts": 6,
    "combine": 7,
    "gather": 8,
    "softcap": 9,
    "snapshot": 10,
    "activate": 11,
    "scale": 12,
    "gate": 13,
    "conv": 14,
    "delta": 15,
    "mamba": 16,
}
ROWS = {"tokens": 0, "wanted": 1, "picks": 2}
PREPARE = {"as is": 0, "normed": 1, "activated": 2}
ACTIVATIONS = {
    "silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "sigmoid": 4, "swiglu_clamped": 5,
    "relu2": 6,
}  # fmt: skip
ADD, GATED, CENTRED, NORMALIZE, QUERIES_ONLY, BOTH_WAYS = 1, 2, 4, 8, 16, 32  # flags
KEYS_AS_VALUES, NORM_VALUES, SIGMOID_ROUTER, TILED_HEADS, OWN_WEIGHTS = 64, 128, 256, 512, 1024


class Op(ctypes.Structure):
    _fields_ = (
        ("kind", _i32),
        ("rows", _i32),
        ("source", _i32),
        ("target", _i32),
        ("offset", _i32),
        ("width", _i32),
        ("heads", _i32),
        ("matrix", _i32),
        ("matrix_count", _i32),
        ("vector", _i32),
        ("second_vector", _i32),
        ("layer", _i32),
        ("window", _i32),
        ("rotary", _i32),
        ("prepare", _i32),
        ("activation", _i32),
        ("flags", _i32),
        ("experts", _i32),
        ("chosen", _i32),
        ("other", _i32),
        ("state", _i32),
        ("key_heads", _i32),
        ("value_width", _i32),
        ("third_vector", _i32),
        ("scale", _f32),
        ("cap", _f32),
        ("epsilon", _f32),
    )


class Vector(ctypes.Structure):
    _fields_ = (("data", _pointer), ("count", _i64))


class RotaryTable(ctypes.Structure):
    _fields_ = (("cosine", _pointer), ("sine", _pointer), ("positions", _i64), ("pairs", _i64))


class LayerPages(ctypes.Structure):
    _fields_ = (("offset", _i64), ("heads", _i32), ("head_width", _i32))


class KeyValues(ctypes.Structure):
    _fields_ = (
        ("data", _pointer),
        ("pages", _i64),
        ("page_bytes", _i64),
        ("layers", ctypes.POINTER(LayerPages)),
        ("bits", _i64),
    )


class BatchStructure(ctypes.Structure):
    _fields_ = (
        ("tokens", _pointer),
        ("positions", _pointer),
        ("visible_end", _pointer),
        ("starts", _pointer),
        ("slots", _pointer),
        ("table", _pointer),
        ("wanted", _pointer),
        ("count", _i64),
        ("rows", _i64),
        ("table_rows", _i64),
        ("table_columns", _i64),
        ("wanted_count", _i64),
        ("adapters", _pointer),
        ("echo_starts", _pointer),
        ("echo_lines", _pointer),
        ("state_data", _pointer),
        ("state_slots", _i64),
        ("state_floats", _i64),
        ("states", _pointer),
        ("capture_starts", _pointer),
        ("capture_slots", _pointer),
    )


# What an adapter adds to one matrix: see LowRank in `native/plan.h`.
LOW_RANK = np.dtype([("down", np.uint64), ("up", np.uint64), ("rank", np.int64)])


class AdapterList(ctypes.Structure):
    _fields_ = (
        ("of_row", _pointer),
        ("parts", _pointer),
        ("count", _i64),
        ("most", _i64),
    )


class TapList(ctypes.Structure):
    _fields_ = (
        ("rows", _pointer),
        ("row_count", _i64),
        ("snapshots", _pointer),
        ("attention", _pointer),
        ("weights", _pointer),
        ("places", _pointer),
        ("heads", _i64),
        ("recurrent", _pointer),
        ("recurrent_seen", _pointer),
        ("recurrent_room", _i64),
    )


class ModelSpec(ctypes.Structure):
    _fields_ = (
        ("ops", ctypes.POINTER(Op)),
        ("op_count", _i64),
        ("matrices", ctypes.POINTER(Matrix)),
        ("matrix_count", _i64),
        ("vectors", ctypes.POINTER(Vector)),
        ("vector_count", _i64),
        ("buffer_widths", _pointer),
        ("buffer_rows", _pointer),
        ("buffer_count", _i64),
        ("logits_buffer", _i64),
        ("experts", _i32),
        ("chosen", _i32),
        ("threads", _i32),
    )


@functools.cache
def functions() -> ctypes.CDLL:
    """The native library, with the functions that run a plan declared."""
    library = native.library()
    library.unspool_model_new.argtypes = [ctypes.POINTER(ModelSpec)]
    library.unspool_model_new.restype = _pointer
    library.unspool_model_free.argtypes = [_pointer]
    library.unspool_model_free.restype = None
    library.unspool_run.argtypes = [_pointer] * 6
    library.unspool_run.restype = _i32
    library.unspool_run_head.argtypes = [_pointer, _pointer, _i64, _i64, _pointer]
    library.unspool_run_head.restype = _i32
    library.unspool_run_given.argtypes = [_pointer] * 5
    library.unspool_run_given.restype = _i32
    library.unspool_copy_page.argtypes = [_pointer, _i64, _i64]
    library.unspool_copy_page.restype = None
    library.unspool_profile.argtypes = [_pointer, _pointer]
    library.unspool_profile.restype = None
    library.unspool_multiply.argtypes = [
        ctypes.POINTER(Matrix), _pointer, _i64, _pointer, _i32, _i32,
    ]  # fmt: skip
    library.unspool_multiply.restype = _i32
    library.unspool_read_memory.argtypes = [_pointer, _i64, _i32, _i32]
    library.unspool_read_memory.restype = ctypes.c_uint64
    return library


def address(array: npt.NDArray[Any]) -> int:
    """Where an array's numbers lie. `array.ctypes.data` gives the same, more slowly."""
    return int(array.__array_interface__["data"][0])


def contiguous(array: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.ascontiguousarray(array, np.int64)
