"""ctypes structures of the native library, field by field as in `native/plan.h` and `native/api.h`,
and the types of its functions."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from unspool import native
from unspool.backends.cpu.packing import MatrixStruct

_i32, _i64, _f32, _pointer = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p

KINDS = {
    "embed": 0,
    "norm": 1,
    "linear": 2,
    "rope": 3,
    "attention": 4,
    "route": 5,
    "experts": 6,
    "combine": 7,
    "gather": 8,
    "softcap": 9,
    "site": 10,
    "activate": 11,
    "scale": 12,
    "gate": 13,
    "conv": 14,
    "delta": 15,
    "mamba": 16,
    "stash": 17,
}
ROWS = {"tokens": 0, "selected": 1, "routed": 2}
PREPARE = {"none": 0, "norm": 1, "activation": 2}
ACTIVATIONS = {
    "silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "sigmoid": 4, "swiglu_clamped": 5,
    "relu2": 6,
}  # fmt: skip
# Flags of an operation.
ADD, GATED, CENTRED, NORMALIZE, QUERIES_ONLY, BIDIRECTIONAL = 1, 2, 4, 8, 16, 32
KEYS_AS_VALUES, NORM_VALUES, SIGMOID_ROUTER, TILED_HEADS, GROUP_WEIGHTS = 64, 128, 256, 512, 1024
DIFFERENCE = 2048
CHANGES = {
    "add": 0, "project_out": 1, "replace": 2, "mean_ablate": 2, "scale": 3, "clamp_feature": 4,
}  # fmt: skip


class OpStruct(ctypes.Structure):
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
        ("experts_per_token", _i32),
        ("second_source", _i32),
        ("state_offset", _i32),
        ("key_heads", _i32),
        ("value_width", _i32),
        ("third_vector", _i32),
        ("scale", _f32),
        ("cap", _f32),
        ("epsilon", _f32),
    )


class VectorStruct(ctypes.Structure):
    _fields_ = (("data", _pointer), ("count", _i64))


class RopeTableStruct(ctypes.Structure):
    _fields_ = (("cosine", _pointer), ("sine", _pointer), ("positions", _i64), ("pairs", _i64))


class LayerPagesStruct(ctypes.Structure):
    _fields_ = (("offset", _i64), ("heads", _i32), ("head_width", _i32))


class KvCacheStruct(ctypes.Structure):
    _fields_ = (
        ("data", _pointer),
        ("pages", _i64),
        ("page_bytes", _i64),
        ("layers", ctypes.POINTER(LayerPagesStruct)),
        ("bits", _i64),
    )


class BatchStruct(ctypes.Structure):
    _fields_ = (
        ("tokens", _pointer),
        ("positions", _pointer),
        ("visible_end", _pointer),
        ("starts", _pointer),
        ("slots", _pointer),
        ("table", _pointer),
        ("selected", _pointer),
        ("count", _i64),
        ("rows", _i64),
        ("table_rows", _i64),
        ("table_columns", _i64),
        ("selected_count", _i64),
        ("adapters", _pointer),
        ("echo_starts", _pointer),
        ("echo_slots", _pointer),
        ("state_data", _pointer),
        ("state_slots", _i64),
        ("state_floats", _i64),
        ("states", _pointer),
        ("capture_starts", _pointer),
        ("capture_slots", _pointer),
        ("changes", _pointer),
    )


# An operation of an intervention at a site: see Change in `native/plan.h`.
CHANGE = np.dtype(
    [
        ("vector", np.uint64),
        ("encoder", np.uint64),
        ("stride", np.int64),
        ("kind", np.int32),
        ("offset", np.int32),
        ("width", np.int32),
        ("parts", np.int32),
        ("scale", np.float32),
        ("bias", np.float32),
        ("threshold", np.float32),
        ("value", np.float32),
    ]
)


class ChangesStruct(ctypes.Structure):
    _fields_ = (
        ("changes", _pointer),
        ("first_changes", _pointer),
        ("interventions", _i64),
        ("is_site_used", _pointer),
        ("starts", _pointer),
        ("numbers", _pointer),
        ("offsets", _pointer),
    )


# Low-rank update of one matrix: see LowRank in `native/plan.h`.
LOW_RANK = np.dtype([("down", np.uint64), ("up", np.uint64), ("rank", np.int64)])


class AdaptersStruct(ctypes.Structure):
    _fields_ = (
        ("row_adapters", _pointer),
        ("parts", _pointer),
        ("count", _i64),
        ("max_rank", _i64),
    )


class TapsStruct(ctypes.Structure):
    _fields_ = (
        ("targets", _pointer),
        ("token_rows", _pointer),
        ("selected_rows", _i64),
        ("attention_offsets", _pointer),
        ("weights", _pointer),
        ("heads", _i64),
        ("recurrent_offsets", _pointer),
        ("recurrent_stats", _pointer),
        ("recurrent_stride", _i64),
    )


class ModelSpecStruct(ctypes.Structure):
    _fields_ = (
        ("ops", ctypes.POINTER(OpStruct)),
        ("op_count", _i64),
        ("matrices", ctypes.POINTER(MatrixStruct)),
        ("matrix_count", _i64),
        ("vectors", ctypes.POINTER(VectorStruct)),
        ("vector_count", _i64),
        ("buffer_widths", _pointer),
        ("buffer_rows", _pointer),
        ("buffer_count", _i64),
        ("logits_buffer", _i64),
        ("experts", _i32),
        ("experts_per_token", _i32),
        ("threads", _i32),
    )


@functools.cache
def native_functions() -> ctypes.CDLL:
    """Load the native library and declare the functions that run a plan."""
    library = native.library()
    library.unspool_model_new.argtypes = [ctypes.POINTER(ModelSpecStruct)]
    library.unspool_model_new.restype = _pointer
    library.unspool_model_free.argtypes = [_pointer]
    library.unspool_model_free.restype = None
    library.unspool_run.argtypes = [_pointer] * 6
    library.unspool_run.restype = _i32
    library.unspool_run_head.argtypes = [_pointer, _pointer, _i64, _i64, _pointer]
    library.unspool_run_head.restype = _i32
    library.unspool_copy_page.argtypes = [_pointer, _i64, _i64]
    library.unspool_copy_page.restype = None
    library.unspool_profile.argtypes = [_pointer, _pointer]
    library.unspool_profile.restype = None
    library.unspool_multiply.argtypes = [
        ctypes.POINTER(MatrixStruct), _pointer, _i64, _pointer, _i32, _i32,
    ]  # fmt: skip
    library.unspool_multiply.restype = _i32
    library.unspool_read_memory.argtypes = [_pointer, _i64, _i32, _i32]
    library.unspool_read_memory.restype = ctypes.c_uint64
    return library


def address_of(array: npt.NDArray[Any]) -> int:
    """Address of an array's data. Quicker than `array.ctypes.data`."""
    return int(array.__array_interface__["data"][0])


def contiguous(array: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    return np.ascontiguousarray(array, np.int64)
