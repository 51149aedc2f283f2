"""Write models: GGUF for llama.cpp, and quantized folders in MLX's format."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from unspool.errors import ModelFileError, SettingsError
from unspool.model.config import ModelConfig, Recurrence, Rotary
from unspool.model.families.registry import FAMILIES
from unspool.model.files.config_gguf import rules_for_gguf
from unspool.model.files.family_settings import CONVOLUTIONS, DELTAS
from unspool.model.files.tensor_mapping import write_weights
from unspool.model.weights import parameter_count

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from torch import Tensor

    from unspool.model.layers.transformer import Transformer


# -- GGUF metadata of recurrent layers and of experts, as llama.cpp's converter writes it
#
# llama.cpp derives which layers are recurrent: in LFM2 those without KV heads, in Qwen all but
# every n-th. A model with another pattern is refused, because its file would be read as another
# model.


def check_recurrent(config: ModelConfig) -> None:
    """Raise if llama.cpp's format cannot express the model."""
    if config.family in DELTAS and not _interval(config):
        raise ModelFileError(
            "llama.cpp needs attention in every n-th layer of such a model and recurrence in all "
            f"others; the layers are {', '.join(config.mixers)}"
        )
    recurrence = config.recurrence
    if recurrence is not None and recurrence.key_width != recurrence.value_width:
        raise ModelFileError(
            "llama.cpp needs keys and values of a recurrent head of equal width, got "
            f"{recurrence.key_width} and {recurrence.value_width}"
        )
    if config.experts and config.family in (*CONVOLUTIONS, *DELTAS):
        leading_layers = tuple(
            range(len(config.dense_layers) if config.family in CONVOLUTIONS else 0)
        )
        if config.dense_layers != leading_layers or not config.normalize_experts:
            raise ModelFileError(
                f"llama.cpp needs experts in all layers of a {config.family} model (LFM2: except "
                "the first ones) with weights that sum to one; this model differs"
            )


def _interval(config: ModelConfig) -> int:
    """The n of "every n-th layer has attention"; 0: there is none."""
    for interval in range(1, config.layers + 1):
        kinds = (
            "delta" if (layer + 1) % interval else "attention" for layer in range(config.layers)
        )
        if tuple(kinds) == config.mixers:
            return interval
    # A model with fewer than n layers is recurrent in all of them.
    return 0 if "attention" in config.mixers else config.layers + 1


def write_recurrent_settings(writer: GGUFWriter, config: ModelConfig) -> None:
    """Write the settings of recurrent layers and of experts; nothing for other families."""
    recurrence = config.recurrence
    if recurrence is None:
        return
    if config.family in CONVOLUTIONS:
        writer.add_shortconv_l_cache(recurrence.conv_kernel)
    else:
        writer.add_ssm_conv_kernel(recurrence.conv_kernel)
        writer.add_ssm_state_size(recurrence.key_width)
        writer.add_ssm_group_count(recurrence.key_heads)
        writer.add_ssm_time_step_rank(recurrence.value_heads)
        writer.add_ssm_inner_size(recurrence.value_dim)
        writer.add_full_attention_interval(_interval(config))
        if config.family != "qwen3-next" and config.rotary is not None:
            # M-RoPE: sections of pairs for time, height and width; for text all three are the
            # position.
            pairs = config.rotary.width // 2
            writer.add_rope_dimension_sections([-(-(pairs - n) // 3) for n in range(3)] + [0])
    if config.experts:
        _describe_experts(writer, config)


def _describe_experts(writer: GGUFWriter, config: ModelConfig) -> None:
    from gguf import ExpertGatingFuncType

    writer.add_expert_count(config.experts)
    writer.add_expert_used_count(config.experts_per_token)
    writer.add_expert_feed_forward_length(config.expert_width)
    if config.shared_width:
        writer.add_expert_shared_feed_forward_length(config.shared_width)
    if config.family in CONVOLUTIONS:
        writer.add_leading_dense_block_count(len(config.dense_layers))
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        if config.experts_scale != 1:
            writer.add_expert_weights_scale(config.experts_scale)


def kv_heads_per_layer(config: ModelConfig) -> int | list[int]:
    """The number of KV heads; per layer in LFM2, where 0 marks recurrent layers."""
    if config.family not in CONVOLUTIONS:
        return config.kv_heads
    return [
        config.kv_heads if config.mixer(layer) == "attention" else 0
        for layer in range(config.layers)
    ]


def permute_for_gguf(config: ModelConfig, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Permute Qwen3.5's value heads to the order of GGUF files: those that share a key head are
    `key_heads` apart instead of adjacent."""
    recurrence = config.recurrence
    if recurrence is None or config.family not in ("qwen3.5", "qwen3.5-moe") or recurrence.tiled:
        return weights
    return {name: _reordered(name, weight, recurrence) for name, weight in weights.items()}


def _reordered(name: str, weight: Tensor, recurrence: Recurrence) -> Tensor:
    import torch

    _, _, part = name.partition(".mixer.")
    heads = torch.arange(recurrence.value_heads).view(recurrence.key_heads, -1).t().reshape(-1)
    value_rows = (
        torch.arange(recurrence.value_dim).view(recurrence.value_heads, -1)[heads].reshape(-1)
    )
    channels = torch.cat(
        (torch.arange(2 * recurrence.key_dim), 2 * recurrence.key_dim + value_rows)
    )
    if part in ("b.weight", "a.weight", "a_log", "dt_bias"):
        return weight[heads]
    if part == "z.weight":
        return weight[value_rows]
    if part == "out.weight":
        return weight[:, value_rows]
    if part == "qkv.weight":
        return weight[channels]
    return weight[:, channels] if part == "conv.weight" else weight


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


GROUP = 32
Floats = npt.NDArray[np.float32]


def quantize_folder(folder: Path, bits: int) -> None:
    """Quantize the float32 safetensors of a folder in place."""
    from safetensors.numpy import load_file, save_file

    file_of: dict[str, str] = {}
    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        tensors: dict[str, npt.NDArray[Any]] = {}
        for name, numbers in load_file(file).items():
            if name.endswith(".weight") and numbers.ndim == 2 and numbers.shape[1] % GROUP == 0:
                at = name.removesuffix(".weight")
                words, scales, minima = quantized(numbers, bits)
                tensors |= {name: words, f"{at}.scales": scales, f"{at}.biases": minima}
            else:
                tensors[name] = numbers.astype(np.float16)
        part = file.with_name(f"{file.name}.part")
        save_file(tensors, part, metadata={"format": "mlx"})
        part.replace(file)
        file_of.update(dict.fromkeys(tensors, file.name))
        total += sum(array.nbytes for array in tensors.values())
    index = folder / "model.safetensors.index.json"
    if index.exists():
        index_content = {"metadata": {"total_size": total}, "weight_map": file_of}
        index.write_text(json.dumps(index_content, indent=2), encoding="utf-8")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization"] = {"group_size": GROUP, "bits": bits, "mode": "affine"}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def quantized(
    matrix: Floats, bits: int
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.float16], npt.NDArray[np.float16]]:
    """Packed 32-bit words (the first number in the lowest bits), float16 scales and minima."""
    rows = len(matrix)
    groups = matrix.reshape(rows, -1, GROUP)
    minima = groups.min(-1).astype(np.float16)
    spread = groups.max(-1) - minima.astype(np.float32)
    scales = np.maximum(spread / (2**bits - 1), 1e-7).astype(np.float16)
    offsets = groups - minima.astype(np.float32)[..., None]
    numbers = np.rint(offsets / scales.astype(np.float32)[..., None]).clip(0, 2**bits - 1)
    packed_groups = numbers.reshape(rows, -1, 32 // bits).astype(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return np.bitwise_or.reduce(packed_groups << shifts, -1), scales, minima
