"""Memory layout of packed matrices, as in `native/layout.h`, and the layout of each file type."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from unspool.model.float8 import FLOAT8

FORMATS = {"F32": 0, "F16": 1, "BF16": 2, "Q4": 3, "Q8": 4, "codes": 5}
SCALES = {"half": 0, "super": 1, "power": 2, "float8": 3}
MINIMA = {"none": 0, "minima": 1, "zero points": 2}

Table = tuple[int, ...]


class MatrixStruct(ctypes.Structure):
    """The structure of the same name in `native/layout.h`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("format", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("offset", ctypes.c_int32),
        ("minima", ctypes.c_int32),
        ("scales", ctypes.c_int32),
        ("bias", ctypes.c_int32),
        ("factor", ctypes.c_float),
        ("table", ctypes.c_int8 * 16),
    )


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """Storage format of a packed matrix; `native/layout.h` explains the fields."""

    format: str
    group: int = 32
    offset: int = 0
    minima: str = "none"
    scales: str = "half"
    factor: float = 1.0
    table: Table = ()

    def matrix(self, rows: int, columns: int, address: int | None = None) -> MatrixStruct:
        return MatrixStruct(
            data=address, rows=rows, columns=columns, format=FORMATS[self.format],
            group=self.group, offset=self.offset, minima=MINIMA[self.minima],
            scales=SCALES[self.scales], bias=-1, factor=self.factor,
            table=(ctypes.c_int8 * 16)(*self.table),
        )  # fmt: skip


def _signed(*sizes: int) -> Table:
    """A code table: eight magnitudes, then the same values negated."""
    filled = sizes + (0,) * (8 - len(sizes))
    return filled + tuple(-size for size in filled)


def _codes(table: Table, **options: Any) -> PackedFormat:
    return PackedFormat("codes", table=table, **options)


_FP4 = _signed(0, 1, 2, 3, 4, 6, 8, 12)  # doubled
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ2 = _signed(8, 25, 43)
_IQ3 = _signed(4, 12, 20, 28, 36, 44, 52, 62)
_IQ3S = _signed(1, 3, 5, 7, 9, 11, 13, 15)
_IQ1 = (-7, 1, 9, 0, 0, 0, 0, 0, -9, -1, 7)  # 8 * (-1, 0, 1), plus or minus 1
_TERNARY = (-1, 0, 1, 2)

PACKINGS = {
    "F32": PackedFormat("F32"),
    "F16": PackedFormat("F16"),
    "BF16": PackedFormat("BF16"),
    "Q4_0": PackedFormat("Q4", offset=8),
    "Q4_1": PackedFormat("Q4", minima="minima"),
    "Q5_0": PackedFormat("Q8", offset=16),
    "Q5_1": PackedFormat("Q8", minima="minima"),
    "Q8_0": PackedFormat("Q8", offset=128),
    "Q2_K": PackedFormat("Q4", group=16, minima="minima", scales="super"),
    "Q3_K": PackedFormat("Q4", group=16, offset=4, scales="super"),
    "Q4_K": PackedFormat("Q4", minima="minima", scales="super"),
    "Q5_K": PackedFormat("Q8", minima="minima", scales="super"),
    "Q6_K": PackedFormat("Q8", group=16, offset=32, scales="super"),
    "IQ4_NL": _codes(_IQ4),
    "IQ4_XS": _codes(_IQ4, scales="super"),
    "MXFP4": _codes(_FP4, scales="power", factor=0.5),
    "NVFP4": _codes(_FP4, scales="float8", group=16, factor=0.5),
    "IQ3_XXS": _codes(_IQ3, scales="super", factor=0.25),
    "IQ3_S": _codes(_IQ3S, scales="super"),
    "IQ2_XXS": _codes(_IQ2, scales="super", factor=0.125),
    "IQ2_XS": _codes(_IQ2, scales="super", group=16, factor=0.125),
    "IQ2_S": _codes(_IQ2, scales="super", group=16, factor=0.125),
    "IQ1_S": _codes(_IQ1, scales="super", factor=0.125),
    "IQ1_M": _codes(_IQ1, scales="super", group=16, factor=0.125),
    "TQ1_0": _codes(_TERNARY, scales="super"),
    "TQ2_0": _codes(_TERNARY, scales="super"),
    "Q1_0": _codes((-1, 1)),
    "ZERO4": PackedFormat("Q4", minima="zero points"),
    "ZERO8": PackedFormat("Q8", offset=128, minima="zero points"),
    "AFFINE8": PackedFormat("Q8", offset=128, minima="minima"),
    FLOAT8: PackedFormat("BF16"),
}


def grid_codes(type: str) -> npt.NDArray[np.uint8] | None:
    """Entries of a type's codebook grid as indices into its list of magnitudes, flattened; None:
    the type has no grid."""
    if not type.startswith(("IQ1", "IQ2", "IQ3")):
        return None
    from gguf import quants

    quant_type: Any = getattr(quants, type)
    quant_type.init_grid()
    indices = np.searchsorted(np.array(quant_type.grid_map), quant_type.grid.reshape(-1))
    codes: npt.NDArray[np.uint8] = indices.astype(np.uint8)
    return codes
