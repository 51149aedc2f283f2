"""LoRA adapters: what is added to some matrices of a model, read from and written to PEFT's files.

    adapter = read_adapter(Path("folder"), config)
    adapter.parts["layers.0.attention.q.weight"]      # LowRank: down [r, in], up [out, r], scale
    write_adapter(adapter, Path("folder"), config)    # a folder that `peft` loads

A matrix W with an adapter is W + scale * up @ down. PEFT calls these B and A, and names modules as
transformers does; where a family's file holds several of our matrices in one, so does its adapter.
"""

from __future__ import annotations

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
from unspool.model.checkpoint import prefixes_for_hf, rules_for_hf
from unspool.model.config import ModelConfig
from unspool.model.config_hf import read_json
from unspool.model.safetensors_file import SafetensorsFile
from unspool.model.weights import Rule, row_order, shapes

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
TWIN = "twin.json"  # beside an adapter that fills a canvas: how
Floats = npt.NDArray[np.float32]

_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.default)?\.weight")
# What PEFT can do besides, and what it is when it does not.
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
    """What is added to one matrix: scale * up @ down."""

    down: Floats  # [rank, columns]
    up: Floats  # [rows, rank]
    scale: float

    @property
    def rank(self) -> int:
        return len(self.down)

    def delta(self) -> Floats:
        return np.asarray(self.up @ self.down * np.float32(self.scale), np.float32)


@dataclass(frozen=True, slots=True)
class Twin:
    """How an adapter fills places behind the text of the causal model that it belongs to."""

    mask_id: int
    block: int  # places that are filled before the next
    shifted: bool  # a vector guesses the token behind its own place


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """All that one adapter adds, by our names of the matrices."""

    parts: Mapping[str, LowRank]
    base: str = ""  # the model it was trained on, as its file calls it
    twin: Twin | None = None  # how it fills a canvas, if it was trained to

    @property
    def nbytes(self) -> int:
        return sum(part.down.nbytes + part.up.nbytes for part in self.parts.values())


@dataclass(frozen=True, slots=True)
class _Module:
    """One module of transformers' model, and the matrices of ours that it holds."""

    name: str  # without the prefix
    ours: tuple[str, ...]
    rule: Rule


def adaptable(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The matrices that an adapter may add to, with their shapes: those of a layer but of experts,
    and the head where it is not the table of tokens as well."""
    return {
        name: (shape[0], shape[1])
        for name, shape in shapes(config).items()
        if len(shape) == 2
        and (name.startswith("layers.") or name == "head.weight")
        and ".router." not in name
    }


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


def base_of(folder: Path) -> str:
    """The model that an adapter belongs to, as its file calls it; "" if it does not say."""
    if not is_adapter(folder):
        raise ModelFileError(f"{folder}: has no {CONFIG}, so it is no adapter")
    return _base_name(folder, read_json(folder / CONFIG))


def _base_name(folder: Path, settings: dict[str, Any]) -> str:
    name = settings.get("base_model_name_or_path")
    if not isinstance(name, str | None):
        raise ModelFileError(
            f"{folder / CONFIG}: base_model_name_or_path must be a string, got {name!r}"
        )
    return name or ""


def read_adapter(folder: Path, config: ModelConfig) -> Adapter:
    """The adapter in a folder, for a model of this config."""
    if not is_adapter(folder):
        raise ModelFileError(f"{folder}: has no {CONFIG}, so it is no adapter")
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
                f"{folder}: it adapts {name}, which Unspool cannot; adapters may add to the "
                f"matrices of attention and feed-forward of a {config.family} model"
            )
        scale = _scale(settings, name, len(down))
        parts.update(_split(folder, modules[name], down, up, scale, config))
    base = _base_name(folder, settings)
    return Adapter(parts, base, _twin(folder, config))


def _twin(folder: Path, config: ModelConfig) -> Twin | None:
    """What is noted beside an adapter that fills a canvas."""
    if not (folder / TWIN).is_file():
        return None
    told = read_json(folder / TWIN)
    mask, block = told.get("mask_id"), told.get("block")
    known = isinstance(mask, int) and 0 <= mask < config.vocab_size
    if not known or not isinstance(block, int) or not 0 <= block <= config.context:
        raise ModelFileError(
            f"{folder / TWIN}: mask_id is {mask!r} and block {block!r}; they must be a token of "
            "the model and a number of tokens"
        )
    return Twin(int(mask or 0), block, told.get("shifted") is True)


def write_adapter(
    adapter: Adapter, folder: Path, config: ModelConfig, *, dropout: float = 0.0
) -> None:
    """A folder that PEFT and `read_adapter` load."""
    from safetensors.numpy import save_file

    prefix = prefixes_for_hf(config)[0]
    tensors: dict[str, Floats] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for module in _modules(config):
        if not any(name in adapter.parts for name in module.ours):
            continue
        joined = _join(module, adapter, config)
        name = module.name.replace("{p}", prefix)
        tensors[f"base_model.model.{name}.lora_A.weight"] = joined.down
        tensors[f"base_model.model.{name}.lora_B.weight"] = joined.up
        ranks[name], alphas[name] = joined.rank, joined.rank * joined.scale
    if not tensors:
        raise ModelFileError("the adapter adds to no matrix of this model")
    rank, alpha = _commonest(ranks.values()), _commonest(alphas.values())
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base or None,
        "r": int(rank),
        "lora_alpha": _number(alpha),
        "lora_dropout": dropout,
        "target_modules": _targets(list(ranks), config, prefix),
        "rank_pattern": {name: found for name, found in ranks.items() if found != rank},
        "alpha_pattern": {n: _number(found) for n, found in alphas.items() if found != alpha},
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
    """A and B of each module, by its name."""
    file = SafetensorsFile(folder / WEIGHTS)
    found: dict[str, dict[str, Floats]] = {}
    for name in file.tensors:
        if name.endswith(".base_layer.weight"):
            continue  # PEFT adds the model's own head where that is adapted
        named = _NAME.fullmatch(name)
        if named is None:
            raise ModelFileError(f"{folder}: tensor {name} is none of LoRA's matrices")
        values = np.ascontiguousarray(file.stored(name).float32(), np.float32)
        if values.ndim != 2 or not np.isfinite(values).all():
            raise ModelFileError(f"{folder}: tensor {name} is no matrix of finite numbers")
        found.setdefault(named[1], {})[named[2]] = values
    lonely = [name for name, pair in found.items() if len(pair) < 2]
    if lonely:
        raise ModelFileError(f"{folder}: of {lonely[0]} only one of lora_A and lora_B is there")
    if not found:
        raise ModelFileError(f"{folder}: {WEIGHTS} is empty")
    return {name: (pair["A"], pair["B"]) for name, pair in found.items()}


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


def _pattern(table: Any, name: str, usual: Any) -> Any:
    """What a table of PEFT's says of a module: its keys are the ends of names."""
    for end, value in table.items() if isinstance(table, dict) else ():
        try:
            if re.fullmatch(rf"(.*\.)?({str(end).removeprefix('^')})", name):
                return value
        except re.error:
            continue
    return usual


def _modules(config: ModelConfig) -> Iterator[_Module]:
    """The modules that hold adaptable matrices, in the order of the layers."""
    wanted, done = adaptable(config), set[str]()
    for name in wanted:
        if name in done:
            continue
        layer = name.split(".")[1] if name.startswith("layers.") else ""
        for rule in rules_for_hf(config):
            ours = tuple(part.replace("{i}", layer) for part in rule.ours)
            if name in ours and wanted.keys() >= set(ours):
                done.update(ours)
                theirs = rule.theirs.replace("{i}", layer).removesuffix(".weight")
                yield _Module(theirs, ours, rule)
                break


def _their_names(module: _Module, config: ModelConfig) -> list[str]:
    return [module.name.replace("{p}", prefix) for prefix in prefixes_for_hf(config)]


def _split(
    folder: Path, module: _Module, down: Floats, up: Floats, scale: float, config: ModelConfig
) -> dict[str, LowRank]:
    """A module's part as those of our matrices, which lie below each other in it."""
    wanted = adaptable(config)
    rows = [wanted[name][0] for name in module.ours]
    columns = wanted[module.ours[0]][1]
    if down.shape[1] != columns or up.shape != (sum(rows), len(down)):
        raise ModelFileError(
            f"{folder}: what it adds to {module.name.replace('{p}', '')} is {up.shape[0]} x "
            f"{down.shape[1]}, and the model's matrix is {sum(rows)} x {columns}; it was trained "
            "on another model"
        )
    order = row_order(module.rule.layout, len(up), config)
    if order is not None:
        up = np.ascontiguousarray(up[order])
    ends = np.cumsum(rows).tolist()
    return {
        name: LowRank(down, np.ascontiguousarray(up[start:end]), scale)
        for name, start, end in zip(module.ours, [0, *ends], ends, strict=False)
    }


def _join(module: _Module, adapter: Adapter, config: ModelConfig) -> LowRank:
    """Our parts as that of the module that holds them: each has its own share of the rank."""
    wanted = adaptable(config)
    parts = [adapter.parts.get(name) for name in module.ours]
    here = [part for part in parts if part is not None]
    scale = here[0].scale
    if len({id(part.down) for part in here}) == 1 and len(here) == len(parts):
        down, up = here[0].down, np.concatenate([p.up * np.float32(p.scale / scale) for p in here])
    else:
        down = np.concatenate([part.down for part in here])
        up = np.zeros((sum(wanted[name][0] for name in module.ours), len(down)), np.float32)
        row = column = 0
        for name, part in zip(module.ours, parts, strict=True):
            if part is not None:
                place = slice(row, row + len(part.up)), slice(column, column + part.rank)
                up[place] = part.up * np.float32(part.scale / scale)
                column += part.rank
            row += wanted[name][0]
    order = row_order(module.rule.layout, len(up), config)
    if order is not None:
        up = up[np.argsort(order)]
    return LowRank(np.ascontiguousarray(down), np.ascontiguousarray(up, np.float32), scale)


def _targets(names: list[str], config: ModelConfig, prefix: str) -> list[str]:
    """The modules by their last names, if these mean no other modules; else in full."""
    short = {name.rsplit(".", 1)[-1] for name in names}
    every = [module.name.replace("{p}", prefix) for module in _modules(config)]
    meant = [name for name in every if name.rsplit(".", 1)[-1] in short]
    return sorted(short) if meant == names else names


def _commonest(values: Any) -> Any:
    several = list(values)
    return max(set(several), key=several.count)


def _number(value: float) -> float | int:
    rounded = round(value, 9)
    return int(rounded) if rounded == int(rounded) else rounded
