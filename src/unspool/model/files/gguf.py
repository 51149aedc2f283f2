"""Read GGUF files: metadata and tensors, memory-mapped.

The `gguf` package reads the same files, but builds a numpy view for every string of the
vocabulary (seconds for a large one) and trusts the counts in the file. This reader parses the
header in one pass and checks every count against the size of the file, so a damaged or malicious
file raises an error instead of a crash or a huge allocation.

    file = GGUFFile("model.gguf")
    file.metadata["general.architecture"]     # 'llama'
    file.tensors["token_embd.weight"].shape   # (49152, 576)
    file.stored("token_embd.weight")          # its packed blocks, a view into the file
    file.float32("token_embd.weight")         # numpy array, dequantized
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unspool import native
from unspool.errors import ModelFileError
from unspool.model.files.stored import FLOAT_TYPES, FileTensor, map_file

# Types of metadata values: number -> (struct letter, numpy type).
_SCALARS = {
    0: ("B", "<u1"),
    1: ("b", "<i1"),
    2: ("H", "<u2"),
    3: ("h", "<i2"),
    4: ("I", "<u4"),
    5: ("i", "<i4"),
    6: ("f", "<f4"),
    7: ("?", "?"),
    10: ("Q", "<u8"),
    11: ("q", "<i8"),
    12: ("d", "<f8"),
}
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MOST_PARTS = 1000
_DEEPEST_ARRAY = 4  # limit for nested arrays, which do not occur in practice


@dataclass(frozen=True, slots=True)
class BlockType:
    """A packed type: `elements` numbers in a block of `size` bytes."""

    name: str
    elements: int
    size: int


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType("MXFP4", 32, 17),
    40: BlockType("NVFP4", 64, 36),
    41: BlockType("Q1_0", 128, 18),
}


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Location of a tensor. `shape` has the slowest axis first, as in numpy and torch."""

    name: str
    shape: tuple[int, ...]
    type_number: int
    start: int

    @property
    def type(self) -> BlockType:
        block_type = BLOCK_TYPES.get(self.type_number)
        if block_type is None:
            raise ModelFileError(
                f"tensor {self.name} has type {_type_name(self.type_number)}, which is not "
                f"supported; use a file with {', '.join(t.name for t in BLOCK_TYPES.values())}"
            )
        return block_type

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements // self.type.elements * self.type.size


class GGUFFile:
    """A memory-mapped GGUF file with a validated header."""

    def __init__(self, path: str | Path, *, glance: bool = False) -> None:
        """Parse the header; with `glance` only the metadata before the vocabulary (quick)."""
        self.path = Path(path)
        self._map = map_file(self.path)
        self._parts: dict[str, GGUFFile] = {}  # tensors in further files of a split model
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._parse(glance)
        except struct.error as error:
            raise self._broken("it ends in the middle of its header") from error
        except UnicodeDecodeError as error:
            raise self._broken("a text in its header is not UTF-8") from error
        if not glance:
            self._join_parts()

    def _broken(self, why: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: not a usable GGUF file: {why}; download it again")

    def _parse(self, glance: bool) -> None:
        if self._map[:4] != b"GGUF":
            raise self._broken(f"it begins with {self._map[:4]!r} instead of b'GGUF'")
        (self.version,) = struct.unpack_from("<I", self._map, 4)
        if self.version not in (2, 3):
            hint = " (big-endian?)" if self.version > 0xFFFF else ""
            raise self._broken(f"its version is {self.version}{hint} and 2 or 3 can be read")
        tensor_count, key_count = struct.unpack_from("<QQ", self._map, 8)
        self._at = 24
        self._room_for(key_count, 13, "metadata entries")
        for _ in range(key_count):
            key = self._string()
            if key in self.metadata:
                raise self._broken(f"duplicate key {key!r} in its metadata")
            if glance and key == "tokenizer.ggml.tokens":
                return
            self.metadata[key] = self._value(self._number("<I"))
        self._room_for(tensor_count, 24, "tensors")
        entries = [self._tensor_entry() for _ in range(tensor_count)]
        self._place(entries)

    def _room_for(self, count: int, least_size: int, what: str) -> None:
        """Raise unless the rest of the file can hold `count` items of at least `least_size`."""
        if count * least_size > len(self._map) - self._at:
            raise self._broken(f"it claims {count:,} {what}, more than fit into the file")

    def _number(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self._map, self._at)
        self._at += struct.calcsize(layout)
        return value

    def _string(self) -> str:
        length = self._number("<Q")
        self._room_for(length, 1, "characters of text")
        self._at += length
        return self._map[self._at - length : self._at].decode("utf-8")

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._number("<" + _SCALARS[kind][0])
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY or depth >= _DEEPEST_ARRAY:
            raise self._broken(f"a metadata value has the unknown type {kind}")
        element_kind, count = self._number("<I"), self._number("<Q")
        if element_kind in _SCALARS:
            layout = np.dtype(_SCALARS[element_kind][1])
            self._room_for(count, layout.itemsize, "numbers in an array")
            self._at += count * layout.itemsize
            return np.frombuffer(self._map, layout, count, self._at - count * layout.itemsize)
        if element_kind == _STRING:
            self._room_for(count, 8, "texts in an array")
            return self._strings(count)
        self._room_for(count, 12, "arrays in an array")
        return [self._value(element_kind, depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """Read an array of strings, without the native library in an optimized loop."""
        strings = native.read_strings(np.frombuffer(self._map, np.uint8), self._at, count)
        if strings is not None:
            self._at = strings[1]
            return strings[0]
        data, at, end = self._map, self._at, len(self._map)
        length_of = struct.Struct("<Q").unpack_from
        pieces: list[bytes] = []
        keep = pieces.append
        for _ in range(count):
            start = at + 8
            at = start + length_of(data, at)[0]
            if at > end:
                raise self._broken("a text in an array is longer than the file")
            keep(data[start:at])
        self._at = at
        return list(map(bytes.decode, pieces))

    def _tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        name, axes = self._string(), self._number("<I")
        if not 1 <= axes <= 4:
            raise self._broken(f"tensor {name!r} claims {axes} axes; 1 to 4 are possible")
        sizes = [self._number("<Q") for _ in range(axes)]
        type_number, offset = self._number("<I"), self._number("<Q")
        if 0 in sizes:
            raise self._broken(f"tensor {name!r} has an axis of size 0")
        return name, tuple(reversed(sizes)), type_number, offset

    def _place(self, entries: list[tuple[str, tuple[int, ...], int, int]]) -> None:
        """Check that every tensor is inside the file and aligned."""
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise self._broken(f"its alignment is {alignment!r}; a multiple of 8 is needed")
        data_start = -(-self._at // alignment) * alignment
        for name, shape, type_number, offset in entries:
            if name in self.tensors:
                raise self._broken(f"duplicate tensor {name!r}")
            if offset % alignment:
                raise self._broken(f"tensor {name!r} starts at {offset}, off its alignment")
            tensor = GGUFTensor(name, shape, type_number, data_start + offset)
            if type_number in BLOCK_TYPES:  # other types raise when the tensor is read
                if shape[-1] % tensor.type.elements:
                    raise self._broken(
                        f"rows of tensor {name!r} have {shape[-1]} numbers, not a multiple of "
                        f"the {tensor.type.elements} in a block of {tensor.type.name}"
                    )
                if tensor.start + tensor.nbytes > len(self._map):
                    raise self._broken(f"tensor {name!r} reaches past its end: it is truncated")
            self.tensors[name] = tensor

    def _join_parts(self) -> None:
        """Add the tensors of the other files of a split model."""
        first, *others = part_paths(self.path)
        for path in others if first == self.path else ():
            if not path.exists():
                raise self._broken(f"it is the first of several files, and {path.name} is missing")
            part = GGUFFile(path)
            self._parts.update(dict.fromkeys(part.tensors, part))
            self.tensors.update(part.tensors)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """The packed bytes of a tensor, [..., bytes of a row]; a view into the file."""
        tensor, file = self.tensors[name], self._parts.get(name, self)
        flat = np.frombuffer(file._map, np.uint8, tensor.nbytes, tensor.start)
        return flat.reshape(*tensor.shape[:-1], -1)

    def stored(self, name: str) -> FileTensor:
        """A tensor packed as in the file; a view."""
        tensor, raw = self.tensors[name], self.raw(name)
        kind = tensor.type.name
        if kind in FLOAT_TYPES:
            return FileTensor(kind, raw.view(FLOAT_TYPES[kind]), tensor.shape)
        stored = FileTensor(kind, raw, tensor.shape, factor=self._factor(name, kind))
        # Packed vectors do not occur in practice; Stored does not support them.
        return FileTensor.from_float32(stored.float32()) if len(tensor.shape) == 1 else stored

    def _factor(self, name: str, kind: str) -> npt.NDArray[np.float32] | None:
        """The global scale of an NVFP4 tensor (or of each expert's)."""
        scale_name = name.removesuffix(".weight") + ".scale"
        if kind != "NVFP4" or scale_name not in self.tensors:
            return None
        factor = self.float32(scale_name).reshape(-1)
        return factor if len(self.tensors[name].shape) == 3 else factor[0]

    def float32(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor as float32: a view if it is stored so, else dequantized."""
        return self.stored(name).float32()


def part_paths(path: Path) -> list[Path]:
    """All files of a model split by llama.cpp (`...-00001-of-00003.gguf`), or the path itself."""
    split = _PART.fullmatch(path.name)
    if split is None or not 1 <= int(split[2]) <= int(split[3]) <= _MOST_PARTS:
        return [path]
    count = int(split[3])
    names = (f"{split[1]}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1))
    return [path.with_name(name) for name in names]


def _type_name(number: int) -> str:
    from gguf import GGMLQuantizationType

    try:
        return f"{GGMLQuantizationType(number).name}"
    except ValueError:
        return f"{number}, which is unknown"


class ArchitectureMetadata:
    """Type-checked metadata under the architecture's prefix."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = file.metadata.get("general.architecture")
        if not isinstance(self.architecture, str):
            raise ModelFileError(f"{file.path}: no general.architecture in its metadata")

    def get(self, key: str, default: Any = None) -> Any:
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, np.ndarray):  # one number per layer: they must be equal
            if value.size == 0 or (value != value[0]).any():
                raise ModelFileError(
                    f"{self.file.path}: {key} differs between layers, which is not supported"
                )
            value = value[0].item()
        return value

    def first(self, key: str) -> Any:
        """The value of the first layer."""
        return self.per_layer(key, 1)[0]

    def per_layer(self, key: str, layers: int, default: Any = None) -> list[Any]:
        """The value of each layer; metadata may hold one value or a list."""
        value = self.file.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(value, np.ndarray):
            return [self.number(key, default)] * layers
        if value.size < layers:
            raise ModelFileError(
                f"{self.file.path}: {key} has {value.size} values for {layers} layers"
            )
        return [item.item() for item in value[:layers]]

    def number(self, key: str, default: float | None = None) -> Any:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            state = "is missing" if value is None else f"is {value!r}, not a number"
            raise ModelFileError(f"{self.file.path}: {self.architecture}.{key} {state}")
        return value
