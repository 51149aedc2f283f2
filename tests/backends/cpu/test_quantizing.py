"""Quantizing floats to 4 and 8 bits: as little is lost as the format allows."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.packing_support import FLOATS, floats
from unspool import native
from unspool.backends.cpu.packing import PACKINGS, pack, pack_all, relative_error
from unspool.model.files.stored import FileTensor

pytestmark = pytest.mark.skipif(
    native.missing_reason() is not None, reason=str(native.missing_reason())
)


def relative(values: Any, stored_values: Any) -> float:
    gap = (values - stored_values).astype(np.float64)
    return float(np.sqrt((gap**2).sum() / (values.astype(np.float64) ** 2).sum()))


@pytest.mark.parametrize(("store", "kind", "gain"), [("4", "Q4_1", 0.93), ("8", "Q8_0", 1.0)])
@pytest.mark.parametrize("source", FLOATS)
def test_gaussian_rows_lose_less_than_with_the_common_way(
    store: str, kind: str, gain: float, source: str
):
    rng = np.random.default_rng(9)
    stored = floats(source, rng.standard_normal((100, 512)) * 0.02)
    values = stored.float32()
    packed = pack(stored, store=store)
    number = gguf.GGMLQuantizationType[kind]
    common = relative(values, dequantize(quantize(values, number), number))
    assert packed.packing == PACKINGS[kind]
    assert packed.error == pytest.approx(relative(values, packed.float32()), rel=1e-4)
    assert packed.error < common * gain


@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1e-6, 1e-3, 1.0, 100.0]),
    shift=st.sampled_from([0.0, 1.0, -100.0]),
    distinct=st.sampled_from([1, 2, 3, 50]),
)
@settings(max_examples=60, deadline=None)
def test_no_group_loses_more_than_with_its_whole_span(
    seed: int, size: float, shift: float, distinct: int
):
    rng = np.random.default_rng(seed)
    choices = rng.standard_normal(distinct) * size + shift
    values = rng.choice(choices, (16, 32)).astype(np.float32)
    number = gguf.GGMLQuantizationType.Q4_1
    common = dequantize(quantize(values, number), number).astype(np.float64)
    stored_values = pack(FileTensor.from_float32(values), store="4").float32().astype(np.float64)
    worst = ((values - common) ** 2).sum(axis=1)
    assert (
        ((values - stored_values) ** 2).sum(axis=1) <= worst * 1.001 + 1e-12 * np.abs(values).max()
    ).all()


@given(seed=st.integers(0, 2**32), columns=st.integers(1, 100), size=st.floats(1e-7, 1e3))
@settings(max_examples=40, deadline=None)
def test_eight_bits_are_off_by_half_a_step(seed: int, columns: int, size: float):
    values = (np.random.default_rng(seed).standard_normal((19, columns)) * size).astype(np.float32)
    packed = pack(FileTensor.from_float32(values), store="8")
    stored_values = packed.float32()
    for start in range(0, columns, 32):
        part = values[:, start : start + 32]
        step = np.abs(part).max(axis=1, keepdims=True) / 127 + 2.0**-24  # as fine as halves are
        assert (np.abs(part - stored_values[:, start : start + 32]) <= step * 0.51).all()
    assert packed.error == pytest.approx(relative(values, stored_values), rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("columns", [1, 31, 33, 70])
def test_four_bits_of_a_row_that_does_not_fill_its_tiles(columns: int):
    values = np.random.default_rng(10).standard_normal((5, columns)).astype(np.float32)
    packed = pack(FileTensor.from_float32(values), store="4")
    assert np.abs(packed.float32() - values).max() < 0.3
    full = np.pad(values, ((0, 0), (0, -columns % 32)))
    assert packed.nbytes == pack(FileTensor.from_float32(full), store="4").nbytes


def test_numbers_on_a_grid_are_kept():
    grid = np.arange(32) % 16
    values = (np.outer(np.arange(1, 17), grid) / 16 - 3).astype(np.float32)
    packed = pack(FileTensor.from_float32(values), store="4")
    assert np.array_equal(packed.float32(), values) and packed.error == 0
    zeros = pack(FileTensor.from_float32(np.zeros((3, 40), np.float32)), store="4")
    assert not zeros.float32().any() and zeros.error == 0


def test_the_error_of_many_matrices_together():
    rng = np.random.default_rng(14)
    items = {"small": floats("F32", rng.standard_normal((8, 64))),
             "large": floats("F32", rng.standard_normal((80, 640)) * 5),
             "kept": floats("F32", np.ones((4, 4)))}  # fmt: skip
    packed = pack_all(items, store="4")
    gap = sum(((packed[n].float32() - items[n].data).astype(np.float64) ** 2).sum() for n in items)
    size = sum((items[n].data.astype(np.float64) ** 2).sum() for n in items)
    assert relative_error(packed.values()) == pytest.approx(float(np.sqrt(gap / size)), rel=1e-3)
    assert relative_error([]) == 0
    assert relative_error(pack_all(items).values()) == 0  # nothing was quantized
