"""Inspect a model without loading it: a summary from file headers, and the memory it needs."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unspool.errors import ModelFileError, SettingsError
from unspool.model.config import ModelConfig
from unspool.model.files.sharding import (
    TensorParallelRank,
    build_device_map,
    reason_not_splittable,
    shard_of,
)
from unspool.model.hub.memory import (
    FILE_TYPES,
    is_readable,
    kind_in_name,
    kv_budget_with_kernels,
    kv_budget_with_torch,
    memory_needed,
    sequence_memory,
)
from unspool.model.weights import weight_shapes

# -- Summarize a model on this machine from the headers of its files, without reading weights
#
# summary = glance(Path("model.gguf"))
# summary.kind, summary.needs     # 'Q4_K_M', approximate bytes of memory to run it
# summary.problem                 # '', or why it cannot be opened

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """Facts about a model that is not opened."""

    bytes: int
    kind: str | None = None  # quantization kind of a GGUF file, dtype of safetensors
    kv_bytes: int = 0  # KV cache bytes per token
    context: int = 0
    problem: str = ""
    state_bytes: int = 0  # of a recurrent state

    @property
    def required_bytes(self) -> int:
        """Approximate bytes of memory to run it."""
        text = sequence_memory(self.kv_bytes, self.context, self.state_bytes)
        return memory_needed(self.bytes, self.kind, text)


def summarize_model(path: Path, kind: str | None = None) -> ModelSummary:
    """Summarize a GGUF file or a safetensors folder; `kind` is used if the file has none."""
    from unspool.model.files.gguf import part_paths

    try:
        is_file = path.is_file()
        files = part_paths(path) if is_file else sorted(path.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
    except OSError as error:
        return ModelSummary(
            0, kind, problem=f"{Path(error.filename).name} is missing or cannot be read"
        )
    try:
        if is_file:
            return _gguf(path, size, kind)
        if not files:
            return ModelSummary(0, problem="there are no safetensors in it")
        return _folder(path, size)
    except (ModelFileError, OSError) as error:
        return ModelSummary(size, kind, problem=str(error).removeprefix(f"{path}: "))
    except (ValueError, TypeError, KeyError, struct.error) as error:
        return ModelSummary(size, kind, problem=f"invalid settings ({error})")


def _gguf(path: Path, size: int, kind: str | None) -> ModelSummary:
    from unspool.model.families.registry import family_of_gguf
    from unspool.model.files.gguf import GGUFFile

    metadata = GGUFFile(path, glance=True).metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelFileError("no general.architecture in its metadata")

    def number(key: str, default: int = 0) -> int:
        value = metadata.get(f"{architecture}.{key}", default)
        if not isinstance(value, int):
            raise ModelFileError(f"its {key} is not a number")
        return value

    def of_all_layers(key: str, default: int) -> float:
        """The sum over all layers."""
        values = metadata.get(f"{architecture}.{key}", default)
        return float(np.mean(values)) * number("block_count")

    file_kind = FILE_TYPES.get(metadata.get("general.file_type", -1))
    kind = file_kind or kind or kind_in_name(path.name)
    family_of_gguf(architecture, number("expert_count"))
    if not is_readable(kind):
        raise ModelFileError(f"its weights are packed as {kind}, which is not supported")
    layers = max(1, number("block_count"))
    heads = round(of_all_layers("attention.head_count", 1) / layers)
    head_width = number("attention.key_length", number("embedding_length") // max(1, heads))
    kv_heads = of_all_layers("attention.head_count_kv", heads)
    kv_share = 1 - number("attention.shared_kv_layers") / layers
    kv_bytes, state_bytes = round(4 * kv_heads * head_width * kv_share), 0
    if number("ssm.inner_size"):  # most layers have a recurrent state instead of keys and values
        recurrent = _without_keys(metadata, architecture)
        if not recurrent:  # no settings per layer
            interval = max(1, number("full_attention_interval", 4))
            kv_bytes //= interval
            recurrent = layers - layers // interval
        inner, wide = number("ssm.inner_size"), number("ssm.state_size")
        conv_channels = inner + 2 * number("ssm.group_count") * wide
        floats = inner * wide + (number("ssm.conv_kernel", 1) - 1) * conv_channels
        state_bytes = 4 * recurrent * floats
    context = number("context_length")
    if architecture == "phi3":  # the only one with LongRoPE; see ModelConfig.default_context
        context = number("rope.scaling.original_context_length", context) or context
    return ModelSummary(size, kind, kv_bytes, context, state_bytes=state_bytes)


def _without_keys(metadata: dict[str, Any], architecture: str) -> int:
    """Number of recurrent layers, if the metadata has KV heads per layer: those without KV heads
    that are not feed-forward only."""
    heads = np.atleast_1d(metadata.get(f"{architecture}.attention.head_count_kv", 1))
    widths = np.atleast_1d(metadata.get(f"{architecture}.feed_forward_length", 0))
    num_feed_only = np.sum(widths > 0) if len(widths) > 1 else 0
    return int(np.sum(heads == 0) - num_feed_only)


def _folder(path: Path, size: int) -> ModelSummary:
    from unspool.model.files.config_json import config_from_hf, read_json

    index = path / "model.safetensors.index.json"
    named = read_json(index).get("weight_map", {}).values() if index.exists() else ()
    for name in sorted(set(map(str, named))):
        if not (path / name).exists():
            raise ModelFileError(f"{name} is missing")
    raw = read_json(path / "config.json")
    config = config_from_hf(raw)
    kv_bytes = 2 * config.kv_floats_per_token
    context = config.default_context
    return ModelSummary(size, _kind(raw), kv_bytes, context, state_bytes=config.state_bytes)


def _kind(raw: dict[str, Any]) -> str | None:
    """Quantization or dtype of a safetensors folder."""
    text_config = raw.get("text_config")
    settings = {**raw, **text_config} if isinstance(text_config, dict) else raw
    packed, method = settings.get("quantization"), settings.get("quantization_config")
    if isinstance(packed, dict) and isinstance(packed.get("bits"), int):
        return f"MLX-{packed['bits']}"
    if isinstance(method, dict) and isinstance(method.get("quant_method"), str):
        return str(method["quant_method"]).upper()
    return _DTYPES.get(str(settings.get("dtype") or settings.get("torch_dtype")))


PROCESS = 1_000_000_000  # bytes of GPU memory of an idle process
_NUMBER = 2  # bytes


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """One way to place a model on GPUs. Sizes are those of the fullest GPU."""

    how: str
    gpus: int
    options: str  # command line options
    weights: int = 0  # bytes on a GPU
    token: int = 0  # KV cache bytes per token and GPU
    state: int = 0  # bytes of a sequence's recurrent state per GPU
    tokens: int = 0  # capacity of the KV cache; 0: the weights leave no room
    problem: str = ""  # why it is impossible

    def texts(self, context: int) -> int:
        """Number of sequences of `context` tokens that fit."""
        return self.tokens // context if context else 0


def plan_memory(config: ModelConfig, *, gpus: int, memory: int, packed: int) -> list[MemoryPlan]:
    """The ways to place a model on `gpus` GPUs with `memory` bytes each. `packed`: bytes of its
    weights on one GPU."""
    options = [_on_one(config, memory, packed)]
    if gpus > 1:
        options += [_by_layers(config, gpus, memory), _split(config, gpus, memory)]
    return options


def _on_one(config: ModelConfig, memory: int, packed: int) -> MemoryPlan:
    token = _NUMBER * config.kv_floats_per_token
    room = kv_budget_with_kernels(max(0, memory - PROCESS - packed))
    tokens = _tokens(room, token, config.state_bytes)
    return MemoryPlan("one GPU", 1, "--device cuda", packed, token, config.state_bytes, tokens)


def _by_layers(config: ModelConfig, gpus: int, memory: int) -> MemoryPlan:
    how, options = f"layers over {gpus} GPUs", "--devices auto"
    try:
        places = build_device_map(config, [str(number) for number in range(gpus)])
    except SettingsError as error:
        return MemoryPlan(how, gpus, options, problem=str(error))
    weights, token, state = ([0] * gpus for _ in range(3))
    for name, shape in weight_shapes(config).items():
        weights[int(places.device_of(name))] += _NUMBER * math.prod(shape)
    for layer, place in enumerate(map(int, places.layers)):
        if layer in config.kv_layers:
            token[place] += _NUMBER * 2 * config.shape(layer).kv_width
        state[place] += 4 * config.state_floats(layer)
    rooms = (
        kv_budget_with_torch(max(0, memory - PROCESS - weight_bytes)) for weight_bytes in weights
    )
    tokens = min(_tokens(*device) for device in zip(rooms, token, state, strict=True))
    return MemoryPlan(how, gpus, options, max(weights), max(token), max(state), tokens)


def _split(config: ModelConfig, gpus: int, memory: int) -> MemoryPlan:
    how, options = f"split over {gpus} GPUs", f"--tensor-parallel {gpus}"
    if reason := reason_not_splittable(config, gpus):
        return MemoryPlan(how, gpus, options, problem=f"cannot be: {reason}")
    share = TensorParallelRank(0, gpus)
    weights = 0
    for name, shape in weight_shapes(config).items():
        cut = shard_of(config, name, share)
        part = math.prod(shape) if cut is None else math.prod(shape) // shape[cut.axis]
        weights += _NUMBER * part * (1 if cut is None else len(cut.indices))
    token = sum(
        _NUMBER * 2 * len(share.local_kv_heads(config.shape(layer).kv_heads))
        * config.shape(layer).head_width
        for layer in config.kv_layers
    )  # fmt: skip
    state = config.state_bytes // (gpus if "delta" in config.mixers else 1)
    room = kv_budget_with_torch(max(0, memory - PROCESS - weights))
    return MemoryPlan(how, gpus, options, weights, token, state, _tokens(room, token, state))


def _tokens(room: int, token: int, state: int) -> int:
    """Tokens that fit into `room` bytes; recurrent states take half of it if there are any."""
    return (room // 2 if state else room) // max(1, token)
