"""Read safetensors files, memory-mapped.

A file is eight bytes (the length of the header), the header (JSON: type, shape and offsets of every
tensor), and the data. The `safetensors` package reads the same files, but without torch it does not
support bfloat16. This reader validates every number of the header.

    file = SafetensorsFile(Path("model.safetensors"))
    file.tensors["model.norm.weight"].shape    # (576,)
    file.stored("model.norm.weight")           # Stored: a view into the file
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unspool.errors import ModelFileError
from unspool.model.files.stored import FLOAT8, FLOAT_TYPES, FileTensor, map_file, scales_of_rows

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")  # refused
_LARGEST_HEADER = 100_000_000  # bytes, as in the format's own reader
_MOST_AXES = 8

Block = tuple[int, int]

# The format's type name -> (bits of a number, usual name).
_TYPES = {
    "BOOL": (8, "bool"),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "U16": (16, "uint16"),
    "I16": (16, "int16"),
    "U32": (32, "uint32"),
    "I32": (32, "int32"),
    "U64": (64, "uint64"),
    "I64": (64, "int64"),
    "F4": (4, "float4"),
    "F6_E2M3": (6, "float6_e2m3"),
    "F6_E3M2": (6, "float6_e3m2"),
    "F8_E4M3": (8, "float8_e4m3"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E8M0": (8, "float8_e8m0"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "F32": (32, "float32"),
    "F64": (64, "float64"),
    "C64": (64, "complex64"),
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Type, shape and offset of a tensor."""

    type: str
    shape: tuple[int, ...]
    start: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)


class SafetensorsFile:
    """A memory-mapped safetensors file with a validated header."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path)
        self.metadata: dict[str, str] = {}  # texts that the header has beside the tensors
        self.tensors = self._parse()

    def _broken(self, why: str) -> ModelFileError:
        return ModelFileError(
            f"{self.path}: not a usable safetensors file ({why}); download it again"
        )

    def _parse(self) -> dict[str, TensorEntry]:
        size = len(self._map)
        if size < 8:
            raise self._broken("it is too short for a header")
        (length,) = struct.unpack_from("<Q", self._map)
        if length > min(size - 8, _LARGEST_HEADER):
            raise self._broken(f"it claims a header of {length:,} bytes")
        header = self._json(self._map[8 : 8 + length])
        metadata = header.get("__metadata__")
        if isinstance(metadata, dict):
            self.metadata = {name: str(value) for name, value in metadata.items()}
        return {
            name: self._placed(name, entry, data_start=8 + length)
            for name, entry in header.items()
            if name != "__metadata__"
        }

    def _json(self, content: bytes) -> dict[str, Any]:
        try:
            header = json.loads(content.decode("utf-8"), object_pairs_hook=_without_doubles)
        except _DoubleError as error:
            raise self._broken(f"duplicate name {str(error)!r} in its header") from error
        except (ValueError, RecursionError) as error:
            raise self._broken("its header is not JSON") from error
        if not isinstance(header, dict):
            raise self._broken("its header is not a JSON object")
        return header

    def _placed(self, name: str, entry: Any, data_start: int) -> TensorEntry:
        label = f"tensor {name[:200]!r}"
        if not isinstance(entry, dict):
            raise self._broken(f"{label} has no description")
        kind: Any = entry.get("dtype")
        shape: Any = entry.get("shape")
        place: Any = entry.get("data_offsets")
        if not isinstance(kind, str) or kind not in _TYPES:
            raise self._broken(f"{label} has unknown type {str(kind)[:40]!r}")
        if not _counts(shape) or len(shape) > _MOST_AXES:
            raise self._broken(f"{label} has invalid shape {repr(shape)[:80]}")
        if not _counts(place) or len(place) != 2 or place[0] > place[1]:
            raise self._broken(f"{label} has invalid data_offsets {repr(place)[:80]}")
        start, end = place
        if end > len(self._map) - data_start:
            raise self._broken(f"{label} reaches past its end: it is truncated")
        if math.prod(shape) * _TYPES[kind][0] != (end - start) * 8:
            raise self._broken(
                f"{label} has {end - start:,} bytes, which does not match its shape {shape}"
            )
        return TensorEntry(kind, tuple(shape), data_start + start)

    def stored(
        self, name: str, scales: FileTensor | None = None, block: Block = (128, 128)
    ) -> FileTensor:
        """A floating-point tensor; a view into the file, except for F64.

        Args:
            scales: The scales of an FP8 tensor.
            block: Rows and columns of a block that shares a scale.
        """
        placed = self.tensors[name]
        if placed.type in FLOAT_TYPES:
            layout = FLOAT_TYPES[placed.type]
            flat = np.frombuffer(self._map, layout, placed.count, placed.start)
            return FileTensor(placed.type, flat.reshape(placed.shape), placed.shape)
        if placed.type == "F64":
            wide = np.frombuffer(self._map, "<f8", placed.count, placed.start)
            with np.errstate(over="ignore"):  # overflow becomes infinite, which loading refuses
                return FileTensor.from_float32(wide.astype(np.float32).reshape(placed.shape))
        if placed.type == FLOAT8 and len(placed.shape) in (2, 3) and scales is not None:
            bytes_ = np.frombuffer(self._map, np.uint8, placed.count, placed.start)
            of_rows = scales_of_rows(name, placed.shape, scales.float32(), block)
            return FileTensor(FLOAT8, bytes_.reshape(placed.shape), placed.shape, of_rows)
        if placed.type == FLOAT8:
            raise ModelFileError(
                f"tensor {name} holds FP8 numbers, and the checkpoint has no {name}_scale or "
                f"{name}_scale_inv for them; it is incomplete"
            )
        raise ModelFileError(
            f"tensor {name} holds {_TYPES[placed.type][1]} numbers; only float32, float16, "
            "bfloat16 and FP8 (e4m3) checkpoints and GGUF files are supported"
        )

    def integers(self, name: str) -> npt.NDArray[Any]:
        """A tensor of integers, booleans or FP8 bits; a view into the file."""
        placed = self.tensors[name]
        kind = {"BOOL": "?", "U8": "u1", "I8": "i1", FLOAT8: "u1"}.get(placed.type)
        if kind is None and placed.type[0] in "UI":
            kind = f"<{placed.type[0].lower()}{_TYPES[placed.type][0] // 8}"
        if kind is None:
            raise ModelFileError(f"tensor {name} holds {_TYPES[placed.type][1]}, not whole numbers")
        flat = np.frombuffer(self._map, kind, placed.count, placed.start)
        return flat.reshape(placed.shape)


class _DoubleError(ValueError):
    """A duplicate name in a JSON object."""


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise _DoubleError(name[:200])
        table[name] = value
    return table


def _counts(values: Any) -> bool:
    """Whether this is a list of integers from 0 to 2**62."""
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 1 << 62 for value in values
    )
