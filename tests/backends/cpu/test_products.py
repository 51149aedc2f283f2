"""Products of packed matrices and activations, value by value, for every type and every kernel.

The arithmetic is defined in `kernels/gemv.h`: 32 activations share a scale, their largest
size / 127, and are rounded to bytes; weights keep the file's numbers. The reference below does the
same in numpy, in 64 bits.
"""

from __future__ import annotations

import ctypes
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.packing_support import FLOATS, SIZES
from helpers.paged_texts import random_blocks
from unspool import native
from unspool.backends.cpu.packing import PACKINGS, PackedMatrix, pack
from unspool.backends.cpu.structures import address_of, native_functions
from unspool.model.files.stored import FLOAT8

KINDS = [kind for kind in PACKINGS if kind != FLOAT8]  # FP8 is bfloat16 once it is packed

pytestmark = pytest.mark.skipif(
    native.missing_reason() is not None, reason=str(native.missing_reason())
)

ROUNDING = 3e-6  # of the sum of all sizes: some hundred additions of 24 bits
_ARM = platform.machine() in ("aarch64", "arm64")
INSTRUCTION_SETS = (
    ("plain", "neon", "i8mm") if _ARM else ("plain", "avx2", "avxvnni", "avx512", "amx")
)


def multiply(packed: PackedMatrix, rows: Any, threads: int = 1) -> Any:
    rows = np.ascontiguousarray(rows, np.float32)
    out = np.full((len(rows), packed.shape[0]), np.nan, np.float32)
    status = native_functions().unspool_multiply(
        ctypes.byref(packed.matrix), address_of(rows), len(rows), address_of(out), threads, 1
    )
    assert status == 0
    return out


def rounded(rows: Any) -> Any:
    """Activations as the kernels quantize them: bytes with a scale per 32."""
    count, width = rows.shape
    filled = np.zeros((count, -(-width // 32) * 32), np.float32)
    filled[:, :width] = rows
    tiles = filled.reshape(count, -1, 32)
    most = np.abs(tiles).max(axis=-1, keepdims=True)
    inverse = np.divide(np.float32(127), most, out=np.zeros_like(most), where=most > 0)
    numbers = np.rint(tiles * inverse)  # to the nearest, and to the even one in the middle
    assert np.abs(numbers).max() <= 127
    scale = most / np.float32(127)
    return (numbers.astype(np.float64) * scale).reshape(count, -1)[:, :width]


def check(packed: PackedMatrix, rows: Any, result: Any, quantized: bool) -> None:
    weights = packed.float32().astype(np.float64)
    acts = rounded(rows) if quantized else rows.astype(np.float64)
    size = np.abs(acts) @ np.abs(weights).T + 1e-30
    assert float((np.abs(result - acts @ weights.T) / size).max()) < ROUNDING


def activations(count: int, width: int, seed: int = 0) -> Any:
    """Of very different magnitudes; some all zero; some exactly between two bytes."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, width)) * 10.0 ** rng.integers(-3, 4, (count, 1))
    rows[0, :40] = 0
    rows[-1, : min(32, width)] = np.arange(min(32, width)) + 0.5
    rows[-1, 0] = 127
    return rows.astype(np.float32)


def shapes_of(kind: str) -> list[tuple[int, int]]:
    if kind in FLOATS:
        return [(1, 1), (16, 32), (37, 45), (50, 100)]
    elements = SIZES[kind][0]
    if elements > 32:
        return [(1, elements), (37, 2 * elements), (70, 3 * elements)]
    return [(1, 32), (16, 64), (37, 96), (70, 288)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_against_numpy(kind: str):
    rng = np.random.default_rng(len(kind))
    for number, shape in enumerate(shapes_of(kind)):
        packed = pack(random_blocks(kind, *shape, rng))
        rows = activations(20, shape[1], seed=number)
        for count in (1, 3, 4, 5, 8, 9, 17, 20):
            result = multiply(packed, rows[-count:], threads=1 + count % 2)
            check(packed, rows[-count:], result, quantized=kind not in FLOATS)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_alone_and_together(kind: str):
    """The same bits for one row, as many as fit the registers, and more."""
    packed = pack(random_blocks(kind, 37, 512, np.random.default_rng(5)))
    rows = activations(20, 512)
    alone = np.concatenate([multiply(packed, row[None]) for row in rows])
    for count in (2, 3, 4, 5, 6, 7, 8, 9, 13, 20):
        assert multiply(packed, rows[:count]).tobytes() == alone[:count].tobytes(), count


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "Q8_0"])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_sums(kind: str, sign: int):
    """All weights and activations at their maximum: no sum overflows."""
    stored = random_blocks(kind, 16, 512, np.random.default_rng(6))
    start = {"Q4_0": 2, "Q4_1": 4, "Q4_K": 16, "Q8_0": 2}.get(kind)
    blocks = stored.data.reshape(16, -1, SIZES[kind][1])
    if start is None:  # two or three bits: everything but the factors
        blocks[..., : 80 if kind == "Q2_K" else 108] = 255
    else:
        blocks[..., start:] = 127 if kind == "Q8_0" else 255
    packed = pack(stored)
    rows = np.full((5, 512), sign * 3.0, np.float32)
    for count in (1, 2, 3, 5):
        check(packed, rows[:count], multiply(packed, rows[:count]), quantized=True)


@pytest.mark.parametrize("store", ["4", "8"])
@pytest.mark.parametrize("columns", [1, 31, 33, 45, 260])
def test_columns_that_fill_no_tile(store: str, columns: int):
    """Only matrices quantized here can have such columns; files of blocks cannot."""
    packed = pack(random_blocks("F32", 19, columns, np.random.default_rng(1)), store=store)
    rows = activations(12, columns)
    for count in (1, 4, 6, 12):
        check(packed, rows[-count:], multiply(packed, rows[-count:]), quantized=True)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q6_K", "F32"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_propagates(kind: str, bad: float):
    """In every output of its row, and in no other row."""
    packed = pack(random_blocks(kind, 20, 256, np.random.default_rng(2)))
    for count in (1, 3, 6, 20):
        rows = activations(count, 256)
        rows[count // 2, 77] = bad
        finite = np.isfinite(multiply(packed, rows)).all(axis=1)
        assert not finite[count // 2]
        assert finite.sum() == count - 1


# -- the instruction sets --------------------------------------------------------------------


@cache
def every_product() -> dict[str, Any]:
    result = {}
    for kind in KINDS:
        packed = pack(random_blocks(kind, 37, 512, np.random.default_rng(3)))
        for count in (1, 2, 3, 4, 7, 20):
            result[f"{kind}-{count}"] = multiply(packed, activations(count, 512))
    return result


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_every_instruction_set_gives_the_same(isa: str, tmp_path: Path):
    """In a child process: the instruction set is chosen once per process."""
    target = tmp_path / "found.npz"
    helpers = str(Path(__file__).parents[2])  # what pytest has put on the path for us
    environment = {**os.environ, "UNSPOOL_ISA": isa, "PYTHONPATH": helpers}
    command = [sys.executable, __file__, str(target)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if "does not have" in done.stdout:
        assert isa not in ("plain", native.instruction_set())
        pytest.skip(f"this processor has no {isa}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == isa
    forced_isa, default_isa = np.load(target), every_product()
    assert set(forced_isa) == set(default_isa)
    for name, expected in default_isa.items():
        size = np.abs(expected).mean()
        assert np.abs(forced_isa[name] - expected).max() < 1e-4 * size, name


if __name__ == "__main__":
    if native.missing_reason():
        print(native.missing_reason())
    else:
        print(native.instruction_set())
        np.savez(sys.argv[1], **every_product())
