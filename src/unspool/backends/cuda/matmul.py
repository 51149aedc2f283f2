"""Matrix products on the GPU: unquantized, exact (batch invariant) and packed weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from unspool.backends.cuda.kernels.common import ACTIVATIONS, LAYER, NO_NORM, RMS
from unspool.backends.cuda.kernels.gemv import gemv_kernel, ordered_gemm_kernel
from unspool.backends.cuda.kernels.packed import (
    FLOAT8,
    HALF,
    HALVES,
    MXFP4,
    NVFP4,
    SIGNED,
    SUPER,
    dequantize_rows_kernel,
    packed_gemm,
    packed_gemv,
)
from unspool.model.files.stored import block_width

# -- Matrix products with unquantized weights: GEMV by our kernel, GEMM by cuBLAS

_WEIGHTS_PER_THREAD = 64  # held in registers: enough loads in flight
_WARPS_PER_SM = 16
_SMALL_BLOCKS = 3  # with at most this many blocks per multiprocessor, each is a program
_MAX_PADDING = 1.5
_MAX_SPLIT_COLUMNS = 8192


@dataclass(frozen=True, slots=True, eq=False)
class NormWeights:
    """An RMSNorm, or, with a bias, a LayerNorm."""

    gain: Tensor  # [width], float32
    bias: Tensor | None = None
    _in_slots: dict[int, NormWeights] = field(default_factory=dict)  # by bits

    def in_slots(self, bits: int) -> NormWeights:
        """The same with its numbers in the order in which packed units multiply them."""
        if bits not in self._in_slots:
            gain, bias = (
                None if x is None else x.view(-1, 32 // bits, 4).transpose(0, 1).flatten()
                for x in (self.gain, self.bias)
            )
            assert gain is not None
            self._in_slots[bits] = NormWeights(gain, bias)
        return self._in_slots[bits]


@dataclass(frozen=True, slots=True, eq=False)
class Addition:
    """An addition to the residual stream h: out = (h + post_norm(first) + second) * scale.

    `added_scale` multiplies what is added. All tensors are as wide as h.
    """

    out: Tensor  # not h: other programs may still read that
    first: Tensor
    second: Tensor | None = None
    post: NormWeights | None = None
    added_scale: float = 1.0
    scale: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Epilogue:
    """Operations fused into a GEMV: addition and norm before it; activation, gate and residual
    after it."""

    eps: float
    norm: NormWeights | None = None  # of the input vector
    activation: str = "none"
    gated: bool = False  # GLU: activation(upper half of the rows) * lower half
    residual: Tensor | None = None  # added at the end
    is_factor: bool = False  # the residual is multiplied, not added
    scale: float = 1.0  # of the product, before the residual is added
    early: bool = True  # whether the next kernel may start before the previous one has ended
    pdl: bool = False  # programmatic dependent launch
    limit: float = 0.0  # clamp of the activation "swiglu_clamped"
    addition: Addition | None = None  # to the input vector

    def arguments(self, x: Tensor, weights: tuple[Tensor, ...], out: Tensor, rows: int) -> Any:
        """Arguments of a GEMV kernel; missing tensors, which are never read, are `x`."""
        added, residual = self.addition or Addition(x, x), self.residual
        return (
            x, added.first, x if added.second is None else added.second, added.out,
            *norm_tensors(added.post, x), *norm_tensors(self.norm, x), *weights,
            x if residual is None else residual, out, rows, self.eps, added.added_scale,
            added.scale, self.scale, *row_strides(x, residual, out),
        )  # fmt: skip

    def in_slots(self, bits: int) -> Epilogue:
        """The same with norms for packed units (`NormWeights.in_slots`)."""
        norm, addition = self.norm, self.addition
        if norm is not None:
            norm = norm.in_slots(bits)
        if addition is not None and addition.post is not None:
            addition = replace(addition, post=addition.post.in_slots(bits))
        return replace(self, norm=norm, addition=addition)

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time constants of a GEMV kernel."""
        added = self.addition
        return {
            "ADDED": 0 if added is None else 1 + (added.second is not None),
            "POST": norm_kind(None if added is None else added.post),
            "SUM_SCALED": added is not None and (added.added_scale != 1 or added.scale != 1),
            "NORM": norm_kind(self.norm),
            "GLU": self.gated,
            "ACTIVATION": ACTIVATIONS[self.activation],
            "RES": 0 if self.residual is None else 1 + self.is_factor,
            "SCALED": self.scale != 1,
            "EARLY": self.early,
            "PDL": self.pdl,
            "LIMIT": self.limit,
        }


def norm_kind(norm: NormWeights | None) -> int:
    if norm is None:
        return NO_NORM
    return RMS if norm.bias is None else LAYER


def norm_tensors(norm: NormWeights | None, filler: Tensor) -> tuple[Tensor, Tensor]:
    """Gain and bias as arguments of kernels; `filler` (never read) for missing ones."""
    if norm is None:
        return filler, filler
    return norm.gain, filler if norm.bias is None else norm.bias


def next_power_of_two(number: int) -> int:
    """Smallest power of two >= number."""
    return 1 << (number - 1).bit_length()


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # Triton's interpreter runs programs one after the other
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program can have."""
    if device.type != "cuda":
        return 0
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def num_vectors(x: Tensor) -> int:
    """Number of vectors: x is [columns] or [n, columns]."""
    return 1 if x.dim() == 1 else len(x)


def row_strides(*vectors: Tensor | None) -> list[int]:
    """Row stride of each tensor; 0 for a single vector or None."""
    return [0 if x is None or x.dim() == 1 else x.stride(0) for x in vectors]


def split_columns(columns: int, gated: bool) -> tuple[int, int]:
    """Powers of two that hold the columns: one, or two if one would have much padding."""
    padded = next_power_of_two(columns)
    if gated or columns > _MAX_SPLIT_COLUMNS or padded <= _MAX_PADDING * columns:
        return padded, 0
    return padded // 2, next_power_of_two(columns - padded // 2)


def gemv_tiling(
    rows: int, columns: int, tiles: int, size: int, vectors: int, device: torch.device
) -> list[int]:
    """Rows per iteration and warps of a program, and programs per vector."""
    if device.type != "cuda":
        return [32, 1, min(-(-rows // 32), 2)]  # few launches and loops: the interpreter is slow
    if columns <= 2048 and rows <= _SMALL_BLOCKS * 4 * num_multiprocessors(device):
        warps = 1 if columns <= 1024 else 4
        programs = num_multiprocessors(device) * _WARPS_PER_SM // warps
        return [4, warps, min(-(-rows // 4), -(-programs // vectors))]
    half_width = columns * tiles * size // 2
    is_small = half_width <= 256 or (half_width <= 1024 and rows >= 16_384)
    block_rows = 1 if half_width >= 32_768 else 4 if is_small else 2
    threads = block_rows * half_width / (32 * _WEIGHTS_PER_THREAD)
    warps_per_sm, most_programs = _WARPS_PER_SM, 8
    if next_power_of_two(columns) > _MAX_PADDING * columns:
        if tiles > 1:  # registers of unused columns leave room for fewer warps
            threads, warps_per_sm = threads / 2, warps_per_sm // 2
        elif columns > _MAX_SPLIT_COLUMNS:
            block_rows = 1
        elif block_rows == 2:
            block_rows, threads = 4, 2 * threads
    elif 512 < columns <= 1024:  # small programs, many of them
        most_programs = 16
        if rows < 16_384:
            block_rows = threads = 2 // tiles
            warps_per_sm = 2 * warps_per_sm // tiles
    warps = max(1, min(16, 1 << round(math.log2(max(1, threads)))))
    programs = num_multiprocessors(device) * min(most_programs, max(1, warps_per_sm // warps))
    return [block_rows, warps, min(-(-rows // block_rows), -(-programs // vectors))]


def gemv(weight: Tensor, bias: Tensor | None, x: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """out = W · x for one vector or each of a few, with fused operations."""
    rows, columns = weight.shape[0] // (1 + epilogue.gated), weight.shape[1]
    tiles, vectors = 1 + epilogue.gated, num_vectors(x)
    block_rows, warps, programs = gemv_tiling(
        rows, columns, tiles, weight.element_size(), vectors, weight.device
    )
    padded, tail = split_columns(columns, epilogue.gated)
    gemv_kernel[(programs, vectors)](
        *epilogue.arguments(x, (weight, x if bias is None else bias), out, rows),
        K=columns, KP=padded, TAIL=tail, BN=block_rows, BIAS=bias is not None,
        **epilogue.constants, LOOP=programs * block_rows < rows, num_warps=warps,
        launch_pdl=epilogue.pdl,
    )  # fmt: skip


def gemm(weight: Tensor, bias: Tensor | None, x: Tensor, out: Tensor) -> None:
    """out [M, rows] = x [M, columns] · Wᵀ + bias."""
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


# -- GEMM with a fixed order of summation: the bits of a row do not depend on the batch
#
# A product on tensor cores that does not split the columns has the same bits with any tiles.
# cuBLAS keeps this order too, except for some deep and narrow matrices at few rows. So cuBLAS is
# compared with our kernel once for each shape and number of rows, and used where they agree.

_ORDERED_COLUMNS = 128  # per tl.dot
_EIGHT_STAGES = 8 * (64 + 16) * _ORDERED_COLUMNS * 2  # bytes of shared memory
_MIN_CUBLAS_ROWS = 16  # up to this many rows our kernel is as fast
_in_order: dict[Hashable, bool] = {}  # by shape: whether cuBLAS sums in our order


def exact_gemm(
    weight: Tensor, bias: Tensor | None, x: Tensor, out: Tensor, *, pdl: bool = False
) -> None:
    """out [M, rows] = x [M, columns] · Wᵀ + bias."""
    first = 0
    for count in _exact_blocks(len(x)) if weight.is_cuda else [len(x)]:
        rows = slice(first, first + count)
        first += count
        if _cublas_keeps_order(weight, bias, count):
            gemm(weight, bias, x[rows], out[rows])
        else:
            _ordered_gemm(weight, bias, x[rows], out[rows], pdl)


def _exact_blocks(count: int) -> list[int]:
    """Blocks of rows with few different sizes, since cuBLAS is checked for each."""
    if count <= _MIN_CUBLAS_ROWS or (count <= 512 and count % 32 == 0):
        return [count]
    block = 1 << (count.bit_length() - 1)
    return [block] + (_exact_blocks(count - block) if count > block else [])


def _ordered_gemm(
    weight: Tensor, bias: Tensor | None, x: Tensor, out: Tensor, pdl: bool = False
) -> None:
    count, (rows, columns) = len(x), weight.shape
    # Without tensor cores one tile for all: its size may change the order.
    is_float32 = weight.dtype == torch.float32
    tile_rows, tile_batch, stages, warps = (
        (32, 16, 2, 4) if is_float32 else _ordered_tile(count, rows, weight.device)
    )
    grid = (-(-rows // tile_rows), -(-count // tile_batch))
    ordered_gemm_kernel[grid](
        x, weight, x if bias is None else bias, out, count, rows, out.stride(0), K=columns,
        BM=tile_batch, BN=tile_rows, BK=_ORDERED_COLUMNS if tile_rows < 128 else 64,
        STAGES=stages, BIAS=bias is not None, PDL=pdl, num_warps=warps, launch_pdl=pdl,
    )  # fmt: skip


def _ordered_tile(count: int, rows: int, device: torch.device) -> tuple[int, int, int, int]:
    """Rows of the matrix, rows of x, stages and warps of a program; the fastest measured."""
    if count <= 16:
        if rows <= 2048:
            return 16, 16, 5, 4
        # A program alone on its multiprocessor needs more loads in flight.
        is_alone = rows <= 64 * num_multiprocessors(device)
        has_room = is_alone and shared_memory(device) >= _EIGHT_STAGES
        return 64, 16, 8 if has_room else 4, 4
    if count <= 64 or rows <= 2048:
        return 64, 16 if rows <= 2048 and count <= 64 else 64, 5, 4
    return (64, 128, 3, 8) if rows <= 8192 else (128, 256, 3, 8)


def _cublas_keeps_order(weight: Tensor, bias: Tensor | None, count: int) -> bool:
    """Whether cuBLAS sums in our order: compares the bits of one product, once for each shape."""
    if count <= _MIN_CUBLAS_ROWS or not weight.is_cuda or weight.dtype == torch.float32:
        return False
    key = (count, weight.shape, bias is None, weight.dtype, weight.device)
    if key not in _in_order:
        try:
            x, probe = _order_probe(count, weight)
            ordered, by_cublas = (x.new_empty(count, len(weight)) for _ in range(2))
        except torch.OutOfMemoryError:
            return False
        no_bias = None if bias is None else torch.zeros_like(bias)
        _ordered_gemm(probe, no_bias, x, ordered)
        gemm(probe, no_bias, x, by_cublas)
        _in_order[key] = torch.equal(ordered, by_cublas)
    return _in_order[key]


def _order_probe(count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors and a matrix whose products are only rounding errors, which the order decides: pairs
    of columns cancel each other, and are of very different sizes."""
    rows, columns = like.shape
    random = torch.Generator(like.device).manual_seed(0)
    options: dict[str, Any] = {"generator": random, "device": like.device}
    x, weight = (torch.randn(n, columns, dtype=like.dtype, **options) for n in (count, rows))
    first, second, rest = torch.randperm(columns, **options).tensor_split(
        (columns // 2, columns // 2 * 2)
    )
    x[:, rest] = 0
    x[:, first] *= 2.0 ** torch.randint(0, 12, (len(first),), **options)
    x[:, second] = -x[:, first]
    weight[:, second] = weight[:, first]
    return x, weight


# -- Quantized weights of a file, repacked without loss into the layout of the kernels


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Layout of a packed matrix."""

    bits: int
    kind: int
    offset: int = 0
    share: int = 1  # units per record (FP8: per scale)

    @property
    def unit(self) -> int:
        """Columns per unit."""
        return 128 // self.bits


PACKINGS = {
    "Q4_0": PackedLayout(4, HALF, offset=8),
    "Q4_1": PackedLayout(4, HALVES),
    "Q4_K": PackedLayout(4, SUPER),
    "Q5_0": PackedLayout(8, HALF, offset=16, share=2),
    "Q5_1": PackedLayout(8, HALVES, share=2),
    "Q5_K": PackedLayout(8, SUPER, share=2),
    "Q8_0": PackedLayout(8, HALF, offset=128, share=2),
    "Q2_K": PackedLayout(8, SUPER),
    "Q3_K": PackedLayout(8, SIGNED, offset=4, share=2),
    "Q6_K": PackedLayout(8, SIGNED, offset=32, share=2),
    "MXFP4": PackedLayout(4, MXFP4),
    "NVFP4": PackedLayout(4, NVFP4),
}
BLOCKS = {  # type -> weights and bytes per block
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176),
    "Q6_K": (256, 210), "MXFP4": (32, 17), "NVFP4": (64, 36),
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class PackedTensors:
    """Tensors of a packed matrix, as the kernels read them."""

    quants: Tensor  # int32 [rows, units, 4]
    records: Tensor | None = None  # int32 [rows, words]: one or two records each
    # Two float16 in an int32 [rows, columns / 256]; FP8: float32 scales [rows, blocks]; NVFP4:
    # float32 factors [rows, 1].
    factors: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.quants, self.records, self.factors) if t is not None]

    def empty_like(self, rows: int) -> PackedTensors:
        """Uninitialized tensors of the same layout with `rows` rows."""

        def empty(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.new_empty(rows, *tensor.shape[1:])

        quants = empty(self.quants)
        assert quants is not None
        return PackedTensors(quants, empty(self.records), empty(self.factors))

    def copy_rows(self, first: int, rows: PackedTensors) -> None:
        """Copy `rows` to the rows from `first` on."""
        for target, source in zip(self.tensors(), rows.tensors(), strict=True):
            target[first : first + len(source)].copy_(source)

    def is_finite(self, packing: PackedLayout) -> Tensor:
        """Whether all weights are finite, as a 0-d tensor."""
        if packing.kind == FLOAT8:
            assert self.factors is not None
            broken = ((self.quants & 0x7F7F7F7F) ^ 0x7F7F7F7F).view(torch.uint8) == 0
            return self.factors.isfinite().all() & ~broken.any()
        if packing.kind == NVFP4:
            assert self.factors is not None
            return self.factors.isfinite().all()
        if packing.kind == MXFP4:
            assert self.records is not None
            return (self.records.view(torch.uint8) <= _MAX_POWER).all()
        scales = self.factors if self.factors is not None else self.records
        assert scales is not None
        return scales.view(torch.float16).isfinite().all()


_MAX_POWER = 252  # of MXFP4: 6 * 2 ** (252 - 127) is finite


def repack(type: str, raw: Tensor, row_factors: Tensor | None = None) -> PackedTensors:
    """Repack blocks of a GGUF type [rows, bytes].

    Args:
        row_factors: global factor of each row of NVFP4, float32 [rows]; None: all are 1.
    """
    blocks = raw.reshape(len(raw), -1, BLOCKS[type][1])  # [rows, blocks, bytes]
    q, records, factors = _UNPACKERS[type](blocks)
    rows = len(raw)
    if records is not None:
        records = _pad_to_words(records.reshape(rows, -1))
    if type == "NVFP4":
        if row_factors is None:
            row_factors = torch.ones(rows, device=raw.device)
        factors = row_factors.view(rows, 1)
    elif factors is not None:  # two float16 in an int32
        factors = factors.contiguous().view(torch.int32).reshape(rows, -1)
    return PackedTensors(_pack_units(q.reshape(rows, -1), PACKINGS[type].bits), records, factors)


def _pad_to_words(records: Tensor) -> Tensor:
    """View the bytes of rows as int32, padded with zeros."""
    return torch.nn.functional.pad(records, (0, -records.shape[1] % 4)).view(torch.int32)


def _pack_units(q: Tensor, bits: int) -> Tensor:
    """Pack weights [rows, columns], one per byte, into words [rows, units, 4]."""
    if bits == 4:  # two slots share the bytes of the four words
        slots = q.view(len(q), -1, 4, 2, 4)
        q = slots[:, :, :, 0] | slots[:, :, :, 1] << 4
    bytes_of_words = q.reshape(len(q), -1, 4, 4).transpose(2, 3).contiguous()
    return bytes_of_words.view(torch.int32)[..., 0]


# -- blocks [rows, blocks, bytes] to weights, records and factors ----------------------------------

_Unpacked = tuple[Tensor, Tensor | None, Tensor | None]


def _nibbles(bytes_: Tensor, run: int) -> Tensor:
    """Low nibbles of `run` bytes, then their high nibbles, and so on."""
    runs = bytes_.unflatten(-1, (-1, run))
    return torch.stack((runs & 15, runs >> 4), -2).flatten(-3)


def _bits(bytes_: Tensor, run: int, bits: int) -> Tensor:
    """The lowest `bits` of `run` bytes, then the next, and so on."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=bytes_.device)[:, None]
    runs: Tensor = bytes_.unflatten(-1, (-1, 1, run))
    return (runs >> shifts & (1 << bits) - 1).flatten(-3)


def _fifth_bit(bytes_: Tensor) -> Tensor:
    """32 bits in four bytes, lowest first, as 16 or 0."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bytes_.device)
    return (((bytes_[..., None] >> shifts) & 1) << 4).flatten(-2)


def _negate(halves: Tensor) -> Tensor:
    """Negate float16 numbers given as bytes."""
    flipped = halves.clone()
    flipped[..., 1::2] ^= 128
    return flipped


def _q4_0(blocks: Tensor) -> _Unpacked:
    return _nibbles(blocks[..., 2:], 16), blocks[..., :2], None


def _q4_1(blocks: Tensor) -> _Unpacked:
    record = torch.cat((blocks[..., :2], _negate(blocks[..., 2:4])), -1)
    return _nibbles(blocks[..., 4:], 16), record, None


def _q5_0(blocks: Tensor) -> _Unpacked:
    q = _nibbles(blocks[..., 6:], 16) | _fifth_bit(blocks[..., 2:6])
    return q, blocks[..., :2], None


def _q5_1(blocks: Tensor) -> _Unpacked:
    q = _nibbles(blocks[..., 8:], 16) | _fifth_bit(blocks[..., 4:8])
    return q, torch.cat((blocks[..., :2], _negate(blocks[..., 2:4])), -1), None


def _q8_0(blocks: Tensor) -> _Unpacked:
    return blocks[..., 2:] ^ 128, blocks[..., :2], None


def _scales_and_minima(packed: Tensor) -> Tensor:
    """The 6-bit scales and minima of Q4_K and Q5_K, 12 bytes: [.., 8, 2]."""
    low, high, upper_bits = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((low & 63, (upper_bits & 15) | ((low >> 2) & 48)), -1)
    minima = torch.cat((high & 63, (upper_bits >> 4) | ((high >> 2) & 48)), -1)
    return torch.stack((scales, minima), -1)


def _q4_k(blocks: Tensor) -> _Unpacked:
    return _nibbles(blocks[..., 16:], 32), _scales_and_minima(blocks[..., 4:16]), blocks[..., :4]


def _q5_k(blocks: Tensor) -> _Unpacked:
    q = _nibbles(blocks[..., 48:], 32) | _bits(blocks[..., 16:48], 32, 1) << 4
    return q, _scales_and_minima(blocks[..., 4:16]), blocks[..., :4]


def _q2_k(blocks: Tensor) -> _Unpacked:
    scales = blocks[..., :16]
    records = torch.stack((scales & 15, scales >> 4), -1)
    return _bits(blocks[..., 16:80], 32, 2), records, blocks[..., 80:]


def _q3_k(blocks: Tensor) -> _Unpacked:
    """Weights + 4: the third bit means that 4 is not subtracted."""
    q = _bits(blocks[..., 32:96], 32, 2) | _bits(blocks[..., :32], 32, 1) << 2
    packed = blocks[..., 96:108]
    low, high = _nibbles(packed[..., :8], 8), _bits(packed[..., 8:], 4, 2)
    scales = ((low | high << 4).to(torch.int8) - 32).view(torch.uint8)
    return q, scales.unflatten(-1, (-1, 2)), _add_zero_minimum(blocks[..., 108:])


def _q6_k(blocks: Tensor) -> _Unpacked:
    low = _nibbles(blocks[..., :128], 64)
    q = low | _bits(blocks[..., 128:192], 32, 2) << 4
    return q, blocks[..., 192:208].unflatten(-1, (-1, 2)), _add_zero_minimum(blocks[..., 208:])


def _mxfp4(blocks: Tensor) -> _Unpacked:
    return _nibbles(blocks[..., 1:], 16), blocks[..., :1], None


def _nvfp4(blocks: Tensor) -> _Unpacked:
    """Scales without their unused sign; NaN is 0, as in llama.cpp."""
    scales = blocks[..., :4]
    return _nibbles(blocks[..., 4:], 8), torch.where(scales == 127, 0, scales & 127), None


def _add_zero_minimum(factor: Tensor) -> Tensor:
    return torch.cat((factor, torch.zeros_like(factor)), -1)


_UNPACKERS = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k,
    "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "MXFP4": _mxfp4, "NVFP4": _nvfp4,
}  # fmt: skip


# -- FP8, and quantization at load time ------------------------------------------------------------


def float8_packing(columns: int, blocks: int) -> PackedLayout:
    """Layout of FP8 rows with `blocks` scales each."""
    block_columns = columns if blocks == 1 else block_width(columns, blocks)
    return PackedLayout(8, FLOAT8, share=block_columns // 16)


def pack_float8(raw: Tensor, scales: Tensor) -> PackedTensors:
    """Pack FP8 weights (as bytes [rows, columns]) with their scales [rows, blocks]."""
    return PackedTensors(_pack_units(raw, 8), None, scales.contiguous())


def quantize(weight: Tensor, bits: int) -> tuple[PackedLayout, PackedTensors]:
    """Quantize a matrix to 4 or 8 bits in groups of 32 columns."""
    groups = weight.float().unflatten(1, (-1, 32))
    if bits == 8:
        scale = (groups.abs().amax(-1, keepdim=True) / 127).half()
        record, q = scale, groups / _nonzero(scale) + 128
    else:
        low_end, high_end = groups.aminmax(dim=-1, keepdim=True)
        minimum, scale = low_end.half(), ((high_end - low_end) / 15).half()
        record = torch.cat((scale, -minimum), -1)
        q = (groups - minimum.float()) / _nonzero(scale)
    weights = q.round().clamp(0, (1 << bits) - 1).to(torch.uint8).flatten(1)
    records = _pad_to_words(record.contiguous().view(torch.uint8).flatten(1))
    packing = PACKINGS["Q8_0" if bits == 8 else "Q4_1"]
    return packing, PackedTensors(_pack_units(weights, bits), records)


def _nonzero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale.float())


# -- Quantized matrices that stay packed on the device: GGUF types in 4 and 8 bits, and FP8

_MAX_REGISTER_ROWS = 64  # up to this many rows of x, weights are dequantized in registers
_UNITS_PER_THREAD = 4  # loads in flight
_MAX_WARPS, _PACKED_WARPS_PER_SM = 16, 16
_MAX_REGISTERS = 128  # per thread, so that all these warps fit
_DEQUANT_SIZE = 1 << 25  # weights that are dequantized at a time for larger batches


@functools.cache
def _dequant_buffer(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Buffer for dequantized rows, shared by all matrices of a device."""
    return torch.empty(size, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A quantized matrix. Vectors are in `dtype`."""

    packing: PackedLayout
    parts: PackedTensors
    rows: int
    columns: int
    dtype: torch.dtype
    bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.parts.nbytes

    @property
    def device(self) -> torch.device:
        return self.parts.quants.device

    @property
    def _units(self) -> int:
        return self.columns // self.packing.unit

    def kernel_tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Quants, records and factors as arguments of kernels."""
        parts = self.parts
        placeholder = parts.quants
        return (
            parts.quants,
            placeholder if parts.records is None else parts.records,
            placeholder if parts.factors is None else parts.factors,
        )

    def kernel_constants(self) -> dict[str, Any]:
        """The layout as constants of kernels."""
        packing = self.packing
        return {
            "U": self._units, "BITS": packing.bits, "KIND": packing.kind, "OFFSET": packing.offset,
            "SHARE": packing.share,
        }  # fmt: skip

    def gemv(self, x: Tensor, out: Tensor, epilogue: Epilogue) -> None:
        """out = W · x for one vector or each of a few, with fused operations."""
        rows, vectors = self.rows // (1 + epilogue.gated), num_vectors(x)
        block_rows, warps, programs = packed_gemv_tiling(
            rows, self._units, 1 + epilogue.gated, vectors, x.device
        )
        epilogue = epilogue.in_slots(self.packing.bits)
        weights = (*self.kernel_tensors(), x if self.bias is None else self.bias)
        packed_gemv[(programs, vectors)](
            *epilogue.arguments(x, weights, out, rows), K=self.columns,
            UP=next_power_of_two(self._units), **self.kernel_constants(), BN=block_rows,
            BIAS=self.bias is not None, **epilogue.constants, NATIVE=x.is_cuda,
            LOOP=programs * block_rows < rows, maxnreg=_MAX_REGISTERS, num_warps=warps,
            launch_pdl=epilogue.pdl,
        )  # fmt: skip

    def gemm(self, x: Tensor, out: Tensor, exact: bool = False, pdl: bool = False) -> None:
        """out [M, rows] = x [M, columns] · Wᵀ + bias."""
        if exact or len(x) <= _MAX_REGISTER_ROWS:
            self._small_gemm(x, out)
            return
        step = _DEQUANT_SIZE // self.columns
        buffer = _dequant_buffer(_DEQUANT_SIZE, x.dtype, x.device)
        for first in range(0, self.rows, step):
            last = min(first + step, self.rows)
            block = buffer[: (last - first) * self.columns].view(-1, self.columns)
            self.dequantize(first, block)
            bias = None if self.bias is None else self.bias[first:last]
            gemm(block, bias, x, out[:, first:last])

    def _small_gemm(self, x: Tensor, out: Tensor) -> None:
        vectors = len(x)
        block_rows = min(64, max(16, next_power_of_two(vectors)))
        grid = (-(-self.rows // 64), -(-vectors // block_rows))
        packed_gemm[grid](
            x,
            *self.kernel_tensors(),
            x if self.bias is None else self.bias,
            out,
            vectors,
            self.rows,
            out.stride(0),
            K=self.columns,
            **self.kernel_constants(),
            BN=64,
            BM=block_rows,
            BU=128 // self.packing.unit,
            BIAS=self.bias is not None,
            num_warps=4,
        )

    def dequantize(self, first: int, out: Tensor) -> None:
        """Dequantize rows from `first` on, as many as `out` has."""
        units = min(64, next_power_of_two(self._units))
        block_rows = 4 if out.is_cuda else 64  # the interpreter is slow: few programs
        grid = (-(-len(out) // block_rows), -(-self._units // units))
        dequantize_rows_kernel[grid](
            *self.kernel_tensors(), out, out, out, first, first + len(out),
            **self.kernel_constants(), BU=units, BN=block_rows, CHOSEN=False,
        )  # fmt: skip

    def embed_tokens(self, tokens: Tensor, previous: Tensor, out: Tensor) -> None:
        """Embed tokens; a token -1 - n stands for `previous[n]`."""
        units = min(128, next_power_of_two(self._units))
        grid = (len(tokens), -(-self._units // units))
        dequantize_rows_kernel[grid](
            *self.kernel_tensors(), tokens, previous, out, 0, self.rows,
            **self.kernel_constants(), BU=units, BN=1, CHOSEN=True,
        )  # fmt: skip

    def float_rows(self, first: int, last: int) -> Tensor:
        """Rows `first` to `last` in float32."""
        out = torch.empty(last - first, self.columns, device=self.device)
        self.dequantize(first, out)
        return out


@functools.cache
def packed_gemv_tiling(
    rows: int, units: int, tiles: int, vectors: int, device: torch.device
) -> tuple[int, int, int]:
    """Rows per iteration and warps of a program, and programs per vector.

    All programs run at the same time: each iterates over its share of the rows.
    """
    padded_units = next_power_of_two(units)
    warps = max(1, min(_MAX_WARPS, padded_units // 32))
    block_rows = max(1, _UNITS_PER_THREAD * 32 * warps // padded_units // tiles)
    programs = num_multiprocessors(device) * min(16, _PACKED_WARPS_PER_SM // warps)
    return block_rows, warps, min(-(-rows // block_rows), -(-programs // vectors))
