"""Load checkpoints from safetensors folders or GGUF files; save safetensors folders.

    checkpoint = open_checkpoint("model.gguf")    # reads the header, no weights yet
    checkpoint.config                             # ModelConfig
    for name, stored in checkpoint.weights(): ... # each weight, packed as in the file
    model = load_transformer(checkpoint)          # a Transformer with its weights
    save_checkpoint(model, "folder")              # transformers can load it

Files are memory-mapped. Pickle files (.bin, .pt, .pth, .ckpt) are refused: loading one runs any
code inside it.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from unspool.errors import ModelFileError
from unspool.model.config import ModelConfig
from unspool.model.families.registry import FAMILIES
from unspool.model.files.config_gguf import config_from_gguf, rules_for_gguf
from unspool.model.files.config_json import (
    add_block_from_name,
    config_from_hf,
    config_to_hf,
    find_mask_id,
    has_mask_setting,
    read_json,
)
from unspool.model.files.family_settings import needs_unspool_format
from unspool.model.files.gguf import GGUFFile, part_paths
from unspool.model.files.mtp import MtpTensors, find_mtp_in_gguf, find_mtp_in_hf, write_mtp
from unspool.model.files.quantized import scheme_of
from unspool.model.files.safetensors import PICKLE_SUFFIXES, SafetensorsFile
from unspool.model.files.stored import SCALES, FileTensor, scale_block_size
from unspool.model.files.tensor_mapping import (
    check_tensors,
    is_in_file,
    is_same,
    read_weights,
    write_weights,
)
from unspool.model.weights import TensorRule, parameter_count, weight_shapes

if TYPE_CHECKING:
    import torch

    from unspool.model.files.sharding import DeviceMap
    from unspool.model.layers.transformer import Transformer


class Checkpoint(Protocol):
    """A model on disk. Settings are read when it is opened, weights on demand."""

    path: Path
    config: ModelConfig

    def weights(self) -> Iterator[tuple[str, FileTensor]]: ...

    @property
    def losses(self) -> str: ...

    @property
    def mtp(self) -> MtpTensors | None:
        """The multi-token prediction layer, which drafts for speculative decoding."""

    def bits_per_weight(self) -> float: ...


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open the checkpoint at `path` (a folder, a .safetensors or a GGUF file)."""
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise ModelFileError(f"{path}: no such file or folder")
    if path.suffix in PICKLE_SUFFIXES:
        raise _pickle_refused(path)
    if path.suffix == ".safetensors":
        return SafetensorsCheckpoint(path.parent, [path])
    return GGUFCheckpoint(path)


def _open_folder(folder: Path) -> Checkpoint:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return SafetensorsCheckpoint(folder, _shards(index))
    tensor_files = sorted(folder.glob("*.safetensors"))
    if len(tensor_files) > 1 and folder / "model.safetensors" in tensor_files:
        tensor_files = [folder / "model.safetensors"]
    if len(tensor_files) > 1:
        raise ModelFileError(
            f"{folder}: has {len(tensor_files)} .safetensors files and no "
            "model.safetensors.index.json"
        )
    if tensor_files:
        return SafetensorsCheckpoint(folder, tensor_files)
    ggufs = sorted({part_paths(file)[0] for file in folder.glob("*.gguf")})
    if len(ggufs) == 1:
        return GGUFCheckpoint(ggufs[0])
    if ggufs:
        names = ", ".join(file.name for file in ggufs)
        raise ModelFileError(f"{folder}: has several GGUF files; give the path of one: {names}")
    for file in sorted(folder.iterdir()):
        if file.suffix in PICKLE_SUFFIXES:
            raise _pickle_refused(file)
    raise ModelFileError(f"{folder}: no .safetensors or .gguf file in it")


def _pickle_refused(file: Path) -> ModelFileError:
    return ModelFileError(
        f"{file}: pickle checkpoints are refused, because loading one runs any code inside it; "
        "use the model's .safetensors or .gguf files"
    )


def _shards(index: Path) -> list[Path]:
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise ModelFileError(f"{index}: has no weight_map; download it again")
    files = []
    for name in sorted({str(value) for value in mapping.values()}):
        if Path(name).name != name:  # must not leave the folder
            raise ModelFileError(f"{index}: {name!r} is not a plain file name")
        if not (index.parent / name).exists():
            raise ModelFileError(f"{index.parent}: {name} is missing; download it again")
        files.append(index.parent / name)
    return files


class SafetensorsCheckpoint:
    """A folder with config.json and one or several .safetensors files."""

    def __init__(self, folder: Path, files: list[Path]) -> None:
        self.path, self.files = folder, files
        if not (folder / "config.json").exists():
            raise ModelFileError(f"{folder}: has no config.json")
        raw = add_block_from_name(read_json(folder / "config.json"), folder)
        self.config = config_from_hf(raw)
        self._block = scale_block_size(raw.get("quantization_config") or {})
        self._scheme = scheme_of(raw)
        self._embedding_name = ""  # the head's tensor if only that of a tied pair is in the file
        self._file_of: dict[str, SafetensorsFile] = {}
        for file in map(SafetensorsFile, files):
            self._file_of.update(dict.fromkeys(file.tensors, file))
        self._choose_head()
        if self.config.sight != "causal" and not has_mask_setting(raw):
            mask_id = find_mask_id(folder)
            self.config = (
                replace(self.config, mask_id=mask_id) if mask_id is not None else self.config
            )
        rules = self._named_rules(self.rules)
        text_config = raw.get("text_config")
        settings = text_config if isinstance(text_config, dict) else raw
        with _naming(folder):
            check_tensors(
                self.config,
                rules,
                self._file_of.keys(),
                self._fetch,
                spare_layers=int(settings.get("num_nextn_predict_layers") or 0),
            )

    def _choose_head(self) -> None:
        """Decide whether the head is tied to the embedding, as transformers does.

        A head in the file that differs from the embedding is always used. An untied model without a
        head has none.
        """
        embedding, head = self._tensor_of("embed.weight"), self._tensor_of("head.weight")
        if not self.config.tied:
            if head is None:
                self.config = replace(self.config, tied=True, headless=True)
            return
        if head is None:
            return
        if embedding is None:  # only one name of the shared tensor was saved
            self._embedding_name = head
            return
        stored, table = self._fetch(head), self._fetch(embedding)
        if stored is None or table is None or not is_same(stored, table):
            self.config = replace(self.config, tied=False)

    @property
    def rules(self) -> tuple[TensorRule, ...]:
        family_rules = rules_for_hf(self.config)
        if self._embedding_name:
            return (*family_rules, TensorRule(self._embedding_name, ("embed.weight",)))
        return family_rules

    def _prefix(self) -> str:
        for prefix in prefixes_for_hf(self.config):
            named = (rule.tensor for rule in self.rules if "{p}" in rule.tensor)
            if any(name.replace("{p}", prefix) in self._file_of for name in named):
                return prefix
        return ""

    def _named_rules(self, rules: tuple[TensorRule, ...]) -> tuple[TensorRule, ...]:
        """The rules with this file's prefix."""
        prefix = self._prefix()
        return tuple(
            replace(
                rule,
                tensor=rule.tensor.replace("{p}", prefix),
                added_tensor=rule.added_tensor.replace("{p}", prefix),
            )
            for rule in rules
        )

    def _tensor_of(self, weight: str) -> str | None:
        """The name of a weight's tensor in the file; None: it is not there."""
        names = (rule.tensor for rule in self._named_rules(self.rules) if weight in rule.weights)
        return next((name for name in names if is_in_file(name, self._file_of)), None)

    def _fetch(self, name: str) -> FileTensor | None:
        if self._scheme is not None:
            quantized = self._scheme.stored(name, _Tensors(self._file_of))
            if quantized is not None:
                return quantized
        file = self._file_of.get(name)
        return None if file is None else file.stored(name, self._scales(name), self._block)

    def weights(self) -> Iterator[tuple[str, FileTensor]]:
        return read_weights(self.config, self._named_rules(self.rules), self._fetch)

    @property
    def mtp(self) -> MtpTensors | None:
        return find_mtp_in_hf(
            self.config, self.rules, self._prefix(), self._file_of.keys(), self._fetch
        )

    def _scales(self, name: str) -> FileTensor | None:
        """The scales of an FP8 tensor."""
        for scales_name in (name + ending for ending in SCALES):
            if scales_name in self._file_of:
                return self._file_of[scales_name].stored(scales_name)
        return None

    @property
    def losses(self) -> str:
        """Precision lost by reading the weights so far, in words; usually empty."""
        return "; ".join(sorted(self._scheme.losses)) if self._scheme is not None else ""

    def bits_per_weight(self) -> float:
        size = sum(file.stat().st_size for file in self.files)
        return size * 8 / parameter_count(self.config)


class _Tensors:
    """The tensors of all files, for `quantized.py`."""

    def __init__(self, file_of: Mapping[str, SafetensorsFile]) -> None:
        self._file_of = file_of

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        return self._file(name).stored(name).float32()

    def integers(self, name: str) -> npt.NDArray[Any]:
        return self._file(name).integers(name)

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._file_of:
            raise ModelFileError(f"the checkpoint lacks {name} of a quantized weight")
        return self._file_of[name]


class GGUFCheckpoint:
    """A GGUF file with settings, vocabulary and weights; a split one is given by any part."""

    def __init__(self, path: Path) -> None:
        self.path = part_paths(path)[0]
        self.file = GGUFFile(self.path)
        self.config = config_from_gguf(self.file)
        self.losses = ""
        architecture = self.file.metadata.get("general.architecture")
        num_draft_layers = self.file.metadata.get(f"{architecture}.nextn_predict_layers", 0)
        with _naming(self.path):
            check_tensors(
                self.config,
                rules_for_gguf(self.config),
                self.file.tensors.keys(),
                self._fetch,
                spare_layers=int(num_draft_layers),  # multi-token prediction
            )

    def _fetch(self, name: str) -> FileTensor | None:
        return self.file.stored(name) if name in self.file.tensors else None

    def weights(self) -> Iterator[tuple[str, FileTensor]]:
        return read_weights(self.config, rules_for_gguf(self.config), self._fetch)

    @property
    def mtp(self) -> MtpTensors | None:
        return find_mtp_in_gguf(
            self.config, rules_for_gguf(self.config), self.file.tensors.keys(), self._fetch
        )

    def bits_per_weight(self) -> float:
        used = [t for name, t in self.file.tensors.items() if not name.startswith("rope_")]
        return sum(t.nbytes for t in used) * 8 / sum(t.elements for t in used)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Prefix errors with the path."""
    try:
        yield
    except ModelFileError as error:
        raise ModelFileError(f"{path}: {error}") from error


def rules_for_hf(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The family's rules; in Unspool's own format tensors have the names of the weights."""
    if config.family in FAMILIES and not needs_unspool_format(config):
        return FAMILIES[config.family].rules
    names = {**weight_shapes(config), **weight_shapes(replace(config, tied=not config.tied))}
    patterns = dict.fromkeys(re.sub(r"^layers\.\d+", "layers.{i}", n) for n in names)
    return tuple(TensorRule(pattern, (pattern,)) for pattern in patterns)


def prefixes_for_hf(config: ModelConfig) -> tuple[str, ...]:
    has_tables = config.family in FAMILIES and not needs_unspool_format(config)
    return FAMILIES[config.family].prefixes if has_tables else ("",)


def load_transformer(
    checkpoint: Checkpoint, *, dtype: str = "float32", device: str | DeviceMap = "cpu"
) -> Transformer:
    """Build the plain torch transformer with the checkpoint's weights in the given dtype, on one
    device or with its layers over several."""
    import torch

    from unspool.model.layers.transformer import Transformer

    with torch.device("meta"):  # no memory until the real weights come
        model = Transformer(checkpoint.config)
    device_of = (lambda name: device) if isinstance(device, str) else device.device_of
    load_weights_into(model, checkpoint, dtype=dtype, device_of=device_of)
    return model


def load_weights_into(
    model: Transformer,
    checkpoint: Checkpoint,
    *,
    dtype: str,
    device_of: Callable[[str], str],
    part_of: Callable[[str, FileTensor], FileTensor] = lambda name, stored: stored,
) -> None:
    """Load a checkpoint's weights into a model on the meta device, one at a time.

    Args:
        device_of: The device of each weight.
        part_of: The part of each weight that this model has (tensor parallelism).
    """
    import torch

    torch_dtype: torch.dtype = getattr(torch, dtype)
    state = {
        name: _tensor(part_of(name, stored)).to(device=device_of(name), dtype=torch_dtype)
        for name, stored in checkpoint.weights()
    }
    non_finite = [name for name, tensor in state.items() if not torch.isfinite(tensor).all()]
    if non_finite:
        raise ModelFileError(
            f"{checkpoint.path}: {non_finite[0]} holds NaN or infinite numbers; the file is "
            f"damaged or {dtype} is too narrow for it"
        )
    model.load_state_dict(state, assign=True)
    model.eval().requires_grad_(False)


def _tensor(stored: FileTensor) -> torch.Tensor:
    """Copy a tensor to torch; a view would write into the file."""
    import torch

    if stored.packed:
        return torch.from_numpy(stored.float32())
    values = np.array(stored.data)
    if stored.type == "BF16":  # numpy has no bfloat16: reinterpret the bits
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def save_checkpoint(
    model: Transformer, folder: str | Path, *, largest_file: int = 5_000_000_000
) -> None:
    """Write config.json and safetensors (in shards if large) that transformers can load."""
    save_weights(model.config, model.state_dict(), Path(folder), largest_file)


def save_weights(
    config: ModelConfig,
    weights: Mapping[str, torch.Tensor],
    folder: Path,
    largest_file: int = 5_000_000_000,
) -> None:
    """`save_checkpoint` for weights without a model.

    Weights with the prefix `mtp.` are those of a multi-token prediction layer; they are written
    under the names of Qwen3.5.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    prefix = prefixes_for_hf(config)[0]
    file_tensors = write_weights(config, rules_for_hf(config), weights)
    tensors = {name.replace("{p}", prefix): tensor.cpu() for name, tensor in file_tensors.items()}
    tensors.update(write_mtp(config, rules_for_hf(config), weights))
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        size += tensor.nbytes
        if shards[-1] and size > largest_file:
            shards.append({})
            size = tensor.nbytes
        shards[-1][name] = tensor
    shard_of: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        shard_of.update(dict.fromkeys(shard, name))
        save_file(shard, folder / f"{name}.part", metadata={"format": "pt"})
        (folder / f"{name}.part").replace(folder / name)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": shard_of}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    dtype = str(weights["embed.weight"].dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config_to_hf(config, dtype), indent=2))


# -- Fingerprint of a model's weights: a hash of names, shapes and sampled numbers

_SAMPLED = 64  # numbers of each weight

Numbers = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]


def fingerprint(checkpoint: Checkpoint) -> str:
    named = sorted(checkpoint.weights(), key=lambda named: named[0])
    return hash_weights((name, stored.shape, _numbers(stored)) for name, stored in named)


def hash_weights(weights: Iterable[tuple[str, tuple[int, ...], npt.NDArray[Any]]]) -> str:
    """Hash the names of all weights in order, their shapes, and the numbers at their `places`."""
    digest = hashlib.sha256()
    for name, shape, numbers in weights:
        digest.update(f"{name} {tuple(shape)}".encode())
        digest.update(numbers.astype("<f4").tobytes())
    return digest.hexdigest()


def sample_indices(shape: tuple[int, ...]) -> Indices:
    """Flat indices of the sampled numbers of a tensor."""
    return np.linspace(0, math.prod(shape) - 1, _SAMPLED).astype(np.int64)


def _numbers(stored: FileTensor) -> Numbers:
    """The sampled numbers of a tensor; only their rows are dequantized."""
    indices = sample_indices(stored.shape)
    if len(stored.shape) == 1:
        return stored.float32()[indices]
    rows, columns = np.divmod(indices, stored.shape[-1])
    if len(stored.shape) == 2:
        return _picked(stored, rows, columns)
    matrices, (matrix_indices, rows) = stored.slices(), np.divmod(rows, stored.shape[-2])
    values = np.empty(len(indices), np.float32)
    for matrix_index in np.unique(matrix_indices).tolist():
        in_matrix = matrix_indices == matrix_index
        values[in_matrix] = _picked(matrices[matrix_index], rows[in_matrix], columns[in_matrix])
    return values


def _picked(matrix: FileTensor, rows: Indices, columns: Indices) -> Numbers:
    unique_rows, row_index = np.unique(rows, return_inverse=True)
    return matrix.part(0, unique_rows).float32()[row_index, columns]


# -- The score head of a reward model

Floats = npt.NDArray[np.float32]
_NAME = re.compile(r"(?:score|classifier)(?:\.(\d+))?\.(weight|bias)")
_PER_TOKEN = ("ForTokenClassification", "ForProcessRewardModel")


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """Matrices with biases, and ReLUs between them."""

    layers: tuple[tuple[Floats, Floats | None], ...]
    per_token: bool  # trained to score every step, not only the full text

    @property
    def labels(self) -> int:
        """Number of outputs."""
        return len(self.layers[-1][0])

    def __call__(self, vectors: Floats) -> Floats:
        """Scores of hidden states after the last norm."""
        x = np.asarray(vectors, np.float32)
        for number, (weight, bias) in enumerate(self.layers):
            x = np.maximum(x, 0) if number else x
            x = x @ weight.T if bias is None else x @ weight.T + bias
        return x


def read_score_head(folder: Path) -> ScoreHead:
    """Read the score head of a checkpoint's folder."""
    parts: dict[tuple[int, str], Floats] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors = SafetensorsFile(file)
        for name in tensors.tensors:
            if match := _NAME.fullmatch(name):
                parts[int(match[1] or 0), match[2]] = tensors.stored(name).float32()
    numbers = sorted(number for number, kind in parts if kind == "weight")
    if not numbers:
        raise ModelFileError(
            f"{folder}: has no score head (score.weight), so it is not a reward model; give a "
            "sequence-classification checkpoint in safetensors, or use --judge ask:MODEL"
        )
    architectures = read_json(folder / "config.json").get("architectures") or [""]
    layers = tuple((parts[n, "weight"], parts.get((n, "bias"))) for n in numbers)
    return ScoreHead(layers, str(architectures[0]).endswith(_PER_TOKEN))
