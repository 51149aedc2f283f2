"""A drafting head as files: `config.json` and `head.safetensors` in a folder.

    {"format": "unspool-draft-head", "version": 1,
     "name": ..., "base": "SmolLM2-135M-Instruct", "fingerprint": "of the base model's weights",
     "layers": [2, 11, 20, 27],              the vectors it reads: n is the one before layer n
     "width": 576, "heads": 9, "kv_heads": 3, "head_width": 64, "ff_width": 1536,
     "words": 4, "word_width": 256, "mix_width": 512,
     "rope_theta": 100000.0, "norm_eps": 1e-05, "weights": "Q4_1"}

`ids` are the tokens that it can propose. Matrices of 4 or 8 bits are bytes [rows, bytes of a row],
in the blocks that GGUF files have (Q4_1, Q8_0): so kernels take them as they are. What each is for
is in `own.py`.
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
from unspool.model.stored import Stored

FORMAT, VERSION = "unspool-draft-head", 1
WEIGHTS = "head.safetensors"
BLOCKS = {"Q4_1": 20, "Q8_0": 34}  # bytes of 32 numbers
SHIPPED = Path(__file__).parent / "shipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """What a head of our own format is."""

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
        """The matrices, [outputs, inputs]."""
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
        """The vectors, each as wide as the model."""
        fused = tuple(f"features.norm.{number}" for number in range(len(self.layers)))
        return (*fused, "context.norm", "join.state.norm", "join.word.norm", "attention.norm",
                "feed.norm", "words.norm", "mix.norm", "final.norm")  # fmt: skip


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """A head as it was read."""

    config: HeadConfig
    matrices: dict[str, Stored]
    norms: dict[str, npt.NDArray[np.float32]]
    ids: npt.NDArray[np.int64]


def head_folder(name: str) -> Path:
    """The folder of a head that somebody named."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise SettingsError(f"{folder} is not a folder; name the one that a head was saved in")
    return folder


def read_json(folder: Path) -> dict[str, Any]:
    """The `config.json` of a head, whichever kind it is of."""
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SettingsError(
            f"{folder} is no drafting head: it has no config.json; name the folder that a head was "
            "saved in"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path} cannot be read ({error})") from error
    if not isinstance(found, dict):
        raise ModelFileError(f"{path} is not the description of a drafting head")
    return found


def parse_config(found: dict[str, Any], folder: Path) -> HeadConfig:
    if found.get("format") != FORMAT or found.get("version") != VERSION:
        raise ModelFileError(
            f"{folder}: config.json is of no kind of drafting head that is known here "
            f"({FORMAT} {VERSION}, or EAGLE-3 in the format of speculators)"
        )
    names = [field.name for field in fields(HeadConfig)]
    lacking = [name for name in names if name not in found]
    if lacking:
        raise ModelFileError(f"{folder}: config.json does not say {lacking[0]!r}")
    values = {name: found[name] for name in names}
    values["layers"] = tuple(values["layers"])
    config = HeadConfig(**values)
    numbers = [getattr(config, name) for name in names[4:12]] + list(config.layers)
    if not all(type(number) is int and 0 <= number < 1 << 20 for number in numbers):
        raise ModelFileError(f"{folder}: config.json has a number that no head can have")
    return config


def read_head(folder: Path) -> HeadFiles:
    """The head in a folder; everything that is used is checked against what it says it is."""
    config = parse_config(read_json(folder), folder)
    file = SafetensorsFile(folder / WEIGHTS)

    def must(name: str) -> str:
        if name not in file.tensors:
            raise ModelFileError(f"{file.path}: has no {name}; the head is not complete")
        return name

    def misfit(name: str, shape: tuple[int, ...]) -> ModelFileError:
        return ModelFileError(f"{file.path}: {name} is not {' x '.join(map(str, shape))} numbers")

    matrices = {}
    for name, shape in config.shapes.items():
        if file.tensors[must(name)].type == "U8":
            rows, columns = shape
            bytes_of_row = columns // 32 * BLOCKS.get(config.weights, 0)
            if columns % 32 or file.tensors[name].shape != (rows, bytes_of_row):
                raise misfit(name, shape)
            matrices[name] = Stored(config.weights, file.whole_numbers(name), shape)
        else:
            matrices[name] = file.stored(name)
            if matrices[name].shape != shape:
                raise misfit(name, shape)
    norms = {}
    for name in config.norms:
        norms[name] = file.stored(must(name)).float32()
        if norms[name].shape != (config.width,):
            raise misfit(name, (config.width,))
    ids = file.whole_numbers(must("ids")).astype(np.int64)
    if ids.ndim != 1 or not len(ids) or int(ids.min()) < 0:
        raise ModelFileError(f"{file.path}: ids are not the numbers of tokens")
    return HeadFiles(config, matrices, norms, ids)
