"""What config.json says of models with Mamba-2 layers, in the words of their makers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from unspool.errors import ModelFileError
from unspool.model.files.config_json import config_from_hf
from unspool.model.weights import parameter_count

NANO_2 = {  # nvidia/NVIDIA-Nemotron-Nano-9B-v2
    "model_type": "nemotron_h", "vocab_size": 131072, "hidden_size": 4480,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 15680, "mlp_hidden_act": "relu2", "max_position_embeddings": 131072,
    "mamba_num_heads": 128, "mamba_head_dim": 80, "n_groups": 8, "ssm_state_size": 128,
    "conv_kernel": 4, "layer_norm_epsilon": 1e-5, "time_step_limit": [0.0, math.inf],
}  # fmt: skip
NANO_3 = {  # nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B
    **NANO_2, "hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_num_heads": 64, "mamba_head_dim": 64, "intermediate_size": 1856,
    "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "routed_scaling_factor": 2.5,
}  # fmt: skip
H_TINY = {  # ibm-granite/granite-4.0-h-tiny
    "model_type": "granitemoehybrid", "vocab_size": 100352, "hidden_size": 1536,
    "num_hidden_layers": 40, "num_attention_heads": 12, "num_key_value_heads": 4,
    "intermediate_size": 512, "shared_intermediate_size": 1024, "num_local_experts": 64,
    "num_experts_per_tok": 6, "mamba_n_heads": 48, "mamba_d_state": 128, "mamba_d_head": 64,
    "position_embedding_type": "nope", "tie_word_embeddings": True, "logits_scaling": 6,
    "embedding_multiplier": 12, "residual_multiplier": 0.22, "attention_multiplier": 0.0078125,
    "layer_types": ["attention" if n in (5, 15, 25, 35) else "mamba" for n in range(40)],
    "max_position_embeddings": 131072,
}  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "billions", "mamba", "attention"),
    [(NANO_2, 8.9, 27, 4), (NANO_3, 31.6, 23, 6), (H_TINY, 6.9, 36, 4)],
)
def test_shapes_of_known_models(raw: dict[str, Any], billions: float, mamba: int, attention: int):
    config = config_from_hf(raw)
    assert parameter_count(config) == pytest.approx(billions * 1e9, rel=0.01)
    assert config.mixers.count("mamba2") == mamba and config.mixers.count("attention") == attention
    assert config.positions == "none" and config.context == 131072


def test_a_granite_without_mamba_layers():
    config = config_from_hf(
        {
            **H_TINY, "layer_types": ["attention"] * 40, "position_embedding_type": "rope",
            "num_local_experts": 0,
        }
    )  # fmt: skip
    assert config.state_bytes == 0 and config.rotary is not None
    assert config.ff_width == 1024 and config.experts == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"time_step_limit": [0.001, 0.1]}, "time_step_limit"),
        ({"hybrid_override_pattern": "M?"}, "layer"),
        ({"n_group": 4}, "n_group"),
        ({"moe_latent_size": 64}, "moe_latent_size"),
        ({"mamba_num_heads": 100}, "multiple"),
    ],
)
def test_what_is_not_supported_is_said(changes: dict[str, Any], words: str):
    with pytest.raises(ModelFileError, match=words):
        config_from_hf({**NANO_3, **changes})
