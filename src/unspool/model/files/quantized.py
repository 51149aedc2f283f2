"""Read quantized safetensors: MXFP4, NVFP4, compressed-tensors, AWQ, GPTQ and MLX.

    scheme = scheme_of(config)              # from config.json; None: not quantized
    scheme.stored("model.layers.0.mlp.up_proj.weight", tensors)

Groups of 4- or 8-bit integers with a scale and a zero point or minimum are repacked without
rounding. If precision is lost nevertheless, `Scheme.losses` describes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from unspool.errors import ModelFileError
from unspool.model.files.gguf import BLOCK_TYPES
from unspool.model.files.stored import GROUP, UNSPOOL_BLOCK_BYTES, FileTensor, is_float8

# -- Quantized tensors of safetensors files, repacked into blocks on demand

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Parts = tuple[Array, ...]

_SIZES = {kind.name: (kind.elements, kind.size) for kind in BLOCK_TYPES.values()}
_SIZES |= {name: (GROUP, size) for name, size in UNSPOOL_BLOCK_BYTES.items()}


class ConvertedTensor(FileTensor):
    """A packed tensor whose blocks are built from parts that share their first axes."""

    __slots__ = ("_build", "_parts")
    _build: Callable[..., Bytes]
    _parts: Parts

    def __init__(
        self, type: str, shape: tuple[int, ...], build: Callable[..., Bytes], parts: Parts,
        factor: npt.NDArray[np.float32] | None = None,
    ) -> None:  # fmt: skip
        fields = {"type": type, "shape": shape, "scales": None, "factor": factor}
        for name, value in {**fields, "_build": build, "_parts": parts}.items():
            object.__setattr__(self, name, value)

    @property
    def data(self) -> Bytes:
        """The blocks, [..., bytes of a row]; built at each access."""
        return self._build(*self._parts)

    @property
    def nbytes(self) -> int:
        elements, size = _SIZES[self.type]
        return math.prod(self.shape) // elements * size

    @property
    def sources(self) -> Parts:
        return self._parts

    def _only(self, choose: Callable[[Array], Array], axes: int) -> ConvertedTensor:
        """Select rows; the first `axes` axes of the shape may change."""
        parts = tuple(map(choose, self._parts))
        shape = (*parts[0].shape[:axes], *self.shape[axes:])
        return ConvertedTensor(self.type, shape, self._build, parts, self.factor)

    def rows(self, start: int, stop: int) -> FileTensor:
        return self._only(lambda part: part[start:stop], 1)

    def reordered(self, order: npt.NDArray[np.int64]) -> FileTensor:
        return self._only(lambda part: part[order], 1)

    def every_second(self, first: int) -> FileTensor:
        return self._only(lambda part: part[:, first::2], 2)

    def slices(self) -> list[FileTensor]:
        factors = [None] * self.shape[0] if self.factor is None else list(self.factor)
        return [
            ConvertedTensor(self.type, self.shape[1:], self._build, tuple(parts), factor)
            for *parts, factor in zip(*self._parts, factors, strict=True)
        ]

    @staticmethod
    def stacked(parts: Sequence[FileTensor]) -> FileTensor:
        """Stack tensors; those of one type are not built before their blocks are read."""
        if len({(type(part), part.type, part.shape) for part in parts}) != 1:
            return FileTensor.stacked(parts)
        tensors = np.empty(len(parts), object)
        tensors[:] = parts
        factors = [part.factor for part in parts if part.factor is not None]
        shape = (len(parts), *parts[0].shape)
        factor = np.stack(factors) if factors else None
        return ConvertedTensor(parts[0].type, shape, _blocks_of, (tensors,), factor)


def _blocks_of(parts: Array | FileTensor) -> Bytes:
    if isinstance(parts, FileTensor):
        return parts.data
    return np.stack([part.data for part in parts])


def split_nibble_halves(nibbles: Bytes) -> Bytes:
    """Repack 16 bytes of adjacent nibble pairs: the first 16 numbers become the low nibbles."""
    front, back = nibbles[..., :8], nibbles[..., 8:]
    out = np.empty_like(nibbles)
    out[..., 0::2] = (front & 15) | (back << 4)
    out[..., 1::2] = (front >> 4) | (back & 240)
    return out


def view_as_blocks(numbers: Array, of_block: int) -> Bytes:
    """View packed numbers as [..., blocks, block_bytes]."""
    flat = np.ascontiguousarray(numbers).view(np.uint8)
    return flat.reshape(*numbers.shape[:-1], -1, of_block)


def build_mxfp4(blocks: Bytes, scales: Bytes) -> Bytes:
    joined = np.concatenate(
        (scales[..., None], split_nibble_halves(np.ascontiguousarray(blocks))), -1
    )
    return joined.reshape(*joined.shape[:-2], -1)


def build_nvfp4(numbers: Bytes, scales: Bytes) -> Bytes:
    """Blocks of 64: four scales, then four groups of 16, the first eight as low nibbles."""
    pairs = view_as_blocks(numbers, 8)
    front, back = pairs[..., :4], pairs[..., 4:]
    body = np.empty_like(pairs)
    body[..., 0::2] = (front & 15) | (back << 4)
    body[..., 1::2] = (front >> 4) | (back & 240)
    joined = np.concatenate(
        (view_as_blocks(scales, 4), view_as_blocks(body.reshape(numbers.shape), 32)), -1
    )
    return joined.reshape(*joined.shape[:-2], -1)


def build_groups(bits: int, signed: int) -> Callable[..., Bytes]:
    """Builder of blocks: a scale, an optional zero point or minimum, and the numbers.

    Args:
        signed: Subtracted from 8-bit numbers, because Q8_0 is signed.
    """

    def build(numbers: Array, scales: Array, *lows: Array) -> Bytes:
        if bits == 4:
            body = split_nibble_halves(view_as_blocks(numbers, GROUP // 2))
        else:
            body = view_as_blocks(numbers, GROUP) - np.uint8(signed)
        count = body.shape[-2]
        fields = [
            view_as_blocks(np.repeat(part, count // part.shape[-1], -1), part.dtype.itemsize)
            for part in (scales, *lows)
        ]
        joined = np.concatenate((*fields, body), -1)
        return joined.reshape(*joined.shape[:-2], -1)

    return build


Raw = Mapping[str, Any]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output index of each nibble of a word
SUPPORTED = "FP8, MXFP4, NVFP4, compressed-tensors (pack-quantized), AWQ, GPTQ and MLX"


class Tensors(Protocol):
    """The tensors of a checkpoint, by name."""

    def __contains__(self, name: object) -> bool: ...
    def floats(self, name: str) -> npt.NDArray[np.float32]: ...
    def integers(self, name: str) -> Array: ...


@dataclass(slots=True)
class Groups:
    """Packed numbers of a matrix, [rows, columns * bits / 8], and the scales of their groups."""

    numbers: Array
    scales: npt.NDArray[np.float32]  # [rows, groups]
    columns: int
    zeros: Array | None = None  # [rows, groups]
    minima: npt.NDArray[np.float32] | None = None
    group_of: Array | None = None  # [columns]: group of each column (g_idx); None: in order


@dataclass(slots=True)
class Scheme:
    """A quantization format, and how its tensors are read."""

    read: Callable[[Scheme, str, Tensors], FileTensor | None]
    settings: Raw
    losses: set[str] = field(default_factory=set)

    def stored(self, name: str, tensors: Tensors) -> FileTensor | None:
        """The tensor with this name in an unquantized checkpoint; None: it is not quantized."""
        return self.read(self, name, tensors)

    def packed(self, name: str, bits: int, groups: Groups) -> FileTensor:
        """Repack groups as blocks, or dequantize them if no block type fits."""
        rows = groups.scales.shape[0]
        size = groups.columns // groups.scales.shape[1]
        if groups.group_of is not None or size % GROUP or groups.columns % GROUP:
            self.losses.add(
                "groups with permuted columns or less than 32 columns: dequantized to float16"
            )
            return _as_floats(bits, groups)
        scales = self._half(groups.scales)
        parts: list[Array] = [groups.numbers, scales]
        if groups.minima is not None:
            kind = "Q4_1" if bits == 4 else "AFFINE8"
            parts.append(self._half(groups.minima))
        elif groups.zeros is None or (groups.zeros == 1 << (bits - 1)).all():
            kind = "Q4_0" if bits == 4 else "Q8_0"
        else:
            kind = "ZERO4" if bits == 4 else "ZERO8"
            parts.append(groups.zeros.astype(np.uint8))
        build = build_groups(bits, signed=128 if kind == "Q8_0" else 0)
        return ConvertedTensor(kind, (rows, groups.columns), build, tuple(parts))

    def _half(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float16]:
        with np.errstate(over="ignore"):
            rounded = values.astype(np.float16)
        if not np.array_equal(rounded.astype(np.float32), values):
            self.losses.add("some scales were rounded to float16")
        return rounded


def scheme_of(raw: Raw) -> Scheme | None:
    """The quantization of a checkpoint from its config.json; None: none, or FP8 (`float8.py`)."""
    quant_settings = raw.get("quantization_config") or raw.get("quantization")
    if not quant_settings:
        return None
    try:
        return _scheme_in(quant_settings)
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(
            f"config.json: invalid quantization_config ({error}): {quant_settings!r:.200}"
        ) from error


def _scheme_in(quant_settings: Raw) -> Scheme | None:
    if is_float8(quant_settings):
        return None
    method = quant_settings.get(
        "quant_method", "mlx" if "group_size" in quant_settings else "unknown"
    )
    reader = {
        "mxfp4": _mxfp4, "awq": _awq, "gptq": _gptq, "mlx": _mlx,
        "compressed-tensors": _compressed,
    }.get(method)  # fmt: skip
    if (
        quant_settings.get("format") == "nvfp4-pack-quantized"
        or quant_settings.get("quant_algo") == "NVFP4"
    ):
        return Scheme(_nvfp4, quant_settings)
    if reader is None:
        raise _unsupported(f"with {method!r}")
    settings = (
        {**quant_settings, "group": _group_of(quant_settings)}
        if method == "compressed-tensors"
        else quant_settings
    )
    bits = settings.get("bits", 4) if method != "compressed-tensors" else 4
    if method in ("awq", "gptq") and bits not in ((4,) if method == "awq" else (4, 8)):
        raise _unsupported(f"by {method} to {bits} bits")
    if method == "mlx" and quant_settings.get("mode", "affine") != "affine":
        raise _unsupported(f"in MLX's mode {quant_settings['mode']!r}")
    return Scheme(reader, settings)


def _unsupported(how: str) -> ModelFileError:
    return ModelFileError(
        f"the checkpoint is quantized {how}, which is not supported ({SUPPORTED} are); use the "
        "original 16-bit weights or a GGUF file"
    )


def _as_floats(bits: int, groups: Groups) -> FileTensor:
    """Dequantize to float16."""
    numbers = np.ascontiguousarray(groups.numbers).view(np.uint8)
    if bits == 4:
        numbers = np.stack((numbers & 15, numbers >> 4), -1).reshape(len(numbers), -1)
    size = -(-groups.columns // groups.scales.shape[1])
    group_index = np.arange(groups.columns) // size if groups.group_of is None else groups.group_of
    values = numbers[:, : groups.columns].astype(np.float32)
    if groups.minima is not None:
        values = values * groups.scales[:, group_index] + groups.minima[:, group_index]
    else:
        zeros = (
            np.float32(1 << (bits - 1)) if groups.zeros is None else groups.zeros[:, group_index]
        )
        values = (values - zeros) * groups.scales[:, group_index]
    return FileTensor("F16", values.astype("<f2"), values.shape)


def _unpacked(words: Array, bits: int) -> npt.NDArray[np.uint8]:
    """Unpack 32-bit words along the last axis, lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    values = (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return values.astype(np.uint8).reshape(*words.shape[:-1], -1)


def _nibbles(numbers: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Pack 4-bit numbers, two neighbours per byte."""
    return numbers[..., 0::2] | numbers[..., 1::2] << np.uint8(4)


def _mxfp4(scheme: Scheme, name: str, tensors: Tensors) -> FileTensor | None:
    """gpt-oss: blocks [experts, rows, blocks, 16] with a power of two each."""
    scales = name.removesuffix("_blocks") + "_scales"
    if not name.endswith("_blocks") or name not in tensors or scales not in tensors:
        return None
    blocks, powers = tensors.integers(name), tensors.integers(scales)
    if blocks.ndim != 4 or blocks.shape[-1] != 16 or powers.shape != blocks.shape[:-1]:
        raise ModelFileError(f"tensor {name} and its scales do not fit together; download it again")
    shape = (*blocks.shape[:2], blocks.shape[2] * GROUP)
    return ConvertedTensor("MXFP4", shape, build_mxfp4, (blocks, powers))


def _nvfp4(scheme: Scheme, name: str, tensors: Tensors) -> FileTensor | None:
    """Two numbers per byte, an FP8 scale per 16, and one per matrix: compressed-tensors divides by
    it, NVIDIA's tools multiply."""
    numbers, scales = (f"{name}_packed" if f"{name}_packed" in tensors else name), f"{name}_scale"
    if numbers not in tensors or scales not in tensors:
        return None
    if f"{name}_global_scale" in tensors:
        factor = 1 / tensors.floats(f"{name}_global_scale").reshape(-1)[0]
    else:
        factor = tensors.floats(f"{name}_scale_2").reshape(-1)[0]
    codes, scale_bytes = tensors.integers(numbers), tensors.integers(scales)
    if (
        codes.ndim != 2
        or codes.shape[1] % 32
        or scale_bytes.shape != (len(codes), codes.shape[1] // 8)
    ):
        raise ModelFileError(
            f"tensor {numbers} and its scales do not match, or a row is not a multiple of 64"
        )
    shape = (len(codes), codes.shape[1] * 2)
    return ConvertedTensor(
        "NVFP4", shape, build_nvfp4, (codes, scale_bytes), np.array(factor, np.float32)
    )


def _group_of(quant_settings: Raw) -> Raw:
    """The weight settings of compressed-tensors; only one group is supported."""
    groups = list((quant_settings.get("config_groups") or {}).values())
    weights = groups[0].get("weights") if len(groups) == 1 else None
    if quant_settings.get("format") != "pack-quantized" or weights is None:
        raise _unsupported(f"as compressed-tensors' {quant_settings.get('format')!r}")
    if weights.get("type") != "int" or weights.get("num_bits") not in (4, 8):
        raise _unsupported(f"to {weights.get('num_bits')} bits by compressed-tensors")
    result: Raw = weights
    return result


def _compressed(scheme: Scheme, name: str, tensors: Tensors) -> FileTensor | None:
    packed = f"{name}_packed"
    if packed not in tensors:
        return None
    bits = int(scheme.settings["group"]["num_bits"])
    rows, columns = (int(size) for size in tensors.integers(f"{name}_shape"))
    groups = Groups(tensors.integers(packed), tensors.floats(f"{name}_scale"), columns)
    if f"{name}_zero_point" in tensors:
        words = np.ascontiguousarray(tensors.integers(f"{name}_zero_point").T)
        groups.zeros = _unpacked(words, bits).T[:rows]
    if f"{name}_g_idx" in tensors:
        groups.group_of = _scattered(tensors.integers(f"{name}_g_idx"), columns, groups)
    return scheme.packed(name, bits, groups)


def _awq(scheme: Scheme, name: str, tensors: Tensors) -> FileTensor | None:
    """Words [inputs, outputs / 8] with permuted outputs."""
    at = name.removesuffix(".weight")
    if f"{at}.qweight" not in tensors:
        return None
    order = np.argsort(_AWQ_ORDER)

    def outputs(words: Array) -> npt.NDArray[np.uint8]:
        """[outputs, inputs or groups]"""
        apart = _unpacked(words, 4)
        return apart.reshape(len(apart), -1, 8)[..., order].reshape(apart.shape).T

    numbers = outputs(tensors.integers(f"{at}.qweight"))
    scales = tensors.floats(f"{at}.scales").T
    groups = Groups(_nibbles(numbers), scales, numbers.shape[1])
    groups.zeros = outputs(tensors.integers(f"{at}.qzeros"))
    return scheme.packed(name, 4, groups)


def _gptq(scheme: Scheme, name: str, tensors: Tensors) -> FileTensor | None:
    """Words [inputs / 8, outputs]; zero points are stored minus one, except in gptq_v2."""
    at = name.removesuffix(".weight")
    if f"{at}.qweight" not in tensors:
        return None
    bits = int(scheme.settings.get("bits", 4))
    words = tensors.integers(f"{at}.qweight").T
    groups = Groups(words, tensors.floats(f"{at}.scales").T, words.shape[1] * 32 // bits)
    less = 0 if scheme.settings.get("checkpoint_format") == "gptq_v2" else 1
    zeros = _unpacked(tensors.integers(f"{at}.qzeros"), bits).astype(np.int64) + less
    groups.zeros = zeros.T[: groups.scales.shape[0]]
    if (groups.zeros > 255).any():
        raise _unsupported("with zero points beyond 255")
    if f"{at}.g_idx" in tensors:
        groups.group_of = _scattered(tensors.integers(f"{at}.g_idx"), groups.columns, groups)
    return scheme.packed(name, bits, groups)


def _scattered(group_of: Array, columns: int, groups: Groups) -> Array | None:
    """The group of each column; None: groups are consecutive."""
    size = columns // groups.scales.shape[1]
    if group_of.shape != (columns,) or (group_of < 0).any():
        return None  # written for columns in order
    return None if np.array_equal(group_of, np.arange(columns) // size) else group_of


def _mlx(scheme: Scheme, name: str, tensors: Tensors) -> FileTensor | None:
    """Scale and minimum ("bias") per group; modules may override the settings."""
    at = name.removesuffix(".weight")
    if f"{at}.scales" not in tensors or not name.endswith(".weight"):
        return None
    module_settings = scheme.settings.get(at)
    quant_settings = module_settings if isinstance(module_settings, Mapping) else scheme.settings
    bits, size = int(quant_settings.get("bits", 4)), int(quant_settings.get("group_size", 64))
    words = tensors.integers(name)
    scales, minima = tensors.floats(f"{at}.scales"), tensors.floats(f"{at}.biases")
    columns = scales.shape[-1] * size
    if bits not in (2, 3, 4, 5, 6, 8) or words.shape[-1] * 32 != columns * bits:
        raise ModelFileError(
            f"tensor {name} does not have the {bits} bits of config.json; download it again"
        )
    if bits in (4, 8):
        return scheme.packed(name, bits, Groups(words, scales, columns, minima=minima))
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), -1, bitorder="little")
    bit_groups = stream.reshape(*words.shape[:-1], columns, bits)
    numbers = (bit_groups << np.arange(bits, dtype=np.uint8)).sum(-1, dtype=np.uint8)
    if bits < 4:
        return scheme.packed(name, 4, Groups(_nibbles(numbers), scales, columns, minima=minima))
    return scheme.packed(name, 8, Groups(numbers, scales, columns, minima=minima))
