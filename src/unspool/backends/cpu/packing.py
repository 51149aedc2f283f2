"""Pack weights into the layout that the native kernels read (`native/layout.h`).

    packed = pack_all({"output": stored, ...}, store=None, threads=4)
    packed["output"].matrix         # passed to the kernels
    packed["output"].float32(3, 5)  # rows 3 and 4 as float32

Quantized weights keep their exact values: only the order of the bits changes. Floats can be kept,
rounded to another float format, or quantized here to 4 or 8 bits.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import mmap
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from unspool import native
from unspool.errors import ModelFileError, SettingsError
from unspool.model.files.gguf import BLOCK_TYPES
from unspool.model.files.stored import FLOAT8, UNSPOOL_BLOCK_BYTES

# -- Memory layout of packed matrices, as in `native/layout.h`

FORMATS = {"F32": 0, "F16": 1, "BF16": 2, "integers": 3, "codes": 4}
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
        ("bits", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("offset", ctypes.c_int32),
        ("minima", ctypes.c_int32),
        ("scales", ctypes.c_int32),
        ("bias", ctypes.c_int32),
        ("factor", ctypes.c_float),
        ("table", ctypes.c_int8 * 16),
    )


class PartStruct(ctypes.Structure):
    """The structure `PackPart` in `native/repack.h`."""

    _fields_ = (
        ("matrix", ctypes.c_void_p),
        ("source", ctypes.c_void_p),
        ("source_bytes", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("last", ctypes.c_int64),
        ("error", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("release", ctypes.c_int32),
        ("result", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """Storage format of a packed matrix; `native/layout.h` explains the fields."""

    format: str
    bits: int = 0
    group: int = 32
    offset: int = 0
    minima: str = "none"
    scales: str = "half"
    factor: float = 1.0
    table: Table = ()

    def matrix(self, rows: int, columns: int, address: int | None = None) -> MatrixStruct:
        return MatrixStruct(
            data=address, rows=rows, columns=columns, format=FORMATS[self.format],
            bits=self.bits, group=self.group, offset=self.offset, minima=MINIMA[self.minima],
            scales=SCALES[self.scales], bias=-1, factor=self.factor,
            table=(ctypes.c_int8 * 16)(*self.table),
        )  # fmt: skip


def _signed(*sizes: int) -> Table:
    """A code table: four or eight magnitudes, then the same values negated."""
    return sizes + tuple(-size for size in sizes)


def _integers(bits: int, **options: Any) -> PackedFormat:
    return PackedFormat("integers", bits, **options)


def _codes(bits: int, table: Table, **options: Any) -> PackedFormat:
    return PackedFormat("codes", bits, table=table, **options)


_FP4 = _signed(0, 1, 2, 3, 4, 6, 8, 12)  # doubled
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ2 = _signed(8, 25, 43, 0)
_IQ3 = _signed(4, 12, 20, 28, 36, 44, 52, 62)
_IQ3S = _signed(1, 3, 5, 7, 9, 11, 13, 15)
_IQ1 = (-7, 1, 9, 0, -9, -1, 7)  # 8 * (-1, 0, 1), plus or minus 1
_TERNARY = (-1, 0, 1, 2)

PACKINGS = {
    "F32": PackedFormat("F32"),
    "F16": PackedFormat("F16"),
    "BF16": PackedFormat("BF16"),
    "Q4_0": _integers(4, offset=8),
    "Q4_1": _integers(4, minima="minima"),
    "Q5_0": _integers(5, offset=16),
    "Q5_1": _integers(5, minima="minima"),
    "Q8_0": _integers(8, offset=128),
    "Q2_K": _integers(2, group=16, minima="minima", scales="super"),
    "Q3_K": _integers(3, group=16, offset=4, scales="super"),
    "Q4_K": _integers(4, minima="minima", scales="super"),
    "Q5_K": _integers(5, minima="minima", scales="super"),
    "Q6_K": _integers(6, group=16, offset=32, scales="super"),
    "IQ4_NL": _codes(4, _IQ4),
    "IQ4_XS": _codes(4, _IQ4, scales="super"),
    "MXFP4": _codes(4, _FP4, scales="power", factor=0.5),
    "NVFP4": _codes(4, _FP4, scales="float8", group=16, factor=0.5),
    "IQ3_XXS": _codes(4, _IQ3, scales="super", factor=0.25),
    "IQ3_S": _codes(4, _IQ3S, scales="super"),
    "IQ2_XXS": _codes(3, _IQ2, scales="super", factor=0.125),
    "IQ2_XS": _codes(3, _IQ2, scales="super", group=16, factor=0.125),
    "IQ2_S": _codes(3, _IQ2, scales="super", group=16, factor=0.125),
    "IQ1_S": _codes(3, _IQ1, scales="super", factor=0.125),
    "IQ1_M": _codes(3, _IQ1, scales="super", group=16, factor=0.125),
    "TQ1_0": _codes(2, _TERNARY, scales="super"),
    "TQ2_0": _codes(2, _TERNARY, scales="super"),
    "Q1_0": _codes(1, (-1, 1)),
    "ZERO4": _integers(4, minima="zero points"),
    "ZERO8": _integers(8, offset=128, minima="zero points"),
    "AFFINE8": _integers(8, offset=128, minima="minima"),
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


LANES = 16  # rows of a block
ALIGNMENT = 64  # bytes, of a matrix: a cache line and the widest vector register
CHUNK = 1 << 20  # bytes of packed memory per work item of a thread

_TYPE_NUMBERS = {kind.name: number for number, kind in BLOCK_TYPES.items()}
_TYPE_NUMBERS |= {name: 1000 + index for index, name in enumerate(UNSPOOL_BLOCK_BYTES)}


class StoredTensor(Protocol):
    """A tensor of a file, as far as packing needs it (see `model.stored.Stored`)."""

    @property
    def type(self) -> str: ...
    @property
    def data(self) -> npt.NDArray[Any]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def sources(self) -> tuple[npt.NDArray[Any], ...]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def factor(self) -> npt.NDArray[np.float32] | None: ...
    def float32(self) -> npt.NDArray[np.float32]: ...


# Values of `store`, and the type whose packing each uses.
STORES = {"4": "Q4_1", "8": "Q8_0", "bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_FLOATS = ("F32", "F16", "BF16")
_QUANTIZABLE = (*_FLOATS, FLOAT8)  # types that `store` "4" or "8" quantizes


def packing_for(type: str, store: str | None) -> PackedFormat:
    """Format in which a tensor of a file's type is stored. `store` None: as in the file.

    Weights that are already quantized are not quantized again for "4" or "8": that would only lose
    precision.
    """
    if type not in PACKINGS:
        raise ModelFileError(
            f"weights of type {type} are not supported; use a file with {', '.join(PACKINGS)}"
        )
    if store is None:
        return PACKINGS[type]
    if store not in STORES:
        raise SettingsError(f"store must be one of {', '.join(STORES)}, got {store!r}")
    return PACKINGS[type if store in ("4", "8") and type not in _QUANTIZABLE else STORES[store]]


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A packed matrix with its memory."""

    matrix: MatrixStruct
    memory: npt.NDArray[np.uint8]
    packing: PackedFormat
    shape: tuple[int, int]
    squares: tuple[float, float] = (0.0, 0.0)  # sums of squares: quantization errors, weights

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    @property
    def error(self) -> float:
        """Relative RMS error of quantization."""
        return relative_error([self])

    def float32(self, first: int = 0, last: int | None = None) -> npt.NDArray[np.float32]:
        """Unpack rows first to last (exclusive; None: all) as float32."""
        rows, columns = self.shape
        last = rows if last is None else last
        if not 0 <= first <= last <= rows:
            raise IndexError(f"rows must be within 0 to {rows}, got {first} to {last}")
        out = np.empty((last - first, columns), np.float32)
        _library().unspool_unpack(ctypes.byref(self.matrix), first, last, out.ctypes.data)
        return out


def relative_error(matrices: Iterable[PackedMatrix]) -> float:
    """Relative RMS error of quantization over all these matrices."""
    errors, weights = 0.0, 0.0
    for packed in matrices:
        errors += packed.squares[0]
        weights += packed.squares[1]
    return math.sqrt(errors / weights) if weights else 0.0


@functools.cache
def _library() -> ctypes.CDLL:
    """Load the native library and declare its repacking functions."""
    library = native.library()
    matrix, pointer = ctypes.POINTER(MatrixStruct), ctypes.c_void_p
    int32, int64 = ctypes.c_int32, ctypes.c_int64
    library.unspool_packed_bytes.argtypes = [matrix]
    library.unspool_packed_bytes.restype = int64
    repack_arguments: list[Any] = [matrix, int32, pointer, int64, int64, int64, pointer]
    library.unspool_repack.argtypes = repack_arguments
    library.unspool_repack.restype = int32
    library.unspool_pack_parts.argtypes = [pointer, int64, pointer]
    library.unspool_pack_parts.restype = None
    library.unspool_unpack.argtypes = [matrix, int64, int64, pointer]
    library.unspool_unpack.restype = None
    library.unspool_set_grid.argtypes = [int32, pointer, int64]
    library.unspool_set_grid.restype = int32
    return library


@functools.cache
def _grid(type: str) -> npt.NDArray[np.uint8] | None:
    """Pass the type's codebook grid to the library, and keep it alive (it is not copied)."""
    codes = grid_codes(type)
    if codes is not None:
        _library().unspool_set_grid(_TYPE_NUMBERS[type], codes.ctypes.data, codes.size)
    return codes


class _PackTask:
    """Packing of one tensor, in parts."""

    def __init__(self, name: str, stored: StoredTensor, store: str | None, release: bool) -> None:
        self.name, self.stored, self.release = name, stored, release
        self.packing = packing_for(stored.type, store)
        if len(stored.shape) != 2 or 0 in stored.shape:
            raise ModelFileError(
                f"tensor {name} must be a matrix, got shape {tuple(stored.shape)}; the file is "
                "damaged"
            )
        _grid(stored.type)
        self.matrix = self.packing.matrix(*stored.shape)
        if stored.factor is not None and self.packing.format not in _FLOATS:
            self.matrix.factor *= float(stored.factor)
        self.size = int(_library().unspool_packed_bytes(ctypes.byref(self.matrix)))
        if self.size < 0 or not self._fits():
            raise self._misfit()
        blocks = -(-stored.shape[0] // LANES)
        step = max(1, CHUNK * blocks // self.size)
        self.bounds = [(start, min(start + step, blocks)) for start in range(0, blocks, step)]
        self.squares = np.zeros((len(self.bounds), 2))
        self.results: Sequence[PartStruct] = ()
        # Other types are converted to floats in Python first.
        is_float = self.packing.format in _FLOATS or stored.type == FLOAT8
        self.is_converted = is_float and stored.type not in _FLOATS

    def _fits(self) -> bool:
        """Whether the file's bytes are a matrix of this shape; checked before allocating."""
        if self.stored.type == FLOAT8:
            return self.stored.data.shape == self.stored.shape
        matrix = PACKINGS[self.stored.type].matrix(*self.stored.shape)
        number, size = _TYPE_NUMBERS[self.stored.type], self.stored.nbytes
        no_blocks = (0, 0)
        status = _library().unspool_repack(
            ctypes.byref(matrix), number, None, size, *no_blocks, None
        )
        return bool(status == 0)

    def set_memory(self, memory: npt.NDArray[np.uint8]) -> None:
        self.memory = memory
        self.matrix.data = memory.ctypes.data

    def parts(self, source: npt.NDArray[Any], type: str, release: bool) -> list[PartStruct]:
        """The parts of the work, with contiguous rows of this type as their source."""
        is_quantized = type in _FLOATS and self.packing.format not in _FLOATS
        errors = self.squares.ctypes.data
        return [
            PartStruct(
                matrix=ctypes.addressof(self.matrix), type=_TYPE_NUMBERS[type], first=first,
                source=source.ctypes.data, source_bytes=source.nbytes, last=last, release=release,
                error=errors + index * self.squares.strides[0] if is_quantized else None,
            )
            for index, (first, last) in enumerate(self.bounds)
        ]  # fmt: skip

    def convert(self) -> None:
        """Convert the tensor to floats and pack them. For one thread."""
        source = np.ascontiguousarray(self.stored.float32())
        parts = _PartList(self.parts(source, "F32", release=False))
        parts.run()
        self.results = list(parts.parts)
        for mapped in self.stored.sources if self.release else ():
            release_pages(mapped)

    def finish(self) -> PackedMatrix:
        results = [part.result for part in self.results]
        if min(results) < 0:
            raise self._misfit()
        if max(results) > 0:
            raise ModelFileError(f"tensor {self.name} {self._why_not_finite()}")
        errors, weights = self.squares.sum(axis=0).tolist()
        rows, columns = self.stored.shape
        return PackedMatrix(
            self.matrix, self.memory, self.packing, (rows, columns), (errors, weights)
        )

    def _misfit(self) -> ModelFileError:
        return ModelFileError(
            f"tensor {self.name}: its {self.stored.nbytes:,} bytes are not a matrix of "
            f"{' x '.join(str(size) for size in self.stored.shape)} values of type "
            f"{self.stored.type}; the file is damaged"
        )

    def _why_not_finite(self) -> str:
        if np.isfinite(self.stored.float32()).all():
            return f"holds numbers too large for {self.packing.format}; store it as float32"
        return "holds NaN or infinite numbers; the file is damaged"


def pack(
    stored: StoredTensor, *, store: str | None = None, name: str = "weight", threads: int = 1
) -> PackedMatrix:
    """Pack one matrix."""
    return pack_all({name: stored}, store=store, threads=threads)[name]


def pack_all(
    items: Mapping[str, StoredTensor],
    *,
    store: str | None = None,
    threads: int = 1,
    release: bool = True,
) -> dict[str, PackedMatrix]:
    """Pack many matrices into one block of memory, with `threads` threads.

    `release`: return the pages of a mapped file to the system once they are packed. They can still
    be read; they just do not take up memory twice.
    """
    return Packing(items, store=store, threads=threads, release=release).finish()


class Packing:
    """`pack_all` in the background: created, it packs; `finish` waits and returns the matrices.

    The threads hold the GIL only to start, so that they are not slowed by other Python code.
    """

    def __init__(
        self,
        items: Mapping[str, StoredTensor],
        *,
        store: str | None = None,
        threads: int = 1,
        release: bool = True,
    ) -> None:
        tasks = [_PackTask(name, stored, store, release) for name, stored in items.items()]
        sizes = [-(-task.size // ALIGNMENT) * ALIGNMENT for task in tasks]
        memory = _allocate_aligned(sum(sizes))
        for task, start in zip(tasks, itertools.accumulate(sizes, initial=0), strict=False):
            task.set_memory(memory[start : start + task.size])
        parts: list[PartStruct] = []
        self._tasks, self._sources = tasks, []
        for task in tasks:
            if not task.is_converted:
                source = np.ascontiguousarray(task.stored.data)
                is_mapped = release and is_mapped_file(source)
                self._sources.append(source)
                parts += task.parts(source, task.stored.type, is_mapped)
        self._parts = _PartList(parts)
        self._pool = ThreadPoolExecutor(threads, "unspool-pack")
        converted = [task.convert for task in tasks if task.is_converted]
        # The threads hold this object, so that the memory they use outlives a caller that fails.
        jobs = [*converted, *[self._pack] * threads]
        self._futures = [self._pool.submit(job) for job in jobs]

    def _pack(self) -> None:
        self._parts.run()

    def finish(self) -> dict[str, PackedMatrix]:
        """Wait for the threads; raise ModelFileError for a tensor that cannot be packed."""
        try:
            for future in self._futures:
                future.result()
        finally:
            self._pool.shutdown(cancel_futures=True)
        results = iter(self._parts.parts)
        for task in self._tasks:
            if not task.is_converted:
                task.results = list(itertools.islice(results, len(task.bounds)))
        return {task.name: task.finish() for task in self._tasks}


class _PartList:
    """Parts for the native library, which any number of threads may work on together."""

    def __init__(self, parts: Sequence[PartStruct]) -> None:
        self.parts = (PartStruct * len(parts))(*parts)
        self._next = ctypes.c_int64(0)

    def run(self) -> None:
        """Pack parts until none is left."""
        _library().unspool_pack_parts(self.parts, len(self.parts), ctypes.byref(self._next))


def _allocate_aligned(size: int) -> npt.NDArray[np.uint8]:
    """Allocate memory that starts on a cache line. numpy itself requests huge pages."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]


def is_mapped_file(data: npt.NDArray[Any]) -> bool:
    """Whether an array is a contiguous view into a file that is mapped read-only."""
    base = _map_of(data)
    return base is not None and data.flags.c_contiguous and memoryview(base).readonly


def _map_of(data: npt.NDArray[Any]) -> mmap.mmap | None:
    base: Any = data
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, memoryview):
        base = base.obj
    return base if isinstance(base, mmap.mmap) else None


def release_pages(data: npt.NDArray[Any]) -> None:
    """Return to the system the memory of the part of a mapped file that an array views, if it does.

    Only for read-only maps: the file still has the released content.
    """
    base = _map_of(data)
    if base is None or not hasattr(base, "madvise") or not is_mapped_file(data):
        return
    start = data.ctypes.data - np.frombuffer(base, np.uint8).ctypes.data
    first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE  # only pages wholly within the array
    last = (start + data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        with contextlib.suppress(OSError):
            base.madvise(mmap.MADV_DONTNEED, first, last - first)
