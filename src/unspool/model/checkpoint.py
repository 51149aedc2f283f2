"""Checkpoints in and out: a safetensors folder or a GGUF file in, a safetensors folder out.

    checkpoint = open_checkpoint("model.gguf")    # reads the header, no weights yet
    checkpoint.config                             # ModelConfig
    for name, stored in checkpoint.weights(): ... # each weight as the file has it
    model = load_transformer(checkpoint)          # a Transformer with its weights
    save_checkpoint(model, "folder")              # that transformers can load

Files are memory-mapped. Pickle files (.bin, .pt, .pth, .ckpt) are refused: loading one runs
whatever code its author put there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from unspool.errors import ModelFileError
from unspool.model.config import ModelConfig
from unspool.model.config_gguf import config_from_gguf, rules_for_gguf
from unspool.model.config_hf import config_from_hf, config_to_hf, read_json
from unspool.model.families import FAMILIES
from unspool.model.float8 import SCALES, block_of
from unspool.model.gguf import GGUFFile, part_paths
from unspool.model.hub_files import PICKLES
from unspool.model.layer_places import Places
from unspool.model.mask_token import mask_id_in, named_block, says_mask
from unspool.model.quantized import scheme_of
from unspool.model.recurrent_config import only_ours
from unspool.model.safetensors_file import SafetensorsFile
from unspool.model.stored import Stored
from unspool.model.weights import Rule, parameter_count, read_weights, shapes, write_weights

if TYPE_CHECKING:
    import torch

    from unspool.model.transformer import Transformer


class Checkpoint(Protocol):
    """A model on disk: its settings at once, its weights when asked for."""

    path: Path
    config: ModelConfig

    def weights(self) -> Iterator[tuple[str, Stored]]: ...

    @property
    def losses(self) -> str: ...

    def bits_per_weight(self) -> float: ...


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Look at what lies at `path` and read its settings."""
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise ModelFileError(f"{path}: no such file or folder")
    if path.suffix in PICKLES:
        raise _pickle_refused(path)
    if path.suffix == ".safetensors":
        return SafetensorsCheckpoint(path.parent, [path])
    return GGUFCheckpoint(path)


def _open_folder(folder: Path) -> Checkpoint:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return SafetensorsCheckpoint(folder, _shards(index))
    found = sorted(folder.glob("*.safetensors"))
    if len(found) > 1 and folder / "model.safetensors" in found:
        found = [folder / "model.safetensors"]
    if len(found) > 1:
        raise ModelFileError(
            f"{folder}: has {len(found)} .safetensors files and no model.safetensors.index.json "
            "that says how they belong together"
        )
    if found:
        return SafetensorsCheckpoint(folder, found)
    ggufs = sorted({part_paths(file)[0] for file in folder.glob("*.gguf")})
    if len(ggufs) == 1:
        return GGUFCheckpoint(ggufs[0])
    if ggufs:
        names = ", ".join(file.name for file in ggufs)
        raise ModelFileError(f"{folder}: holds several GGUF files; name one of {names}")
    for file in sorted(folder.iterdir()):
        if file.suffix in PICKLES:
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
        if Path(name).name != name:  # a name, never a way out of the folder
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
            raise ModelFileError(f"{folder}: has no config.json, which says what the model is")
        raw = named_block(read_json(folder / "config.json"), folder)
        self.config = config_from_hf(raw)
        self._block = block_of(raw.get("quantization_config") or {})
        self._scheme = scheme_of(raw)
        self._file_of: dict[str, SafetensorsFile] = {}
        for file in map(SafetensorsFile, files):
            self._file_of.update(dict.fromkeys(file.tensors, file))
        if not self.config.tied and not self._has("head.weight"):
            self.config = replace(self.config, tied=True)
        if self.config.sight != "causal" and not says_mask(raw):
            known = mask_id_in(folder)
            self.config = replace(self.config, mask_id=known) if known is not None else self.config

    @property
    def rules(self) -> tuple[Rule, ...]:
        return rules_for_hf(self.config)

    def _prefix(self) -> str:
        for prefix in prefixes_for_hf(self.config):
            named = (rule.theirs for rule in self.rules if "{p}" in rule.theirs)
            if any(name.replace("{p}", prefix) in self._file_of for name in named):
                return prefix
        return ""

    def _has(self, ours: str) -> bool:
        found = (rule.theirs for rule in self.rules if ours in rule.ours)
        names = [name.replace("{p}", self._prefix()) for name in found]
        names += [f"{name}_packed" for name in names]  # what stands for it if it is quantized
        names += [f"{name.removesuffix('weight')}qweight" for name in names]
        return any(name in self._file_of for name in names)

    def weights(self) -> Iterator[tuple[str, Stored]]:
        prefix = self._prefix()

        def fetch(name: str) -> Stored | None:
            full = name.replace("{p}", prefix)
            if self._scheme is not None:
                quantized = self._scheme.stored(full, _Tensors(self._file_of))
                if quantized is not None:
                    return quantized
            file = self._file_of.get(full)
            return None if file is None else file.stored(full, self._scales(full), self._block)

        return read_weights(self.config, self.rules, fetch, prefix)

    def _scales(self, name: str) -> Stored | None:
        """The scales of a tensor of FP8 numbers."""
        for beside in (name + ending for ending in SCALES):
            if beside in self._file_of:
                return self._file_of[beside].stored(beside)
        return None

    @property
    def losses(self) -> str:
        """What reading the weights so far has lost of them, in words; mostly nothing."""
        return "; ".join(sorted(self._scheme.losses)) if self._scheme is not None else ""

    def bits_per_weight(self) -> float:
        size = sum(file.stat().st_size for file in self.files)
        return size * 8 / parameter_count(self.config)


class _Tensors:
    """The tensors of all files together, as `quantized.py` asks for them."""

    def __init__(self, file_of: Mapping[str, SafetensorsFile]) -> None:
        self._file_of = file_of

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        return self._of(name).stored(name).float32()

    def whole(self, name: str) -> npt.NDArray[Any]:
        return self._of(name).whole_numbers(name)

    def _of(self, name: str) -> SafetensorsFile:
        if name not in self._file_of:
            raise ModelFileError(f"the checkpoint lacks {name}, which its quantized weights need")
        return self._file_of[name]


class GGUFCheckpoint:
    """One GGUF file: settings, vocabulary and weights together; a split one by any of its parts."""

    def __init__(self, path: Path) -> None:
        self.path = part_paths(path)[0]
        self.file = GGUFFile(self.path)
        self.config = config_from_gguf(self.file)
        self.losses = ""

    def weights(self) -> Iterator[tuple[str, Stored]]:
        def fetch(name: str) -> Stored | None:
            return self.file.stored(name) if name in self.file.tensors else None

        return read_weights(self.config, rules_for_gguf(self.config), fetch)

    def bits_per_weight(self) -> float:
        used = [t for name, t in self.file.tensors.items() if not name.startswith("rope_")]
        return sum(t.nbytes for t in used) * 8 / sum(t.elements for t in used)


def rules_for_hf(config: ModelConfig) -> tuple[Rule, ...]:
    """The family's tables; a model of our own is stored under our own names."""
    if config.family in FAMILIES and not only_ours(config):
        return FAMILIES[config.family].rules
    patterns = dict.fromkeys(re.sub(r"^layers\.\d+", "layers.{i}", n) for n in shapes(config))
    return tuple(Rule(pattern, (pattern,)) for pattern in patterns)


def prefixes_for_hf(config: ModelConfig) -> tuple[str, ...]:
    known = config.family in FAMILIES and not only_ours(config)
    return FAMILIES[config.family].prefixes if known else ("",)


def load_transformer(
    checkpoint: Checkpoint, *, dtype: str = "float32", device: str | Places = "cpu"
) -> Transformer:
    """The plain transformer with the checkpoint's weights in the given precision, on one device or
    over several."""
    import torch

    from unspool.model.transformer import Transformer

    with torch.device("meta"):  # no memory until the real weights come
        model = Transformer(checkpoint.config)
    device_of = (lambda name: device) if isinstance(device, str) else device.of
    fill_transformer(model, checkpoint, dtype=dtype, device_of=device_of)
    return model


def fill_transformer(
    model: Transformer,
    checkpoint: Checkpoint,
    *,
    dtype: str,
    device_of: Callable[[str], str],
    part_of: Callable[[str, Stored], Stored] = lambda name, stored: stored,
) -> None:
    """Give a model without memory its weights: each, or the part of it that the model has, in the
    given precision on the device that its name says. One at a time is read from the file."""
    import torch

    wanted: torch.dtype = getattr(torch, dtype)
    state = {
        name: _tensor(part_of(name, stored)).to(device=device_of(name), dtype=wanted)
        for name, stored in checkpoint.weights()
    }
    broken = [name for name, tensor in state.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise ModelFileError(
            f"{checkpoint.path}: {broken[0]} holds NaN or infinite numbers; the file is damaged "
            f"or {dtype} is too narrow for it"
        )
    model.load_state_dict(state, assign=True)
    model.eval().requires_grad_(False)


def _tensor(stored: Stored) -> torch.Tensor:
    """The numbers for torch, in memory of their own: a view would write into the file."""
    import torch

    if stored.packed:
        return torch.from_numpy(stored.float32())
    values = np.array(stored.data)
    if stored.type == "BF16":  # numpy has no such numbers: hand the bits over
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
    """The same of weights under our names, which need not be in a model."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    prefix = prefixes_for_hf(config)[0]
    named = write_weights(config, rules_for_hf(config), weights)
    tensors = {name.replace("{p}", prefix): tensor.cpu() for name, tensor in named.items()}
    shards: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        size += tensor.nbytes
        if shards[-1] and size > largest_file:
            shards.append({})
            size = tensor.nbytes
        shards[-1][name] = tensor
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors"
        if len(shards) > 1:
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        where.update(dict.fromkeys(shard, name))
        save_file(shard, folder / f"{name}.part", metadata={"format": "pt"})
        (folder / f"{name}.part").replace(folder / name)
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    dtype = str(weights["embed.weight"].dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config_to_hf(config, dtype), indent=2))
