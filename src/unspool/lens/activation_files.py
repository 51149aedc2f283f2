"""Write the activations of thousands of texts to a folder: shards of safetensors or parquet.

    save_activations(lm, read_corpus(Path("corpus.jsonl")), Path("out"), sites="resid_post")

A shard has one row for each position: `text` (number of the text), `position`, `token`, and one
array for each hook name of TransformerLens, such as `blocks.5.hook_resid_post` [rows, width].
`index.json` lists the finished shards. A shard appears under its name when it is complete, so the
same command resumes after it was stopped in any way.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from unspool.errors import DataError, SettingsError, StorageError, UnspoolError, check_int
from unspool.lens.activation_cache import (
    ActivationCache,
    Layers,
    Names,
    Positions,
    Reading,
    activation_caches,
)
from unspool.session import Prompt, Session

Format = Literal["safetensors", "parquet"]

INDEX = "index.json"
_VERSION = 1
_SHARD_BYTES = 256 << 20
_READ_TEXTS = 64  # read from the corpus and computed together
_DTYPES: dict[str, Any] = {"float32": np.float32, "float16": np.float16}


# -- the corpus


def read_corpus(path: Path, field: str = "text") -> Iterator[Prompt]:
    """Yield the texts of a file: lines of JSON (text, or a list of token ids), or plain lines.

    Args:
        path: A file; `.jsonl` and `.json` have one JSON object, text or list of ids a line.
        field: The text of an object.
    """
    is_json = path.suffix in (".jsonl", ".json", ".ndjson")
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                text = line.strip() if is_json else line.rstrip("\r\n")
                if text:
                    yield _parse_line(f"{path}, line {number}", text, field) if is_json else text
    except OSError as error:
        raise UnspoolError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text") from None


def _parse_line(label: str, line: str, field: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError:
        raise DataError(f"{label}: not JSON; give one JSON object a line, or a .txt file") from None
    if isinstance(value, dict):
        if field not in value:
            fields = ", ".join(map(str, list(value)[:8]))
            raise DataError(f"{label}: has no field {field!r}, only {fields}; set the field's name")
        value = value[field]
    is_ids = isinstance(value, list) and all(type(token) is int for token in value)
    if not isinstance(value, str) and not is_ids:
        raise DataError(f"{label}: must be text or a list of token ids, got {str(value)[:60]!r}")
    return value  # type: ignore[no-any-return]


# -- writing


@dataclass(frozen=True, slots=True)
class SavedActivations:
    """What a folder of activations has."""

    folder: Path  # where it is
    num_texts: int  # texts of the corpus
    num_rows: int  # tokens
    num_shards: int  # files
    num_cut: int  # texts that were cut to the maximum number of tokens

    def __repr__(self) -> str:
        return (
            f"<SavedActivations {self.folder}: {self.num_texts:,} texts, {self.num_rows:,} rows, "
            f"{self.num_shards:,} shards>"
        )


def save_activations(
    lm: Session,
    texts: Iterable[Prompt],
    folder: str | Path,
    *,
    sites: Names = ("resid_post",),
    layers: Layers = None,
    positions: Positions = None,
    max_tokens: int | None = None,
    dtype: str = "float32",
    format: Format = "safetensors",
    shard_bytes: int = _SHARD_BYTES,
    report: Callable[[int], object] = lambda done: None,
) -> SavedActivations:
    """Write the activations of texts to a folder; see `LanguageModel.save_activations`."""
    reading = Reading.parse(lm, sites, layers)
    if "pattern" in reading.sites:
        raise SettingsError(
            "attention patterns have another shape for each text, so they are not written to "
            "shards; read them with lm.activations"
        )
    if dtype not in _DTYPES:
        raise SettingsError(f"dtype must be {' or '.join(_DTYPES)}, got {dtype!r}")
    if format not in ("safetensors", "parquet"):
        raise SettingsError(f"format must be safetensors or parquet, got {format!r}")
    if format == "parquet":
        _import_parquet()
    most = lm.context if max_tokens is None else check_int("max_tokens", max_tokens, 1, lm.context)
    check_int("shard_bytes", shard_bytes, 1)
    settings = {
        "version": _VERSION,
        "model": lm.model.fingerprint(),
        "sites": list(reading.sites),
        "layers": {site: list(layers) for site, layers in reading.layers.items()},
        "positions": repr(positions),
        "max_tokens": most,
        "dtype": dtype,
        "format": format,
    }
    shards = _ShardWriter(Path(folder), settings, shard_bytes)
    num_cut = 0
    for batch in _batches(texts, shards.skip):
        prompts = []
        for number, text in batch:
            try:
                ids = lm.prompt_ids(text, longer=True)
            except UnspoolError as error:
                raise type(error)(f"text {number}: {error}") from None
            num_cut += len(ids) > most
            prompts.append(ids[:most])
        caches = activation_caches(lm, prompts, sites=sites, layers=layers, positions=positions)
        for (number, text), cache in zip(batch, caches, strict=True):
            shards.add(number, text, cache)
            report(number + 1)
    shards.finish()
    return SavedActivations(
        Path(folder), shards.num_texts, shards.num_rows, len(shards.finished), num_cut
    )


def _batches(
    texts: Iterable[Prompt], skip: Callable[[int, Prompt], bool]
) -> Iterator[list[tuple[int, Prompt]]]:
    batch: list[tuple[int, Prompt]] = []
    for number, text in enumerate(texts):
        if not skip(number, text):
            batch.append((number, text))
        if len(batch) == _READ_TEXTS:
            yield batch
            batch = []
    if batch:
        yield batch


class _ShardWriter:
    """Collects rows and writes them as shards."""

    def __init__(self, folder: Path, settings: dict[str, Any], shard_bytes: int) -> None:
        self._folder, self._settings, self._shard_bytes = folder, settings, shard_bytes
        self._columns: dict[str, list[npt.NDArray[Any]]] = {}
        self._size = 0
        self._digest = hashlib.sha256()  # of the texts so far
        self.finished: list[dict[str, Any]] = []  # the shards
        self.num_texts = self.num_rows = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._resume()
        except OSError as error:
            raise _cannot_write(folder, error) from error
        self._resume_at = self.finished[-1]["end"] if self.finished else 0

    def _resume(self) -> None:
        index = self._folder / INDEX
        if not index.exists():
            if any(self._folder.iterdir()):
                raise SettingsError(
                    f"{self._folder} has other files; give a new folder, or one of this command"
                )
            return
        try:
            content = json.loads(index.read_text("utf-8"))
            before, self.finished = content["settings"], content["shards"]
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{index} is damaged; give a new folder") from None
        for name, value in self._settings.items():
            if before.get(name) != value:
                raise SettingsError(
                    f"{self._folder} was written with {name} {before.get(name)!r}, and now it is "
                    f"{value!r}; give a new folder"
                )
        self.num_rows = sum(shard["rows"] for shard in self.finished)
        self.num_texts = self.finished[-1]["end"] if self.finished else 0

    def skip(self, number: int, text: Prompt) -> bool:
        """Return whether a text is in a finished shard; raise if it was another text."""
        if number >= self._resume_at:
            return False
        self._digest.update(_digestible(text))
        if number + 1 == self._resume_at and self._digest.hexdigest() != self.finished[-1]["texts"]:
            raise SettingsError(f"{self._folder} has activations of other texts; give a new folder")
        return True

    def add(self, number: int, text: Prompt, cache: ActivationCache) -> None:
        """Add the rows of a text; writes a shard when it is full."""
        count = len(cache.positions)
        columns: dict[str, npt.NDArray[Any]] = {
            "text": np.full(count, number, np.int64),
            "position": np.array(cache.positions, np.int32),
            "token": np.array([cache.tokens[n] for n in cache.positions], np.int32),
        }
        dtype = _DTYPES[self._settings["dtype"]]
        for name, array in cache.hooks().items():
            with np.errstate(over="ignore"):
                columns[name] = array.astype(dtype)
            if not np.isfinite(columns[name]).all():
                raise DataError(
                    f"text {number}: {name} has a number that {np.dtype(dtype)} cannot hold; use "
                    "float32"
                )
        for name, column in columns.items():
            self._columns.setdefault(name, []).append(column)
            self._size += column.nbytes
        self._digest.update(_digestible(text))
        self.num_texts = number + 1
        self.num_rows += count
        if self._size >= self._shard_bytes:
            self.finish()

    def finish(self) -> None:
        """Write the rows so far as a shard."""
        if not self._columns:
            return
        format = self._settings["format"]
        name = f"shard-{len(self.finished):05}.{format}"
        columns = {name: np.concatenate(parts) for name, parts in self._columns.items()}
        entry = {
            "file": name,
            "start": self.finished[-1]["end"] if self.finished else 0,
            "end": self.num_texts,
            "rows": len(columns["text"]),
            "texts": self._digest.hexdigest(),
        }
        write = _write_parquet if format == "parquet" else write_safetensors
        try:
            replace_file(self._folder / name, lambda part: write(part, columns))
            self.finished.append(entry)
            index = {"settings": self._settings, "shards": self.finished}
            replace_file(
                self._folder / INDEX,
                lambda part: part.write_text(json.dumps(index, indent=1), encoding="utf-8"),
            )
        except OSError as error:
            raise _cannot_write(self._folder, error) from error
        self._columns, self._size = {}, 0


def _digestible(text: Prompt) -> bytes:
    return json.dumps(text if isinstance(text, str) else list(map(int, text))).encode() + b"\n"


def _cannot_write(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"{path} cannot be written: {error.strerror or error}; finished shards stay, and the same "
        "command resumes"
    )


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under another name first, so that it is complete or not there."""
    part = path.with_name(f"{path.name}.part")
    try:
        write(part)
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


_SAFETENSORS_TYPES = {"f4": "F32", "f2": "F16", "i8": "I64", "i4": "I32", "i1": "I8"}


def write_safetensors(
    path: Path, arrays: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str] | None = None
) -> None:
    """Write arrays as a safetensors file, without the package of that name."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        kind = _SAFETENSORS_TYPES[array.dtype.str[1:]]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).data)


def _import_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise SettingsError(
            "parquet needs pyarrow: pip install pyarrow; or use the format safetensors"
        ) from None
    return pyarrow


def _write_parquet(path: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write arrays as columns; the axes of a row are flat."""
    arrow = _import_parquet()
    columns = {}
    for name, array in arrays.items():
        flat = arrow.array(np.ascontiguousarray(array).reshape(-1))
        width = array[0].size
        columns[name] = (
            flat if array.ndim == 1 else arrow.FixedSizeListArray.from_arrays(flat, width)
        )
    arrow.parquet.write_table(arrow.table(columns), path)


def count_texts(path: Path, field: str = "text") -> int:
    """Count the texts of a corpus, for a progress bar; checks every line."""
    return sum(1 for _ in read_corpus(path, field))
