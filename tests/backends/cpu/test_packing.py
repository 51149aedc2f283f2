"""Packing: the values of a file stay bit-identical, and quantization is as good as possible."""

from __future__ import annotations

import ctypes
import gc
import mmap
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.packing_support import FLOATS, HALVES, QUANTIZED, SIZES, floats, halves_of, set_halves
from unspool import native
from unspool.backends.cpu import packing
from unspool.backends.cpu.packing import (
    PACKINGS,
    MatrixStruct,
    PackedFormat,
    Packing,
    PartStruct,
    pack,
    pack_all,
    packing_for,
    relative_error,
)
from unspool.errors import ModelFileError, SettingsError
from unspool.model.files.stored import FileTensor

pytestmark = pytest.mark.skipif(
    native.missing_reason() is not None, reason=str(native.missing_reason())
)


def random_halves(rng: np.random.Generator, count: int) -> Any:
    """Random finite halves, with subnormals and zeros."""
    bits = rng.integers(0, 0x7C00, count) | rng.integers(0, 2, count) << 15
    return bits.astype("<u2")


def random_stored(kind: str, rows: int, blocks: int, rng: np.random.Generator) -> FileTensor:
    """Random bytes with finite scales."""
    elements, size = SIZES[kind]
    data = rng.integers(0, 256, (rows, blocks, size)).astype(np.uint8)
    halves = random_halves(rng, halves_of(kind) * rows * blocks).view("<f2")
    set_halves(kind, data, halves.reshape(-1, rows, blocks))
    return FileTensor(kind, data.reshape(rows, -1), (rows, blocks * elements))


def same_bits(a: Any, b: Any) -> bool:
    return bool(np.array_equal(np.asarray(a).view(np.uint32), np.asarray(b).view(np.uint32)))


# -- the layout, by hand ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "name", "structure"),
    [("layout.h", "Matrix", MatrixStruct), ("repack.h", "PackPart", PartStruct)],
)
def test_structures_match_the_headers(file: str, name: str, structure: type[ctypes.Structure]):
    header = Path(packing.__file__).parent / "native" / file
    text = header.read_text(encoding="utf-8")
    start = text.index(f"struct {name} {{")
    body = text[start : text.index("};", start)]
    lines = [line.split(";")[0].split() for line in body.splitlines()[1:] if ";" in line]
    fields = [(field[0], ctypes.sizeof(field[1])) for field in structure._fields_]
    assert [line[-1].removesuffix("[16]") for line in lines] == [field for field, _ in fields]
    sizes = {"int64_t": 8, "int32_t": 4, "float": 4, "int8_t": 16}
    assert [8 if "*" in line[-2] else sizes[line[-2]] for line in lines] == [
        size for _, size in fields
    ]


# -- exactness -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (16, 2), (37, 3), (64, 9), (33, 17)])
def test_every_type_is_kept_to_the_bit(kind: str, rows: int, blocks: int):
    stored = random_stored(kind, rows, blocks, np.random.default_rng(rows + blocks))
    packed = pack(stored)
    assert packed.packing == PACKINGS[kind]
    assert same_bits(packed.float32(), stored.float32())


@given(
    kind=st.sampled_from(sorted(QUANTIZED)),
    rows=st.integers(1, 50),
    blocks=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_any_rows_of_any_matrix(kind: str, rows: int, blocks: int, seed: int, data: Any):
    stored = random_stored(kind, rows, blocks, np.random.default_rng(seed))
    first = data.draw(st.integers(0, rows))
    last = data.draw(st.integers(first, rows))
    assert same_bits(pack(stored).float32(first, last), stored.float32()[first:last])


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("shape", [(1, 1), (16, 32), (17, 33), (40, 100)])
def test_floats_are_kept_to_the_bit(kind: str, shape: tuple[int, int]):
    stored = floats(kind, np.random.default_rng(0).standard_normal(shape))
    assert same_bits(pack(stored).float32(), stored.float32())


def test_every_half():
    bits = np.arange(65536, dtype="<u2")
    finite = bits[(bits & 0x7C00) != 0x7C00].reshape(-1, 64)
    stored = FileTensor("F16", finite.view("<f2"), finite.shape)
    assert same_bits(pack(stored).float32(), stored.float32())
    again = FileTensor.from_float32(stored.float32())
    assert np.array_equal(pack(again, store="float16").memory, pack(stored).memory)


def numbers_around_halves() -> Any:
    """Halves, the midpoints between two, and the floats next to these."""
    halves = np.arange(0, 0x7BFF, dtype="<u2").view("<f2").astype(np.float32)
    middles = (halves[:-1] + halves[1:]) / 2
    beside = [np.nextafter(middles, np.float32(side)) for side in (-np.inf, np.inf)]
    values = np.concatenate([halves, middles, *beside, [1e-30, 1e-45, 65519.99]])
    return np.concatenate([values, -values]).astype(np.float32)[None]


@pytest.mark.parametrize("store", ["float16", "bfloat16"])
def test_rounding_to_the_nearest_even(store: str):
    patterns = np.random.default_rng(1).integers(0, 2**32, (8, 4096), np.uint32).view(np.float32)
    patterns = np.where(np.isfinite(patterns), patterns, 0)
    for values in (numbers_around_halves(), patterns):
        if store == "float16":
            small = np.where(np.abs(values) < 65519, values, values * np.float32(1e-36))
            expected = small.astype(np.float16).astype(np.float32)
        else:
            small = values * np.float32(0.5)
            raw = quantize(small, gguf.GGMLQuantizationType.BF16)
            expected = dequantize(raw, gguf.GGMLQuantizationType.BF16)
        assert same_bits(pack(FileTensor.from_float32(small), store=store).float32(), expected)


@pytest.mark.parametrize("kind", ["Q4_1", "Q6_K"])
def test_quantized_types_as_floats(kind: str):
    stored = random_stored(kind, 20, 2, np.random.default_rng(3))
    packed = pack(stored, store="float32")
    assert packed.packing == PACKINGS["F32"]
    assert same_bits(packed.float32(), stored.float32())


# -- many matrices ----------------------------------------------------------------------------


def test_threads_share_the_work(monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(4)
    items = {kind: random_stored(kind, 100, 2, rng) for kind in QUANTIZED}
    items["floats"] = floats("F32", rng.standard_normal((100, 48)))
    alone = pack_all(items, store="4", threads=1)
    monkeypatch.setattr(packing, "CHUNK", 1)  # every block of rows on its own
    together = pack_all(items, store="4", threads=3)
    assert list(together) == list(items)
    for name in items:
        assert np.array_equal(alone[name].memory, together[name].memory)
        assert together[name].matrix.data % 64 == 0
    assert alone["floats"].error == pytest.approx(together["floats"].error)


def test_memory_outlives_a_caller_that_fails(monkeypatch: pytest.MonkeyPatch):
    """A model that fails to load drops its packings while their threads use the memory."""
    is_over = threading.Event()
    monkeypatch.setattr(packing._PartList, "run", lambda self: is_over.wait(60))
    started = Packing({"a": floats("F32", np.zeros((16, 32)))}, threads=2)
    reference = weakref.ref(started)
    del started
    gc.collect()
    assert reference() is not None
    is_over.set()
    deadline = time.monotonic() + 60
    while reference() is not None and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    assert reference() is None


def test_rows_in_any_order_and_columns_from_a_transposed_tensor():
    stored = random_stored("Q4_K", 40, 1, np.random.default_rng(5))
    order = np.random.default_rng(6).permutation(40)
    assert same_bits(pack(stored.reordered(order)).float32(), stored.float32()[order])
    every_second = FileTensor("Q4_K", stored.data[::2], (20, 256))
    assert same_bits(pack(every_second).float32(), stored.float32()[::2])
    values = np.random.default_rng(7).standard_normal((30, 20)).astype(np.float32)
    assert same_bits(pack(FileTensor.from_float32(values).transposed()).float32(), values.T.copy())


def test_experts_are_matrices():
    parts = [random_stored("Q5_0", 24, 2, np.random.default_rng(seed)) for seed in range(3)]
    experts = FileTensor.stacked(parts).slices()
    packed = pack_all({str(i): expert for i, expert in enumerate(experts)}, threads=2)
    for i, part in enumerate(parts):
        assert same_bits(packed[str(i)].float32(), part.float32())


def test_pages_of_the_file_are_given_back(tmp_path: Path):
    values = np.random.default_rng(8).standard_normal((256, 4096)).astype(np.float32)
    (tmp_path / "weights").write_bytes(b"x" * 100 + values.tobytes())
    with (tmp_path / "weights").open("rb") as handle:
        mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    view = np.frombuffer(mapped, np.float32, values.size, 100).reshape(values.shape)
    packed = pack(FileTensor.from_float32(view))
    assert same_bits(packed.float32(), values)
    assert same_bits(view, values)  # still there: the file is read again
    packing.release_pages(values)  # memory that is no file's is left alone
    assert same_bits(packed.float32(), values)


# -- what to do, and what cannot be done -----------------------------------------------------


def test_which_packing():
    assert packing_for("Q4_K", "8") == PACKINGS["Q4_K"]
    assert packing_for("BF16", "8") == PackedFormat("integers", 8, offset=128)
    assert packing_for("F32", "4") == PackedFormat("integers", 4, minima="minima")
    assert packing_for("Q4_K", "bfloat16").format == "BF16"
    with pytest.raises(SettingsError, match=r"store must be one of 4, 8, .* got '5'"):
        packing_for("F32", "5")
    with pytest.raises(ModelFileError, match="Q8_K are not supported"):
        packing_for("Q8_K", None)


def test_a_power_scale_that_is_nan():
    stored = random_stored("MXFP4", 37, 2, np.random.default_rng(11))
    stored.data[36, 17] = 255
    with np.errstate(all="ignore"), pytest.raises(ModelFileError, match="NaN or infinite"):
        pack(stored)


IN_HALVES = [kind for kind in QUANTIZED if kind not in ("MXFP4", "NVFP4", "IQ1_M")]


@pytest.mark.parametrize("kind", IN_HALVES)
@pytest.mark.parametrize("bad", [0x7C00, 0xFC00, 0x7E01])
def test_a_scale_that_is_nan(kind: str, bad: int):
    size = SIZES[kind][1]
    for at in HALVES.get(kind, (0,)):
        stored = random_stored(kind, 37, 2, np.random.default_rng(11))
        stored.data[36, size + at : size + at + 2] = bad & 255, bad >> 8
        with (
            np.errstate(all="ignore"),
            pytest.raises(ModelFileError, match=r"tensor blk\.0 holds NaN or infinite numbers"),
        ):
            pack(stored, name="blk.0")


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize("store", [None, "4", "8", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_weight_that_is_nan(kind: str, store: str | None, bad: float):
    values = np.ones((18, 40), np.float32)
    values[17, 39] = bad
    with pytest.raises(ModelFileError, match="holds NaN or infinite numbers; the file is damaged"):
        pack(floats(kind, values), store=store)


@pytest.mark.parametrize("store", ["4", "8", "float16"])
def test_a_weight_that_is_too_large(store: str):
    values = np.full((2, 2), 1e30, np.float32)
    with pytest.raises(ModelFileError, match=r"too large for .*; store it as float32"):
        pack(FileTensor.from_float32(values), store=store)


def test_sizes_that_do_not_fit():
    stored = random_stored("Q4_0", 4, 2, np.random.default_rng(12))
    for shape in [(5, 64), (4, 32), (4, 65), (1 << 39, 32), (1 << 50, 32)]:
        with pytest.raises(ModelFileError, match=r"tensor out: its 144 bytes are not a matrix"):
            pack(FileTensor("Q4_0", stored.data, shape), name="out")
    for wrong in [(256,), (0, 64), (2, 2, 64)]:
        with pytest.raises(ModelFileError, match="tensor out must be a matrix"):
            pack(FileTensor("Q4_0", stored.data, wrong), name="out")
    with pytest.raises(IndexError):
        pack(stored).float32(0, 5)


def test_nothing_is_touched_when_something_does_not_fit():
    library = packing._library()
    source = random_stored("Q4_0", 16, 8, np.random.default_rng(13)).data.copy()
    target = np.full(1 << 16, 7, np.uint8)

    def repack(matrix: MatrixStruct, number: int, size: int, first: int = 0, last: int = 1) -> int:
        return int(library.unspool_repack(
            ctypes.byref(matrix), number, source.ctypes.data, size, first, last, target.ctypes.data
        ))  # fmt: skip

    right = PACKINGS["Q4_0"].matrix(16, 256)
    for kind, other in PACKINGS.items():
        if kind != "Q4_0":  # formats that cannot take the type, or are of another source's size
            assert repack(other.matrix(16, 256), 2, source.nbytes) == -1
    for number in (4, 5, 9, 15, 31, -1):
        assert repack(right, number, source.nbytes) == -1
    assert repack(right, 2, source.nbytes - 1) == -1
    assert repack(right, 2, source.nbytes, 0, 2) == -1
    assert repack(right, 2, source.nbytes, -1, 1) == -1
    assert repack(PACKINGS["Q4_0"].matrix(2**62, 2**62), 2, source.nbytes) == -1
    assert (target == 7).all()
    assert repack(right, 2, source.nbytes) == 0


# -- Quantizing floats to 4 and 8 bits: as little is lost as the format allows ---------------------


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
@settings(max_examples=30, deadline=None)
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
    allowed = worst * 1.001 + 1e-12 * np.abs(values).max()
    assert (((values - stored_values) ** 2).sum(axis=1) <= allowed).all()


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
