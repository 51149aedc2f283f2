"""Drafting heads in Unspool's format: their files, and their arithmetic in numpy."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from unspool.backends.step import Floats, Ints, LoadedModel
from unspool.decoding.speculative import arrays
from unspool.decoding.speculative.controller import DraftShape
from unspool.engine.request import DraftTree
from unspool.errors import ModelFileError, SettingsError
from unspool.model.config import Rotary
from unspool.model.files.safetensors import SafetensorsFile
from unspool.model.files.stored import FileTensor

# -- File format of a drafting head: a folder with `config.json` and `head.safetensors`
#
#     {"format": "unspool-draft-head", "version": 1,
#      "name": ..., "base": "SmolLM2-135M-Instruct", "fingerprint": "of the base model's weights",
#      "layers": [2, 11, 20, 27],              hidden states it reads: n is the input of layer n
#      "width": 576, "heads": 9, "kv_heads": 3, "head_width": 64, "ff_width": 1536,
#      "words": 4, "word_width": 256, "mix_width": 512,
#      "rope_theta": 100000.0, "norm_eps": 1e-05, "weights": "Q4_1"}
#
# `ids` are the tokens that it can propose. Matrices of 4 or 8 bits are stored as bytes [rows,
# bytes per row] in GGUF blocks (Q4_1, Q8_0), which the kernels use directly.

# -- Build a draft from a head's logits: a greedy chain, or a small tree


@dataclass(slots=True, eq=False)
class DraftNode:
    """A drafted token; the root (parent None) is the last token of the text."""

    token: int
    parent: DraftNode | None = None
    depth: int = 0
    score: float = 0.0  # log-probability of the path
    state: Any = field(default=None, repr=False)  # the head's state after this token


class HeadContext(Protocol):
    """The state of a head for one text: the positions it has read."""

    def __len__(self) -> int: ...

    def read(self, positions: Ints, vectors: Floats, following: Sequence[int]) -> None:
        """Read positions: the model's hidden states [layers, n, width], and each next token."""

    def truncate(self, count: int) -> None:
        """Keep only the first `count` positions."""

    def fork(self, count: int) -> HeadContext:
        """Return the context of another text that shares the first `count` positions."""

    def expand(self, nodes: list[DraftNode], tokens: Sequence[int]) -> Floats:
        """Logits of the token after each node; sets the nodes' states."""


class DraftingHead(Protocol):
    """A drafting head with its weights, for any number of texts."""

    name: str
    layers: tuple[int, ...]
    ids: Ints  # the token of each logit

    def context(self) -> HeadContext: ...


def build_draft(
    context: HeadContext, tokens: Sequence[int], ids: Ints, shape: DraftShape, temperature: float
) -> DraftTree | list[int]:
    """Build a draft of this shape after these tokens."""
    if shape.width == 1:
        chain = getattr(context, "chain", None)  # a head may draft a whole chain in one run
        if chain is None:
            guesses = _chain(context, tokens, ids, shape.levels, temperature)
        else:
            guesses = chain(tokens, shape.levels, temperature)
        return _while_likely(guesses, shape.min_probability)
    level, all_nodes = [DraftNode(int(tokens[-1]))], list[DraftNode]()
    for depth in range(1, shape.levels + 1):
        logits = context.expand(level, tokens)
        candidates = [
            DraftNode(int(ids[place]), node, depth, node.score + logprob)
            for node, row in zip(level, logits, strict=True)
            for place, logprob in _top_logprobs(row, shape.width, temperature)
        ]
        candidates.sort(key=lambda node: -node.score)
        all_nodes += candidates
        level = candidates[: shape.width]
    all_nodes.sort(key=lambda node: -node.score)  # stable: parents stay before their children
    selected = all_nodes[: shape.nodes]
    number: dict[DraftNode | None, int] = {node: place for place, node in enumerate(selected)}
    parents = [number.get(node.parent, -1) for node in selected]
    return DraftTree([node.token for node in selected], parents)


def _chain(
    context: HeadContext, tokens: Sequence[int], ids: Ints, levels: int, temperature: float
) -> Iterator[tuple[int, float]]:
    """Draft greedily; each token is computed only when requested."""
    node = DraftNode(int(tokens[-1]))
    for depth in range(1, levels + 1):
        (logits,) = context.expand([node], tokens)
        ((place, logprob),) = _top_logprobs(logits, 1, temperature)
        node = DraftNode(int(ids[place]), node, depth)
        yield node.token, logprob


def _while_likely(guesses: Iterator[tuple[int, float]], min_probability: float) -> list[int]:
    """Take tokens while their joint probability is at least `min_probability`."""
    kept_tokens, score = list[int](), 0.0
    for token, logprob in guesses:
        score += logprob
        if min_probability and score < math.log(min_probability):
            break
        kept_tokens.append(token)
    return kept_tokens


def _top_logprobs(logits: Floats, count: int, temperature: float) -> list[tuple[int, float]]:
    """The likeliest indices with their log-probabilities."""
    most = float(logits.max())
    near = np.flatnonzero(logits > most - 8 * temperature)  # the others do not matter, even summed
    scaled = (logits[near] - most) / temperature
    total = float(np.log(np.exp(scaled).sum()))
    order = np.argsort(-scaled, kind="stable")[:count]
    return [(int(near[place]), float(scaled[place]) - total) for place in order]


def last_tokens(node: DraftNode, tokens: Sequence[int], count: int) -> list[int]:
    """The last `count` tokens up to a node, most recent first; short texts repeat their first
    token."""
    recent: list[int] = []
    current: DraftNode | None = node
    while current is not None and current.parent is not None:
        recent.append(current.token)
        current = current.parent
    back = 1
    while len(recent) < count:
        recent.append(int(tokens[max(-back, -len(tokens))]))
        back += 1
    return recent[:count]


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


_CHUNK_ROWS = 4096  # rows of the model's tables read at a time


class UnspoolHead:
    """A head with its weights in numpy or on a torch device."""

    def __init__(self, files: HeadFiles, model: LoadedModel, device: str | None = None) -> None:
        self.config: HeadConfig = files.config
        self.name, self.layers, self.ids = files.config.name, files.config.layers, files.ids
        self._model, self.to_device = model, arrays.to_device(device)
        self._weights = {
            n: self.to_device(stored.float32()) for n, stored in files.matrices.items()
        }
        self._norms = {name: self.to_device(vector) for name, vector in files.norms.items()}
        self._head = self.to_device(gather_rows(model, "head.weight", files.ids))
        self._rotary = Rotary(width=files.config.head_width, base=files.config.rope_theta)

    def context(self) -> UnspoolHeadContext:
        return UnspoolHeadContext(self)

    def norm(self, x: arrays.Array, name: str) -> arrays.Array:
        return arrays.rms_norm(x, self._norms[name], self.config.norm_eps)

    def linear(self, x: arrays.Array, name: str) -> arrays.Array:
        return x @ self._weights[name].swapaxes(0, 1)

    def embed(self, tokens: Sequence[int]) -> arrays.Array:
        rows = [self._model.rows("embed.weight", token, token + 1)[0] for token in tokens]
        return self.to_device(np.stack(rows))

    def rope_tables(self, positions: Ints) -> list[arrays.Array]:
        return [self.to_device(table) for table in self._rotary.tables(positions, 0)]

    def fuse(self, vectors: Floats) -> arrays.Array:
        """Fuse hidden states [layers, n, width] into one vector per position."""
        parts = [self.norm(self.to_device(x), f"features.norm.{n}") for n, x in enumerate(vectors)]
        return self.linear(arrays.concat(parts, -1), "features.fuse")

    def keys_values(self, fused: arrays.Array, positions: Ints) -> list[arrays.Array]:
        config = self.config
        kv = self.linear(self.norm(fused, "context.norm"), "context.keys_values")
        kv = kv.reshape(len(positions), 2, config.kv_heads, config.head_width)
        return [arrays.apply_rope(kv[:, 0], *self.rope_tables(positions)), kv[:, 1]]

    def step(
        self,
        states: arrays.Array,
        recent: list[list[int]],
        positions: Ints,
        keys: arrays.Array,
        values: arrays.Array,
    ) -> tuple[arrays.Array, arrays.Array]:
        """Next states, and logits over `ids`; `recent` has the most recent token first."""
        config, count = self.config, len(recent)
        word = self.embed([tokens[0] for tokens in recent])
        h = self.linear(self.norm(states, "join.state.norm"), "join.state")
        h = h + self.linear(self.norm(word, "join.word.norm"), "join.word")
        query = self.linear(self.norm(h, "attention.norm"), "attention.query")
        query = query.reshape(count, config.heads, config.head_width)
        query = arrays.apply_rope(query, *self.rope_tables(positions))
        h = h + self.linear(arrays.attention(query, keys, values), "attention.out")
        inner = self.linear(self.norm(h, "feed.norm"), "feed.gate_up")
        gate, up = inner[:, : config.ff_width], inner[:, config.ff_width :]
        h = h + self.linear(arrays.silu(gate) * up, "feed.down")
        mixed = self.linear(self.norm(h, "mix.norm"), "mix.state") + self._mixed_words(recent)
        gate, up = mixed[:, : config.mix_width], mixed[:, config.mix_width :]
        output = h + self.linear(arrays.silu(gate) * up, "mix.out")
        return h, self.norm(output, "final.norm") @ self._head.swapaxes(0, 1)

    def _mixed_words(self, recent: list[list[int]]) -> arrays.Array:
        """Contribution of the last tokens' embeddings, each by its own part of a projection."""
        width, parts = self.config.word_width, []
        for back in range(self.config.words):
            words = self.embed([tokens[back] for tokens in recent])
            projected = self.linear(self.norm(words, "words.norm"), "words.project")
            parts.append(projected[:, back * width : (back + 1) * width])
        earlier = self.linear(arrays.concat(parts[1:], -1), "mix.earlier_words")
        return self.linear(parts[0], "mix.last_word") + earlier


class UnspoolHeadContext:
    """The state of the head for one text."""

    def __init__(self, head: UnspoolHead) -> None:
        config = head.config
        self._head, self._length = head, 0
        self._fused = head.to_device(np.zeros((0, config.width), np.float32))
        sink = np.zeros((1, config.kv_heads, config.head_width), np.float32)
        self._keys, self._values = head.to_device(sink), head.to_device(sink)

    def __len__(self) -> int:
        return len(self._fused)

    def truncate(self, count: int) -> None:
        self._fused = self._fused[:count]
        self._keys, self._values = self._keys[: count + 1], self._values[: count + 1]

    def fork(self, count: int) -> UnspoolHeadContext:
        other = copy.copy(self)
        other.truncate(count)
        return other

    def read(self, positions: Ints, vectors: Floats, following: Sequence[int]) -> None:
        fused = self._head.fuse(vectors)
        keys, values = self._head.keys_values(fused, positions)
        self._fused = arrays.concat([self._fused, fused], 0)
        self._keys = arrays.concat([self._keys, keys], 0)
        self._values = arrays.concat([self._values, values], 0)

    def expand(self, nodes: list[DraftNode], tokens: Sequence[int]) -> Floats:
        return expand_nodes(self._head, nodes, tokens, self._fused, self._keys, self._values)


def expand_nodes(
    head: UnspoolHead,
    nodes: list[DraftNode],
    tokens: Sequence[int],
    fused: arrays.Array,
    keys: arrays.Array,
    values: arrays.Array,
) -> Floats:
    """Logits of the token after each node, given a text's keys and values; sets node states."""
    recent = [last_tokens(node, tokens, head.config.words) for node in nodes]
    states = [n.parent.state if n.parent is not None else fused[-1] for n in nodes]
    positions = np.array([len(tokens) - 1 + node.depth for node in nodes])
    rows = arrays.concat([state[None] for state in states], 0)
    h, logits = head.step(rows, recent, positions, keys, values)
    for node, state in zip(nodes, h, strict=True):
        node.state = state
    result: Floats = arrays.to_host(logits)
    return result


def gather_rows(model: LoadedModel, name: str, ids: Ints) -> Floats:
    """Gather rows of one of the model's tables without loading all of it."""
    chunks: list[Floats] = []
    order = np.argsort(ids, kind="stable")
    for start in range(0, int(ids.max()) + 1, _CHUNK_ROWS):
        chunk_ids = ids[order][(ids[order] >= start) & (ids[order] < start + _CHUNK_ROWS)]
        if len(chunk_ids):
            chunks.append(model.rows(name, start, start + _CHUNK_ROWS)[chunk_ids - start])
    sorted_rows = np.concatenate(chunks)
    rows = np.empty_like(sorted_rows)
    rows[order] = sorted_rows
    return rows
