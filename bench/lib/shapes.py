"""Shapes of published models, and checkpoints of such shapes with random weights."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from unspool.model.config import ModelConfig
from unspool.model.files.stored import FileTensor
from unspool.model.weights import weight_shapes

_LLAMA = {
    "model_type": "llama", "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "hidden_act": "silu",
}  # fmt: skip
# As in each model's config.json, except that the smallest has an untied head: as many bytes to
# read, and texts that do not repeat one token.
_QWEN35 = {
    "model_type": "qwen3_5_text", "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "vocab_size": 248320, "head_dim": 256, "num_key_value_heads": 2, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 4, "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        **_LLAMA, "vocab_size": 128256, "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "rope_theta": 5e5,
    },
    "1b": {
        **_LLAMA, "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
        "intermediate_size": 8192, "max_position_embeddings": 32768, "rope_theta": 5e5,
        "tie_word_embeddings": True,
    },
    "0.5b": {
        **_LLAMA, "vocab_size": 151936, "hidden_size": 896, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "135m": {
        **_LLAMA, "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
        "intermediate_size": 1536, "max_position_embeddings": 8192, "rope_theta": 1e5,
    },
    "0.6b": {
        **_LLAMA, "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 3072, "max_position_embeddings": 40960,
        "rope_theta": 1e6, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
    },
    "qwen3.5-0.8b": {
        **_QWEN35, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 8,
        "intermediate_size": 3584, "linear_num_value_heads": 16, "tie_word_embeddings": True,
    },
    "qwen3.5-9b": {
        **_QWEN35, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 16,
        "num_key_value_heads": 4, "intermediate_size": 12288,
    },
    "qwen3.6-35b-a3b": {
        **_QWEN35, "model_type": "qwen3_5_moe_text", "hidden_size": 2048, "num_hidden_layers": 40,
        "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "intermediate_size": 512,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5, "attention_bias": True, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096, "rope_theta": 150000,
        },
    },
    "gemma4": {  # the size that transformers takes by default, with 10 of 30 layers sharing keys
        "model_type": "gemma4_text", "vocab_size": 262144, "hidden_size": 2304,
        "intermediate_size": 9216, "num_hidden_layers": 30, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512,
        "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144,
        "num_kv_shared_layers": 10, "sliding_window": 512, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "lfm2-1.2b": {
        "model_type": "lfm2", "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 12288,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "conv_L_cache": 3, "conv_bias": False, "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "norm_eps": 1e-5,
        "max_position_embeddings": 32768, "tie_word_embeddings": True,
        "rope_parameters": {"rope_theta": 1e6},
        "layer_types": [
            "full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)
        ],
    },
    "granite4-h-micro": {
        "model_type": "granitemoehybrid", "vocab_size": 100352, "hidden_size": 2048,
        "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_local_experts": 0, "num_experts_per_tok": 0, "intermediate_size": 8192,
        "shared_intermediate_size": 8192, "mamba_n_heads": 64, "mamba_d_head": 64,
        "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2,
        "mamba_conv_bias": True, "mamba_proj_bias": False, "attention_bias": False,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "position_embedding_type": "nope", "embedding_multiplier": 12,
        "residual_multiplier": 0.22, "logits_scaling": 8, "attention_multiplier": 0.015625,
        "tie_word_embeddings": True,
        "layer_types": ["attention" if layer % 10 == 5 else "mamba" for layer in range(40)],
    },
    "nemotron-nano-9b": {
        "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 4480,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 15680, "num_hidden_layers": 56, "mamba_num_heads": 128,
        "mamba_head_dim": 80, "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4,
        "use_conv_bias": True, "max_position_embeddings": 32768, "layer_norm_epsilon": 1e-5,
        "mlp_hidden_act": "relu2", "tie_word_embeddings": False,
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    },
}  # fmt: skip
LLAMA_SHAPES = tuple(name for name, shape in SHAPES.items() if "rope_theta" in shape)


def tiny_shape(name: str) -> dict[str, Any]:
    """The shape of a model with small sizes, to test a benchmark itself."""
    shape = {**SHAPES[name], "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    shape |= {"intermediate_size": 128, "max_position_embeddings": 512}
    small = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "num_experts": 4, "num_local_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32, "global_head_dim": 32,
        "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 512,
        "num_kv_shared_layers": 1, "sliding_window": 8, "shared_intermediate_size": 128,
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_num_heads": 8,
        "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "block_multiple_of": 32,
    }  # fmt: skip
    shape |= {key: value for key, value in small.items() if shape.get(key)}
    if "layer_types" in shape:
        shape["layer_types"] = [shape["layer_types"][5], *shape["layer_types"][:3]]
    if "hybrid_override_pattern" in shape:
        shape["hybrid_override_pattern"] = "M-*-"
    return shape


# -- Random weights --------------------------------------------------------------------------------

# Bytes per block, numbers per block, positions of its scales, largest stored number.
_BLOCKS = {
    "Q4_0": (18, 32, (0,), 8),
    "Q8_0": (34, 32, (0,), 128),
    "Q4_K": (144, 256, (0, 2), 15 * 63),
    "MXFP4": (17, 32, (), 6),
}
BLOCK_NUMBERS = {kind: block[1] for kind, block in _BLOCKS.items()}


def random_blocks(count: int, columns: int, kind: str) -> Any:
    """Random quantized blocks [count, bytes] whose scale keeps the size of a product's input."""
    block_bytes, _, scales, largest = _BLOCKS[kind]
    data = np.random.default_rng(count * 31 + columns).integers(
        0, 256, (count, block_bytes), dtype=np.uint8
    )
    scale = 1.7 / largest / columns**0.5
    for offset, value in zip(scales, (scale, scale * 7.5), strict=False):  # second: the minimum
        data[:, offset : offset + 2] = np.frombuffer(np.float16(value).tobytes(), np.uint8)
    if kind == "MXFP4":
        data[:, 0] = 127 + round(np.log2(scale))
    return data


_SHIFT = 16  # rows of a random matrix are windows into one array, this many units apart


@dataclass(frozen=True)
class RandomCheckpoint:
    """A checkpoint whose matrices are made while they are read: neither disk nor memory is needed.

    `packed`: quantization of all matrices that it fits; otherwise bfloat16.
    """

    config: ModelConfig
    packed: str = ""
    path: Path = Path("random")
    losses: str = ""

    def weights(self) -> Iterator[tuple[str, FileTensor]]:
        for name, shape in weight_shapes(self.config).items():
            yield name, self.tensor(name, shape)

    def bits_per_weight(self) -> float:
        if not self.packed:
            return 16.0
        block_bytes, numbers, *_ = _BLOCKS[self.packed]
        return 8 * block_bytes / numbers

    def tensor(self, name: str, shape: tuple[int, ...]) -> FileTensor:
        return self._vector(name, shape) if len(shape) == 1 else self._matrix(name, shape)

    def _vector(self, name: str, shape: tuple[int, ...]) -> FileTensor:
        is_gain = name.endswith("norm.weight") or name.endswith(("norm_weight", "scale"))
        mean = 1.0 if is_gain and not self.config.norm_plus_one else 0.0
        noise = np.random.default_rng(len(name)).standard_normal(shape)
        return FileTensor.from_float32((mean + 0.1 * noise).astype(np.float32))

    def _matrix(self, name: str, shape: tuple[int, ...]) -> FileTensor:
        columns, rows = shape[-1], int(np.prod(shape[:-1]))
        is_table = name.endswith("embed.weight")
        numbers = _BLOCKS[self.packed][1] if self.packed else 1
        if self.packed and columns % numbers == 0 and "conv." not in name:
            units = columns // numbers
            data = random_blocks(units + rows, columns, self.packed)
            size = data.shape[1]
            view = as_strided(data, (rows, units * size), (size, 1))
            return FileTensor(self.packed, view.reshape(*shape[:-1], -1), shape)
        noise = np.random.default_rng(rows).standard_normal(columns + rows * _SHIFT, np.float32)
        scale = 4 / columns**0.5 if is_table or name == "head.weight" else columns**-0.5
        if is_table and not self.config.tied:
            scale = 1.0
        bits = ((noise * np.float32(scale)).view(np.uint32) >> 16).astype(np.uint16)
        view = as_strided(bits, (rows, columns), (2 * _SHIFT, 2))
        return FileTensor("BF16", view.reshape(shape), shape)


@dataclass(frozen=True)
class RandomMtp:
    """Random weights of an MTP layer with this config."""

    config: ModelConfig

    def weights(self) -> Iterator[tuple[str, FileTensor]]:
        import torch

        from unspool.model.layers.mtp import MtpLayer

        with torch.device("meta"):
            layer = MtpLayer(self.config)
        for name, weight in layer.state_dict().items():
            yield name, RandomCheckpoint(self.config).tensor(name, tuple(weight.shape))
