"""Quantized weights of a file in the layout that the packed kernels read, no number changed.

    parts = packed_parts("Q4_K", raw)      # raw: uint8 [rows, bytes of a row], on any device

`kernels/packed.py` says how 4 and 8 bits lie in units of 16 bytes. Files with 4 bits a number keep
4; those with 2, 3, 5 or 6 get 8. Beside the units there are records (scale, minimum) and factors:

    HALF    a 16-bit float: the scale                               Q4_0 Q5_0 Q8_0
    HALVES  two: the scale, and the minimum with its sign turned    Q4_1 Q5_1
    SUPER   two bytes: of the scale and of the minimum; two 16-bit  Q2_K Q4_K Q5_K
            factors for 256 columns
    SIGNED  two signed bytes: of the scales of two units            Q3_K Q6_K
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from unspool.backends.cuda.kernels.packed import FLOAT8, HALF, HALVES, SIGNED, SUPER
from unspool.model.float8 import block_width


@dataclass(frozen=True, slots=True)
class Packing:
    """How the numbers of a packed matrix are kept."""

    bits: int
    kind: int
    offset: int = 0
    share: int = 1  # units that share a record (FP8: a scale)

    @property
    def unit(self) -> int:
        """Columns of a unit."""
        return 128 // self.bits


PACKINGS = {
    "Q4_0": Packing(4, HALF, offset=8),
    "Q4_1": Packing(4, HALVES),
    "Q4_K": Packing(4, SUPER),
    "Q5_0": Packing(8, HALF, offset=16, share=2),
    "Q5_1": Packing(8, HALVES, share=2),
    "Q5_K": Packing(8, SUPER, share=2),
    "Q8_0": Packing(8, HALF, offset=128, share=2),
    "Q2_K": Packing(8, SUPER),
    "Q3_K": Packing(8, SIGNED, offset=4, share=2),
    "Q6_K": Packing(8, SIGNED, offset=32, share=2),
}
BLOCKS = {  # type -> numbers and bytes of a block
    "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144), "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """A packed matrix: the tensors that the kernels are given."""

    quants: Tensor  # int32 [rows, units, 4]
    records: Tensor | None = None  # int32 [rows, words]: one or two records each
    factors: Tensor | None = (
        None  # two 16-bit floats in an int32 [rows, columns / 256]; FP8: scales
    )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        return [t for t in (self.quants, self.records, self.factors) if t is not None]

    def like(self, rows: int) -> Parts:
        """Room for so many rows of the same."""

        def room(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.new_empty(rows, *tensor.shape[1:])

        quants = room(self.quants)
        assert quants is not None
        return Parts(quants, room(self.records), room(self.factors))

    def put(self, first: int, rows: Parts) -> None:
        """Set the rows from `first` on."""
        for ours, theirs in zip(self.tensors(), rows.tensors(), strict=True):
            ours[first : first + len(theirs)].copy_(theirs)

    def finite(self, packing: Packing) -> Tensor:
        """Whether every number is one, as a tensor."""
        if packing.kind == FLOAT8:
            assert self.factors is not None
            broken = ((self.quants & 0x7F7F7F7F) ^ 0x7F7F7F7F).view(torch.uint8) == 0
            return self.factors.isfinite().all() & ~broken.any()
        scales = self.factors if self.factors is not None else self.records
        assert scales is not None
        return scales.view(torch.float16).isfinite().all()


def packed_parts(type: str, raw: Tensor) -> Parts:
    """Blocks of a GGUF type [rows, bytes], moved into our layout."""
    blocks = raw.reshape(len(raw), -1, BLOCKS[type][1])  # [rows, blocks, bytes]
    q, records, factors = _READERS[type](blocks)
    rows = len(raw)
    if records is not None:
        records = _words(records.reshape(rows, -1))
    if factors is not None:  # two 16-bit floats as one number
        factors = factors.contiguous().view(torch.int32).reshape(rows, -1)
    return Parts(_units(q.reshape(rows, -1), PACKINGS[type].bits), records, factors)


def _words(records: Tensor) -> Tensor:
    """Bytes of rows as words, the last filled up."""
    return torch.nn.functional.pad(records, (0, -records.shape[1] % 4)).view(torch.int32)


def _units(q: Tensor, bits: int) -> Tensor:
    """Numbers [rows, columns], a byte each, as words [rows, units, 4]."""
    if bits == 4:  # two slots share the bytes of the four words
        slots = q.view(len(q), -1, 4, 2, 4)
        q = slots[:, :, :, 0] | slots[:, :, :, 1] << 4
    bytes_of_words = q.reshape(len(q), -1, 4, 4).transpose(2, 3).contiguous()
    return bytes_of_words.view(torch.int32)[..., 0]


# -- reading blocks: [rows, blocks, bytes] to numbers, records and factors -------------------------

_Read = tuple[Tensor, Tensor | None, Tensor | None]


def _nibbles(bytes_: Tensor, run: int) -> Tensor:
    """Low halves of `run` bytes, then their high halves, and so on."""
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


def _negated(halves: Tensor) -> Tensor:
    """16-bit floats (as bytes) with their sign turned."""
    flipped = halves.clone()
    flipped[..., 1::2] ^= 128
    return flipped


def _q4_0(blocks: Tensor) -> _Read:
    return _nibbles(blocks[..., 2:], 16), blocks[..., :2], None


def _q4_1(blocks: Tensor) -> _Read:
    record = torch.cat((blocks[..., :2], _negated(blocks[..., 2:4])), -1)
    return _nibbles(blocks[..., 4:], 16), record, None


def _q5_0(blocks: Tensor) -> _Read:
    q = _nibbles(blocks[..., 6:], 16) | _fifth_bit(blocks[..., 2:6])
    return q, blocks[..., :2], None


def _q5_1(blocks: Tensor) -> _Read:
    q = _nibbles(blocks[..., 8:], 16) | _fifth_bit(blocks[..., 4:8])
    return q, torch.cat((blocks[..., :2], _negated(blocks[..., 2:4])), -1), None


def _q8_0(blocks: Tensor) -> _Read:
    return blocks[..., 2:] ^ 128, blocks[..., :2], None


def _scales_and_minima(packed: Tensor) -> Tensor:
    """The 6-bit scales and minima of Q4_K and Q5_K, 12 bytes: [.., 8, 2]."""
    low, high, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = torch.cat((low & 63, (rest & 15) | ((low >> 2) & 48)), -1)
    minima = torch.cat((high & 63, (rest >> 4) | ((high >> 2) & 48)), -1)
    return torch.stack((scales, minima), -1)


def _q4_k(blocks: Tensor) -> _Read:
    return _nibbles(blocks[..., 16:], 32), _scales_and_minima(blocks[..., 4:16]), blocks[..., :4]


def _q5_k(blocks: Tensor) -> _Read:
    q = _nibbles(blocks[..., 48:], 32) | _bits(blocks[..., 16:48], 32, 1) << 4
    return q, _scales_and_minima(blocks[..., 4:16]), blocks[..., :4]


def _q2_k(blocks: Tensor) -> _Read:
    scales = blocks[..., :16]
    records = torch.stack((scales & 15, scales >> 4), -1)
    return _bits(blocks[..., 16:80], 32, 2), records, blocks[..., 80:]


def _q3_k(blocks: Tensor) -> _Read:
    """The numbers + 4; the third bit says that nothing is to be taken away."""
    q = _bits(blocks[..., 32:96], 32, 2) | _bits(blocks[..., :32], 32, 1) << 2
    packed = blocks[..., 96:108]
    low, high = _nibbles(packed[..., :8], 8), _bits(packed[..., 8:], 4, 2)
    scales = ((low | high << 4).to(torch.int8) - 32).view(torch.uint8)
    return q, scales.unflatten(-1, (-1, 2)), _with_no_minimum(blocks[..., 108:])


def _q6_k(blocks: Tensor) -> _Read:
    low = _nibbles(blocks[..., :128], 64)
    q = low | _bits(blocks[..., 128:192], 32, 2) << 4
    return q, blocks[..., 192:208].unflatten(-1, (-1, 2)), _with_no_minimum(blocks[..., 208:])


def _with_no_minimum(factor: Tensor) -> Tensor:
    return torch.cat((factor, torch.zeros_like(factor)), -1)


_READERS = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k,
    "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k,
}  # fmt: skip


# -- FP8, and plain numbers ------------------------------------------------------------------------


def float8_packing(columns: int, blocks: int) -> Packing:
    """Rows with so many scales."""
    wide = columns if blocks == 1 else block_width(columns, blocks)
    return Packing(8, FLOAT8, share=wide // 16)


def float8_parts(raw: Tensor, scales: Tensor) -> Parts:
    """FP8 numbers (as bytes [rows, columns]) with their scales [rows, blocks]."""
    return Parts(_units(raw, 8), None, scales.contiguous())


def quantized(weight: Tensor, bits: int) -> tuple[Packing, Parts]:
    """A plain matrix rounded to 4 or 8 bits, in groups of 32 columns."""
    groups = weight.float().unflatten(1, (-1, 32))
    if bits == 8:
        scale = (groups.abs().amax(-1, keepdim=True) / 127).half()
        record, q = scale, groups / _not_zero(scale) + 128
    else:
        least, most = groups.aminmax(dim=-1, keepdim=True)
        minimum, scale = least.half(), ((most - least) / 15).half()
        record = torch.cat((scale, -minimum), -1)
        q = (groups - minimum.float()) / _not_zero(scale)
    whole = q.round().clamp(0, (1 << bits) - 1).to(torch.uint8).flatten(1)
    records = _words(record.contiguous().view(torch.uint8).flatten(1))
    packing = PACKINGS["Q8_0" if bits == 8 else "Q4_1"]
    return packing, Parts(_units(whole, bits), records)


def _not_zero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale.float())
