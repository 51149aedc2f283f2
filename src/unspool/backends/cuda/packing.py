"""Quantized weights of a file, repacked without loss into the layout of the kernels.

    parts = repack("Q4_K", raw)      # raw: uint8 [rows, bytes of a row], on any device

`kernels/packed.py` describes the layout: units of 16 bytes with 4 or 8 bits per weight. 4-bit types
keep 4 bits; types with 2, 3, 5 or 6 bits get 8. Beside the units there are records (scale and
minimum of a block) and factors (of a super-block of 256 columns):

    HALF    float16 scale                                            Q4_0 Q5_0 Q8_0
    HALVES  float16 scale and negated float16 minimum                Q4_1 Q5_1
    SUPER   one byte each for scale and minimum; two float16 factors Q2_K Q4_K Q5_K
    SIGNED  two signed bytes: the scales of two units                Q3_K Q6_K
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unspool.backends.cuda.kernels.packed import FLOAT8, HALF, HALVES, SIGNED, SUPER
from unspool.model.float8 import block_width


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
}
BLOCKS = {  # type -> weights and bytes per block
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class PackedTensors:
    """Tensors of a packed matrix, as the kernels read them."""

    quants: Tensor  # int32 [rows, units, 4]
    records: Tensor | None = None  # int32 [rows, words]: one or two records each
    # Two float16 in an int32 [rows, columns / 256]; FP8: float32 scales [rows, blocks].
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
        scales = self.factors if self.factors is not None else self.records
        assert scales is not None
        return scales.view(torch.float16).isfinite().all()


def repack(type: str, raw: Tensor) -> PackedTensors:
    """Repack blocks of a GGUF type [rows, bytes]."""
    blocks = raw.reshape(len(raw), -1, BLOCKS[type][1])  # [rows, blocks, bytes]
    q, records, factors = _UNPACKERS[type](blocks)
    rows = len(raw)
    if records is not None:
        records = _pad_to_words(records.reshape(rows, -1))
    if factors is not None:  # two float16 in an int32
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


def _add_zero_minimum(factor: Tensor) -> Tensor:
    return torch.cat((factor, torch.zeros_like(factor)), -1)


_UNPACKERS = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k,
    "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
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
