"""Write GGUF files for llama.cpp: settings, vocabulary and weights.

    save_gguf(model, "model.gguf", type="Q8_0", vocabulary=metadata, name="my model")

Names, keys and types follow llama.cpp's converter. The `gguf` package quantizes one tensor at a
time, so a large model needs no second copy in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unspool.errors import ModelFileError, SettingsError
from unspool.model.config import ModelConfig
from unspool.model.config_gguf import rules_for_gguf
from unspool.model.families import FAMILIES
from unspool.model.gguf_recurrent import (
    check_recurrent,
    kv_heads_per_layer,
    permute_for_gguf,
    write_recurrent_settings,
)
from unspool.model.positions import Rotary
from unspool.model.tensor_mapping import write_weights
from unspool.model.weights import parameter_count

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from torch import Tensor

    from unspool.model.transformer import Transformer

# general.file_type of each type.
TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7}
WRITABLE = (
    "llama", "mistral", "qwen2", "qwen3", "dream", "llada",
    "lfm2", "lfm2-moe", "qwen3.5", "qwen3.5-moe", "qwen3-next",
)  # fmt: skip
# Kept in 8 bits: 4 bits would lose too much. llama.cpp's quantizer does the same.
_HEADS = ("token_embd.weight", "output.weight")
# Convolution weights; llama.cpp computes with these and with routers in float32.
_TAPS = ("ssm_conv1d.weight", "shortconv.conv.weight")
_EXACT = (*_TAPS, "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")


def save_gguf(
    model: Transformer,
    path: str | Path,
    *,
    type: str = "Q8_0",
    vocabulary: Mapping[str, Any],
    name: str = "",
    on_tensor: Callable[[int], object] = lambda done: None,
) -> None:
    """Write a GGUF file. It gets its name when it is complete.

    Args:
        type: F32, F16, Q4_0, Q4_1 or Q8_0.
        vocabulary: The tokenizer's metadata.
        told: Called after each tensor with the number written.
    """
    from gguf import GGUFWriter

    check_writable(model.config, type)
    path = Path(path)
    partial_path = path.with_name(f"{path.name}.part")
    weights = permute_for_gguf(model.config, model.state_dict())
    named = write_weights(model.config, rules_for_gguf(model.config), weights)
    extra = _rotation_factors(model.config)
    arrays = {**extra, **{key: _array(key, tensor) for key, tensor in named.items()}}
    kinds = {key: _tensor_type(key, array, type) for key, array in arrays.items()}
    writer = GGUFWriter(partial_path, FAMILIES[model.config.family].gguf)
    try:
        _describe(writer, model.config, type, name or path.stem)
        for key, value in vocabulary.items():
            _add(writer, key, value)
        for key, array in arrays.items():
            _announce(writer, key, array, kinds[key])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for number, (key, array) in enumerate(arrays.items(), 1):
            writer.write_tensor_data(_packed(array, kinds[key]))
            on_tensor(number)
        writer.flush()
        for file in writer.fout or ():
            os.fsync(file.fileno())
        writer.close()
        partial_path.replace(path)
    except BaseException:
        writer.close()
        partial_path.unlink(missing_ok=True)
        raise


def check_writable(config: ModelConfig, type: str) -> None:
    """Raise if the model cannot be written as a GGUF file that llama.cpp runs."""
    if type not in TYPES:
        raise SettingsError(f"type must be one of {', '.join(TYPES)}, got {type!r}")
    if config.family not in WRITABLE:
        raise ModelFileError(
            f"a {config.family} model cannot be written as GGUF yet; {', '.join(WRITABLE)} can "
            "(a folder for transformers can be written of every family)"
        )
    check_recurrent(config)
    if config.windows:
        raise ModelFileError(
            "this model has sliding-window attention, which llama.cpp does not support for "
            f"{config.family}"
        )
    if config.sight == "block":
        raise ModelFileError(
            "this model has a block attention mask, which llama.cpp does not support; write a "
            "safetensors folder instead"
        )
    if config.rotary is not None and config.rotary.scaling == "dynamic":
        raise ModelFileError("llama.cpp does not support the RoPE scaling 'dynamic'")


# -- settings -------------------------------------------------------------------------------


def _describe(writer: GGUFWriter, config: ModelConfig, type: str, name: str) -> None:
    from gguf import GGML_QUANT_VERSION, size_label

    count = parameter_count(config)
    writer.add_type("model")
    writer.add_name(name)
    writer.add_size_label(size_label(count, count, 0, 0))
    writer.add_block_count(config.layers)
    writer.add_context_length(config.context)
    writer.add_embedding_length(config.width)
    writer.add_feed_forward_length(config.ff_width)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(kv_heads_per_layer(config))
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_key_length(config.head_width)
    writer.add_value_length(config.head_width)
    if config.rotary is not None:
        _describe_rotation(writer, config.rotary)
    if config.sight == "whole":
        writer.add_causal_attention(False)
        writer.add_diffusion_shift_logits(config.shifted)
        if config.mask_id is not None:
            writer.add_mask_token_id(config.mask_id)
    write_recurrent_settings(writer, config)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(TYPES[type])
    writer.add_quantization_version(GGML_QUANT_VERSION)


def _describe_rotation(writer: GGUFWriter, rotary: Rotary) -> None:
    from gguf import RopeScalingType

    writer.add_rope_dimension_count(rotary.width)
    writer.add_rope_freq_base(rotary.base)
    if rotary.scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rotary.scaling))
        writer.add_rope_scaling_factor(rotary.factor)
    if rotary.scaling == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rotary.original_context)
        writer.add_rope_scaling_yarn_beta_fast(rotary.beta_fast)
        writer.add_rope_scaling_yarn_beta_slow(rotary.beta_slow)
        default_factor = 1.0 if rotary.factor <= 1 else 0.1 * float(np.log(rotary.factor)) + 1.0
        if abs(rotary.attention_factor - default_factor) > 1e-6:
            writer.add_rope_scaling_attn_factors(rotary.attention_factor / default_factor)


def _rotation_factors(config: ModelConfig) -> dict[str, np.ndarray[Any, Any]]:
    """The tensor of RoPE factors of Llama 3 (and of LongRoPE with one set of factors)."""
    rotary = config.rotary
    if rotary is None or rotary.scaling not in ("llama3", "longrope"):
        return {}
    if rotary.scaling == "longrope" and rotary.short_factors != rotary.long_factors:
        raise ModelFileError(
            f"a {config.family} model with two sets of rotary factors cannot be written as GGUF"
        )
    pairs = np.arange(rotary.width // 2)
    plain = rotary.base ** (-pairs * 2.0 / rotary.width)
    return {"rope_freqs.weight": (plain / rotary.frequencies(1)).astype(np.float32)}


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else value)


# -- tensors --------------------------------------------------------------------------------


def _array(name: str, tensor: Tensor) -> np.ndarray[Any, Any]:
    """A tensor as float32; convolution weights have one axis less in llama.cpp."""
    if name.endswith(_TAPS):
        tensor = tensor.squeeze(1)
    numbers: np.ndarray[Any, Any] = tensor.float().cpu().numpy()
    return numbers


def _tensor_type(name: str, array: np.ndarray[Any, Any], type: str) -> str:
    if array.ndim == 1 or name.endswith(_EXACT):
        return "F32"
    if type in ("F32", "F16"):
        return type
    if array.shape[-1] % 32:
        return "F16"  # rows are not a multiple of the block size
    return "Q8_0" if name in _HEADS else type


def _announce(writer: GGUFWriter, name: str, array: np.ndarray[Any, Any], type: str) -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    kind = GGMLQuantizationType[type]
    elements, size = GGML_QUANT_SIZES[kind]
    packed_size = array.size // elements * size
    writer.add_tensor_info(name, array.shape, array.dtype, packed_size, raw_dtype=kind)


def _packed(array: np.ndarray[Any, Any], type: str) -> np.ndarray[Any, Any]:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    packed: np.ndarray[Any, Any] = quantize(array, GGMLQuantizationType[type])
    return packed
