"""LoRA adapters in PEFT's format: read and write.

    adapter = read_adapter(Path("folder"), config)
    adapter.parts["layers.0.attention.q.weight"]      # LowRank: down [r, in], up [out, r], scale
    write_adapter(adapter, Path("folder"), config)    # a folder that `peft` loads

A matrix W with an adapter is W + scale * up @ down. PEFT calls these B and A, and uses the module
names of transformers; if a family's file fuses several matrices, so does its adapter.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from unspool.errors import ModelFileError
from unspool.model.config import ModelConfig
from unspool.model.files.checkpoint import prefixes_for_hf, rules_for_hf
from unspool.model.files.config_json import read_json
from unspool.model.files.safetensors import SafetensorsFile
from unspool.model.files.tensor_mapping import row_order
from unspool.model.hub.find import find_run, resolve_run
from unspool.model.weights import TensorRule, weight_shapes

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
CANVAS_SETTINGS = "twin.json"  # settings of an adapter that fills a canvas
Floats = npt.NDArray[np.float32]

_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
# PEFT settings that are not supported, and their neutral values.
_MUST_BE: dict[str, Any] = {
    "use_dora": False,
    "bias": "none",
    "modules_to_save": None,
    "lora_bias": False,
    "layer_replication": None,
    "trainable_token_indices": None,
    "target_parameters": None,
}


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The update of one matrix: scale * up @ down."""

    down: Floats  # [rank, columns]
    up: Floats  # [rows, rank]
    scale: float

    @property
    def rank(self) -> int:
        return len(self.down)

    def delta(self) -> Floats:
        return np.asarray(self.up @ self.down * np.float32(self.scale), np.float32)


@dataclass(frozen=True, slots=True)
class CanvasAdapterSettings:
    """How an adapter fills a canvas after the text of its causal base model."""

    mask_id: int
    block: int  # positions of a block
    shifted: bool  # logits at position p predict the token at p + 1


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A LoRA adapter: the updates by weight name."""

    parts: Mapping[str, LowRank]
    base: str = ""  # the base model, as named in its file
    canvas: CanvasAdapterSettings | None = None  # how it fills a canvas, if it was trained to

    @property
    def nbytes(self) -> int:
        return sum(part.down.nbytes + part.up.nbytes for part in self.parts.values())

    def fingerprint(self) -> str:
        """Hash of all updates: what the keys and values of a text depend on."""
        digest = hashlib.blake2b(digest_size=16)
        for name, part in sorted(self.parts.items()):
            digest.update(repr((name, part.down.shape, part.up.shape, float(part.scale))).encode())
            for matrix in (part.down, part.up):
                digest.update(np.ascontiguousarray(matrix).data)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class _Module:
    """A module of transformers' model, and the matrices that it holds."""

    name: str  # without the prefix
    matrices: tuple[str, ...]
    rule: TensorRule


def adaptable_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Shapes of the matrices that an adapter may update: those of layers except experts, and an
    untied head."""
    return {
        name: (shape[0], shape[1])
        for name, shape in weight_shapes(config).items()
        if len(shape) == 2
        and (name.startswith("layers.") or name == "head.weight")
        and ".router." not in name
    }


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def base_model_of(folder: Path) -> str:
    """The base model of an adapter, as named in its file; "": none is named."""
    folder = _adapter_folder(folder)
    if not is_adapter(folder):
        raise ModelFileError(f"{folder}: has no {CONFIG}, so it is not an adapter")
    return _base_name(folder, read_json(folder / CONFIG))


def _base_name(folder: Path, settings: dict[str, Any]) -> str:
    name = settings.get("base_model_name_or_path")
    if not isinstance(name, str | None):
        raise ModelFileError(
            f"{folder / CONFIG}: base_model_name_or_path must be a string, got {name!r}"
        )
    return name or ""


def _adapter_folder(folder: Path) -> Path:
    """The folder of an adapter: itself, or the best checkpoint of a training run."""
    if is_adapter(folder):
        return folder
    return resolve_run(find_run(folder) or folder)


def read_adapter(folder: Path, config: ModelConfig) -> Adapter:
    """Read the adapter of a folder or a training run, for a model with this config."""
    folder = _adapter_folder(folder)
    if not is_adapter(folder):
        raise ModelFileError(f"{folder}: has no {CONFIG}, so it is not an adapter")
    if not (folder / WEIGHTS).is_file():
        raise ModelFileError(
            f"{folder}: has no {WEIGHTS}; pickle files (.bin) are refused, because loading one "
            "runs any code inside it"
        )
    settings = read_json(folder / CONFIG)
    _check_settings(folder, settings)
    pairs = _pairs(folder)
    modules = {
        prefix_name: module
        for module in _modules(config)
        for prefix_name in _their_names(module, config)
    }
    parts: dict[str, LowRank] = {}
    for name, (down, up) in pairs.items():
        if name not in modules:
            raise ModelFileError(
                f"{folder}: adapts {name}, which is not supported; adapters may update the "
                f"matrices of attention and feed-forward of a {config.family} model"
            )
        scale = _scale(settings, name, len(down))
        parts.update(_split(folder, modules[name], down, up, scale, config))
    base = _base_name(folder, settings)
    return Adapter(parts, base, _twin(folder, config))


def _twin(folder: Path, config: ModelConfig) -> CanvasAdapterSettings | None:
    """Read the canvas settings of an adapter, if it has any."""
    if not (folder / CANVAS_SETTINGS).is_file():
        return None
    settings = read_json(folder / CANVAS_SETTINGS)
    mask, block = settings.get("mask_id"), settings.get("block")
    is_token = isinstance(mask, int) and 0 <= mask < config.vocab_size
    if not is_token or not isinstance(block, int) or not 0 <= block <= config.context:
        raise ModelFileError(
            f"{folder / CANVAS_SETTINGS}: mask_id is {mask!r} and block {block!r}; they must be a "
            "token of the model and a number of tokens"
        )
    return CanvasAdapterSettings(int(mask or 0), block, settings.get("shifted") is True)


def write_adapter(
    adapter: Adapter, folder: Path, config: ModelConfig, *, dropout: float = 0.0
) -> None:
    """Write a folder that PEFT and `read_adapter` load."""
    from safetensors.numpy import save_file

    prefix = prefixes_for_hf(config)[0]
    tensors: dict[str, Floats] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for module in _modules(config):
        if not any(name in adapter.parts for name in module.matrices):
            continue
        joined = _join(module, adapter, config)
        name = module.name.replace("{p}", prefix)
        tensors[f"base_model.model.{name}.lora_A.weight"] = joined.down
        tensors[f"base_model.model.{name}.lora_B.weight"] = joined.up
        ranks[name], alphas[name] = joined.rank, joined.rank * joined.scale
    if not tensors:
        raise ModelFileError("the adapter updates no matrix of this model")
    rank, alpha = _commonest(ranks.values()), _commonest(alphas.values())
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base or None,
        "r": int(rank),
        "lora_alpha": _number(alpha),
        "lora_dropout": dropout,
        "target_modules": _targets(list(ranks), config, prefix),
        "rank_pattern": {name: r for name, r in ranks.items() if r != rank},
        "alpha_pattern": {n: _number(a) for n, a in alphas.items() if a != alpha},
        "fan_in_fan_out": any(m.rule.layout == "transposed" for m in _modules(config)),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / f"{WEIGHTS}.part", metadata={"format": "pt"})
    (folder / f"{WEIGHTS}.part").replace(folder / WEIGHTS)
    (folder / f"{CONFIG}.part").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / f"{CONFIG}.part").replace(folder / CONFIG)


def _check_settings(folder: Path, settings: dict[str, Any]) -> None:
    if settings.get("peft_type") != "LORA":
        raise ModelFileError(
            f"{folder}: is an adapter of type {settings.get('peft_type')!r}; only LORA is supported"
        )
    for name, usual in _MUST_BE.items():
        if settings.get(name) not in (usual, None, [], {}, False):
            raise ModelFileError(
                f"{folder}: has {name} = {settings[name]!r}, which is not supported; merge it into "
                "its model with peft, and load that"
            )


def _pairs(folder: Path) -> dict[str, tuple[Floats, Floats]]:
    """A and B of each module."""
    file = SafetensorsFile(folder / WEIGHTS)
    pairs: dict[str, dict[str, Floats]] = {}
    for name in file.tensors:
        if name.endswith(".base_layer.weight"):
            continue  # PEFT saves the base model's head if it is adapted
        match = _NAME.fullmatch(name)
        if match is None:
            raise ModelFileError(f"{folder}: tensor {name} is not a LoRA matrix")
        values = np.ascontiguousarray(file.stored(name).float32(), np.float32)
        if values.ndim != 2 or not np.isfinite(values).all():
            raise ModelFileError(f"{folder}: tensor {name} must be a matrix of finite numbers")
        pairs.setdefault(match[1], {})[match[2]] = values
    incomplete = [name for name, pair in pairs.items() if len(pair) < 2]
    if incomplete:
        raise ModelFileError(f"{folder}: {incomplete[0]} lacks lora_A or lora_B")
    if not pairs:
        raise ModelFileError(f"{folder}: {WEIGHTS} is empty")
    return {name: (pair["A"], pair["B"]) for name, pair in pairs.items()}


def _scale(settings: dict[str, Any], name: str, rank: int) -> float:
    alpha = _pattern(settings.get("alpha_pattern"), name, settings.get("lora_alpha", 8))
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not is_number or not -1e9 < alpha < 1e9 or rank < 1:
        raise ModelFileError(
            f"{CONFIG}: lora_alpha must be a number, got {alpha!r} (with rank {rank} for {name})"
        )
    if not isinstance(settings.get("use_rslora"), bool | None):
        raise ModelFileError(
            f"{CONFIG}: use_rslora must be true or false, got {settings['use_rslora']!r}"
        )
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _pattern(table: Any, name: str, default: Any) -> Any:
    """The value of a PEFT pattern table for a module: keys match the ends of names."""
    for end, value in table.items() if isinstance(table, dict) else ():
        try:
            if re.fullmatch(rf"(.*\.)?({str(end).removeprefix('^')})", name):
                return value
        except re.error:
            continue
    return default


def _modules(config: ModelConfig) -> Iterator[_Module]:
    """The modules that hold adaptable matrices, in layer order."""
    matrix_shapes, seen_matrices = adaptable_shapes(config), set[str]()
    for name in matrix_shapes:
        if name in seen_matrices:
            continue
        layer = name.split(".")[1] if name.startswith("layers.") else ""
        for rule in rules_for_hf(config):
            matrices = tuple(part.replace("{i}", layer) for part in rule.weights)
            if name in matrices and matrix_shapes.keys() >= set(matrices):
                seen_matrices.update(matrices)
                module_name = rule.tensor.replace("{i}", layer).removesuffix(".weight")
                yield _Module(module_name, matrices, rule)
                break


def _their_names(module: _Module, config: ModelConfig) -> list[str]:
    return [module.name.replace("{p}", prefix) for prefix in prefixes_for_hf(config)]


def _split(
    folder: Path, module: _Module, down: Floats, up: Floats, scale: float, config: ModelConfig
) -> dict[str, LowRank]:
    """Split a fused module's update into those of its matrices."""
    matrix_shapes = adaptable_shapes(config)
    rows = [matrix_shapes[name][0] for name in module.matrices]
    columns = matrix_shapes[module.matrices[0]][1]
    if down.shape[1] != columns or up.shape != (sum(rows), len(down)):
        raise ModelFileError(
            f"{folder}: the update of {module.name.replace('{p}', '')} is {up.shape[0]} x "
            f"{down.shape[1]}, and the model's matrix is {sum(rows)} x {columns}; it was trained "
            "on another model"
        )
    order = row_order(module.rule.layout, len(up), config)
    if order is not None:
        up = np.ascontiguousarray(up[order])
    ends = np.cumsum(rows).tolist()
    return {
        name: LowRank(down, np.ascontiguousarray(up[start:end]), scale)
        for name, start, end in zip(module.matrices, [0, *ends], ends, strict=False)
    }


def _join(module: _Module, adapter: Adapter, config: ModelConfig) -> LowRank:
    """Combine the updates of a fused module's matrices; the ranks add up unless `down` is
    shared."""
    matrix_shapes = adaptable_shapes(config)
    parts = [adapter.parts.get(name) for name in module.matrices]
    present = [part for part in parts if part is not None]
    scale = present[0].scale
    if len({id(part.down) for part in present}) == 1 and len(present) == len(parts):
        down, up = (
            present[0].down,
            np.concatenate([p.up * np.float32(p.scale / scale) for p in present]),
        )
    else:
        down = np.concatenate([part.down for part in present])
        up = np.zeros(
            (sum(matrix_shapes[name][0] for name in module.matrices), len(down)), np.float32
        )
        row = column = 0
        for name, part in zip(module.matrices, parts, strict=True):
            if part is not None:
                target = slice(row, row + len(part.up)), slice(column, column + part.rank)
                up[target] = part.up * np.float32(part.scale / scale)
                column += part.rank
            row += matrix_shapes[name][0]
    order = row_order(module.rule.layout, len(up), config)
    if order is not None:
        up = up[np.argsort(order)]
    return LowRank(np.ascontiguousarray(down), np.ascontiguousarray(up, np.float32), scale)


def _targets(names: list[str], config: ModelConfig, prefix: str) -> list[str]:
    """Module names for target_modules: the last parts if they are unambiguous, else full names."""
    short_names = {name.rsplit(".", 1)[-1] for name in names}
    all_modules = [module.name.replace("{p}", prefix) for module in _modules(config)]
    matching = [name for name in all_modules if name.rsplit(".", 1)[-1] in short_names]
    return sorted(short_names) if matching == names else names


def _commonest(values: Any) -> Any:
    items = list(values)
    return max(set(items), key=items.count)


def _number(value: float) -> float | int:
    rounded = round(value, 9)
    return int(rounded) if rounded == int(rounded) else rounded
