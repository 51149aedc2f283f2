"""What a model on this machine is, from the first bytes of its files: no weights are read.

seen = glance(Path("model.gguf"))
seen.kind, seen.needs     # 'Q4_K_M', and about how many bytes of memory it takes to run
seen.problem              # '' or, in words, why it cannot be opened here
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unspool.errors import ModelFileError
from unspool.model.kinds import FILE_TYPES, is_readable, kind_in_name
from unspool.model.memory import memory_needed, memory_of_text

_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class Glance:
    """What can be told of a model before it is opened."""

    bytes: int
    kind: str | None = None  # of a GGUF file; of safetensors the numbers' type
    kv_bytes: int = 0  # that a token leaves in keys and values
    context: int = 0
    problem: str = ""
    state_bytes: int = 0  # of one recurrent state of a text

    @property
    def needs(self) -> int:
        """About how much memory it takes to run."""
        text = memory_of_text(self.kv_bytes, self.context, self.state_bytes)
        return memory_needed(self.bytes, self.kind, text)


def glance(path: Path, kind: str | None = None) -> Glance:
    """Look at a GGUF file or a folder of safetensors; `kind` is what others say it is."""
    from unspool.model.gguf import part_paths

    try:
        is_file = path.is_file()
        files = part_paths(path) if is_file else sorted(path.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
    except OSError as error:
        return Glance(0, kind, problem=f"{Path(error.filename).name} is missing or cannot be read")
    try:
        if is_file:
            return _gguf(path, size, kind)
        if not files:
            return Glance(0, problem="there are no safetensors in it")
        return _folder(path, size)
    except (ModelFileError, OSError) as error:
        return Glance(size, kind, problem=str(error).removeprefix(f"{path}: "))
    except (ValueError, TypeError, KeyError, struct.error) as error:
        return Glance(size, kind, problem=f"its settings cannot be used ({error})")


def _gguf(path: Path, size: int, kind: str | None) -> Glance:
    from unspool.model.families import family_of_gguf
    from unspool.model.gguf import GGUFFile

    metadata = GGUFFile(path, glance=True).metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ModelFileError("it does not say its architecture")

    def number(key: str, otherwise: int = 0) -> int:
        value = metadata.get(f"{architecture}.{key}", otherwise)
        if not isinstance(value, int):
            raise ModelFileError(f"its {key} is no number")
        return value

    def of_all_layers(key: str, otherwise: int) -> float:
        """The sum of what may differ from layer to layer."""
        values = metadata.get(f"{architecture}.{key}", otherwise)
        return float(np.mean(values)) * number("block_count")

    told = FILE_TYPES.get(metadata.get("general.file_type", -1))
    kind = told or kind or kind_in_name(path.name)
    family_of_gguf(architecture, number("expert_count"))
    if not is_readable(kind):
        raise ModelFileError(f"its weights are packed as {kind}, which is not supported")
    layers = max(1, number("block_count"))
    heads = round(of_all_layers("attention.head_count", 1) / layers)
    head_width = number("attention.key_length", number("embedding_length") // max(1, heads))
    kv_heads = of_all_layers("attention.head_count_kv", heads)
    kept = 1 - number("attention.shared_kv_layers") / layers
    kv_bytes, state_bytes = round(4 * kv_heads * head_width * kept), 0
    if number("ssm.inner_size"):  # most layers have a recurrent state instead of keys and values
        recurrent = _without_keys(metadata, architecture)
        if not recurrent:  # nothing is said of single layers
            every = max(1, number("full_attention_interval", 4))
            kv_bytes //= every
            recurrent = layers - layers // every
        inner, wide = number("ssm.inner_size"), number("ssm.state_size")
        convolved = inner + 2 * number("ssm.group_count") * wide
        floats = inner * wide + (number("ssm.conv_kernel", 1) - 1) * convolved
        state_bytes = 4 * recurrent * floats
    context = number("context_length")
    if architecture == "phi3":  # the only one with LongRoPE; see ModelConfig.default_context
        context = number("rope.scaling.original_context_length", context) or context
    return Glance(size, kind, kv_bytes, context, state_bytes=state_bytes)


def _without_keys(metadata: dict[str, Any], architecture: str) -> int:
    """How many layers have neither keys nor a feed-forward alone, where a file says it of each."""
    heads = np.atleast_1d(metadata.get(f"{architecture}.attention.head_count_kv", 1))
    widths = np.atleast_1d(metadata.get(f"{architecture}.feed_forward_length", 0))
    alone = np.sum(widths > 0) if len(widths) > 1 else 0
    return int(np.sum(heads == 0) - alone)


def _folder(path: Path, size: int) -> Glance:
    from unspool.model.config_hf import config_from_hf, read_json

    index = path / "model.safetensors.index.json"
    named = read_json(index).get("weight_map", {}).values() if index.exists() else ()
    for name in sorted(set(map(str, named))):
        if not (path / name).exists():
            raise ModelFileError(f"{name} is missing")
    raw = read_json(path / "config.json")
    config = config_from_hf(raw)
    kv_bytes = 2 * config.kv_numbers
    context = config.default_context
    return Glance(size, _kind(raw), kv_bytes, context, state_bytes=config.state_bytes)


def _kind(raw: dict[str, Any]) -> str | None:
    """How its weights are kept: quantized, or as floats of a type."""
    inner = raw.get("text_config")
    both = {**raw, **inner} if isinstance(inner, dict) else raw
    packed, method = both.get("quantization"), both.get("quantization_config")
    if isinstance(packed, dict) and isinstance(packed.get("bits"), int):
        return f"MLX-{packed['bits']}"
    if isinstance(method, dict) and isinstance(method.get("quant_method"), str):
        return str(method["quant_method"]).upper()
    return _DTYPES.get(str(both.get("dtype") or both.get("torch_dtype")))
