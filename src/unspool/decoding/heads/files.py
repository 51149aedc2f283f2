"""File format of a drafting head: a folder with `config.json` and `head.safetensors`.

    {"format": "unspool-draft-head", "version": 1,
     "name": ..., "base": "SmolLM2-135M-Instruct", "fingerprint": "of the base model's weights",
     "layers": [2, 11, 20, 27],              hidden states it reads: n is the input of layer n
     "width": 576, "heads": 9, "kv_heads": 3, "head_width": 64, "ff_width": 1536,
     "words": 4, "word_width": 256, "mix_width": 512,
     "rope_theta": 100000.0, "norm_eps": 1e-05, "weights": "Q4_1"}

`ids` are the tokens that it can propose. Matrices of 4 or 8 bits are stored as bytes [rows, bytes
per row] in GGUF blocks (Q4_1, Q8_0), which the kernels use directly. `own.py` uses the weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unspool.errors import ModelFileError, SettingsError
from unspool.model.safetensors_file import SafetensorsFile
from unspool.model.stored import FileTensor

FORMAT, VERSION = "unspool-draft-head", 1
WEIGHTS = "head.safetensors"
BLOCKS = {"Q4_1": 20, "Q8_0": 34}  # bytes per 32 weights
SHIPPED = Path(__file__).parent / "shipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Configuration of a head in Unspool's format."""

    name: str
    base: str
    fingerprint: str
    layers: tuple[int, ...]
    width: int
    heads: int
    kv_heads: int
    head_width: int
    ff_width: int
    words: int
    word_width: int
    mix_width: int
    rope_theta: float
    norm_eps: float
    weights: str

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Shapes of the matrices: [outputs, inputs]."""
        width, inner = self.width, self.heads * self.head_width
        return {
            "features.fuse": (width, width * len(self.layers)),
            "context.keys_values": (2 * self.kv_heads * self.head_width, width),
            "join.state": (width, width),
            "join.word": (width, width),
            "attention.query": (inner, width),
            "attention.out": (width, inner),
            "feed.gate_up": (2 * self.ff_width, width),
            "feed.down": (width, self.ff_width),
            "words.project": (self.words * self.word_width, width),
            "mix.last_word": (2 * self.mix_width, self.word_width),
            "mix.earlier_words": (2 * self.mix_width, (self.words - 1) * self.word_width),
            "mix.state": (2 * self.mix_width, width),
            "mix.out": (width, self.mix_width),
        }

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of the norm vectors, each as wide as the model."""
        fused = tuple(f"features.norm.{number}" for number in range(len(self.layers)))
        return (*fused, "context.norm", "join.state.norm", "join.word.norm", "attention.norm",
                "feed.norm", "words.norm", "mix.norm", "final.norm")  # fmt: skip


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """The contents of a head's folder."""

    config: HeadConfig
    matrices: dict[str, FileTensor]
    norms: dict[str, npt.NDArray[np.float32]]
    ids: npt.NDArray[np.int64]


def head_folder(name: str) -> Path:
    """Check that a head's folder exists."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise SettingsError(f"{folder} is not a folder; give the folder of a drafting head")
    return folder


def read_json(folder: Path) -> dict[str, Any]:
    """Read the `config.json` of a head of any format."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(
            f"{folder} is not a drafting head: it has no config.json; give the folder of one"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be read ({error})") from error
    if not isinstance(config, dict):
        raise ModelFileError(f"{path} is not the configuration of a drafting head")
    return config


def parse_config(raw: dict[str, Any], folder: Path) -> HeadConfig:
    if raw.get("format") != FORMAT or raw.get("version") != VERSION:
        raise ModelFileError(
            f"{folder}: config.json has an unknown format; supported are {FORMAT} {VERSION}, and "
            "EAGLE-3 in the format of speculators"
        )
    names = [field.name for field in fields(HeadConfig)]
    missing = [name for name in names if name not in raw]
    if missing:
        raise ModelFileError(f"{folder}: config.json has no {missing[0]!r}")
    values = {name: raw[name] for name in names}
    values["layers"] = tuple(values["layers"])
    config = HeadConfig(**values)
    numbers = [getattr(config, name) for name in names[4:12]] + list(config.layers)
    if not all(type(number) is int and 0 <= number < 1 << 20 for number in numbers):
        raise ModelFileError(f"{folder}: config.json has a number out of range")
    return config


def read_head(folder: Path) -> HeadFiles:
    """Read the head in a folder; checks the shape of every tensor."""
    config = parse_config(read_json(folder), folder)
    file = SafetensorsFile(folder / WEIGHTS)

    def require(name: str) -> str:
        if name not in file.tensors:
            raise ModelFileError(f"{file.path}: has no {name}; the head is incomplete")
        return name

    def shape_error(name: str, shape: tuple[int, ...]) -> ModelFileError:
        return ModelFileError(
            f"{file.path}: {name} must have the shape {' x '.join(map(str, shape))}"
        )

    matrices = {}
    for name, shape in config.shapes.items():
        if file.tensors[require(name)].type == "U8":
            rows, columns = shape
            bytes_of_row = columns // 32 * BLOCKS.get(config.weights, 0)
            if columns % 32 or file.tensors[name].shape != (rows, bytes_of_row):
                raise shape_error(name, shape)
            matrices[name] = FileTensor(config.weights, file.integers(name), shape)
        else:
            matrices[name] = file.stored(name)
            if matrices[name].shape != shape:
                raise shape_error(name, shape)
    norms = {}
    for name in config.norms:
        norms[name] = file.stored(require(name)).float32()
        if norms[name].shape != (config.width,):
            raise shape_error(name, (config.width,))
    ids = file.integers(require("ids")).astype(np.int64)
    if ids.ndim != 1 or not len(ids) or int(ids.min()) < 0:
        raise ModelFileError(f"{file.path}: ids must be a list of token ids")
    return HeadFiles(config, matrices, norms, ids)
