"""Every setting of transformers' configuration classes is honoured, irrelevant, or refused; and a
value of a wrong type, in any file that is read, is an error that names it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer, models
from transformers import CONFIG_MAPPING

from helpers import tiny, tiny_masked
from helpers.adapter_support import random_adapter
from helpers.tiny_gguf import write_tiny
from unspool.errors import ModelFileError, UnspoolError
from unspool.model.adapters import read_adapter, write_adapter
from unspool.model.config import sinusoidal
from unspool.model.families.causal import ALIASES
from unspool.model.families.family import Family
from unspool.model.families.registry import _ALL, family_of_model_type
from unspool.model.files.config_gguf import config_from_gguf
from unspool.model.files.config_json import config_from_hf
from unspool.model.files.gguf import GGUFFile
from unspool.model.hub.inspect import summarize_model
from unspool.model.hub.memory import PLANNED_STATES, sequence_memory
from unspool.model.weights import parameter_count
from unspool.text.tokenizer.huggingface import read_tokenizer_json

_BASE = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
# Fields that do not change the logits of a text, by the reason.
_REASONS = {
    "only training": "initializer_range initializer_cutoff_factor rescale_prenorm_residual "
    "router_aux_loss_coef router_jitter_noise time_step_min time_step_max time_step_floor "
    "sparse_prediction sparse_pred_ignore_index",
    "mamba_num_heads and mamba_head_dim say it": "expand",
    "a token's number: the tokenizer's business": "bos_token_id pad_token_id cls_token_id "
    "sep_token_id",
    "how it is computed, not what": "use_cache pretraining_tp reorder_and_upcast_attn "
    "deterministic_flash_attn use_mamba_kernels residual_in_fp32 mamba_ssm_cache_dtype "
    "mamba_chunk_size chunk_size moe_shared_expert_overlap",
    "what is returned beside the logits": "num_logits_to_keep output_router_logits",
    "of heads for other tasks than language modelling": "classifier_pooling summary_type "
    "summary_use_proj summary_activation summary_proj_to_labels",
    "of layers that draft: their tensors say it": "num_mtp_layers mtp_layer_types "
    "mtp_mlp_layer_types num_nextn_predict_layers mtp_layers_block_type",
    "the table's shape says it, and a text is of one type": "type_vocab_size",
}
IRRELEVANT = {name for names in _REASONS.values() for name in names.split()}
# The same for one kind of model only: transformers itself does not read these there.
IRRELEVANT_IN = {
    ("nemotron_h", "sliding_window"): "no layer has a window",
    ("nemotron_h", "attention_bias"): "its projections never have one",
    ("gemma3_text", "attn_logit_softcapping"): "its attention never caps scores",
    ("gpt_neox", "is_decoder"): "attention is causal in any case",
}
# Sizes without which a config.json is incomplete; transformers makes some up.
SIZES = {"vocab_size", "width", "layers", "heads", "context"}
TYPES = sorted({*(family.model_type for family in _ALL), *ALIASES} & set(CONFIG_MAPPING))
TEXT_TYPES = [name for name in TYPES if "text_config" not in CONFIG_MAPPING[name].__annotations__]


def default_of(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def fields_of(model_type: str) -> dict[str, Any]:
    """Settings of a model's own class in transformers, with what they are by default."""
    fields = dataclasses.fields(CONFIG_MAPPING[model_type])
    return {field.name: default_of(field) for field in fields if field.name not in _BASE}


@pytest.mark.parametrize("model_type", TEXT_TYPES)
def test_every_field_is_classified(model_type: str) -> None:
    family = family_of_model_type(model_type)
    unknown = [
        name
        for name in fields_of(model_type)
        if name not in family.settings
        and name not in IRRELEVANT
        and (family.model_type, name) not in IRRELEVANT_IN
        and not name.endswith(("dropout", "pdrop", "_dropout_prob"))
    ]
    assert not unknown, f"honour these, refuse them, or say why they are irrelevant: {unknown}"


@pytest.mark.parametrize("model_type", TEXT_TYPES)
def test_silence_means_what_it_means_in_transformers(model_type: str) -> None:
    family = family_of_model_type(model_type)
    reference = fields_of(model_type)
    sizes = {family.keys[name] for name in SIZES}
    differing = {
        name: (value, family.defaults.get(name))
        for name, value in reference.items()
        if name in family.settings
        and not (name in sizes and name not in family.defaults)
        and not is_same_default(family, name, value, family.defaults.get(name))
    }
    assert not differing, f"(transformers' default, ours): {differing}"


def is_same_default(family: Family, name: str, reference: Any, model: Any) -> bool:
    if name == "rope_parameters":  # the default is made by code there
        return True
    if name in ("eos_token_id", "time_step_limit", "intermediate_size"):
        return True  # nothing is made up
    expected = family.required.get(name, model)
    return (reference or None) == ((expected if model is None else model) or None)


# -- wrong types ----------------------------------------------------------------------------

WRONG: list[Any] = [
    None, "x", [], ["x"], [[]], {}, {"full_attention": 5}, 0, -1, 10**30, 1e300, math.nan, 1.5,
    True,
]  # fmt: skip


def changed(raw: dict[str, Any], keys: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same with one value after the other changed, also within objects."""
    for key in keys:
        yield from ((f"{key}: {value!r}", {**raw, key: value}) for value in WRONG)
        inner = raw.get(key)
        if isinstance(inner, dict):
            for where, other in changed(inner, inner):
                yield f"{key}, {where}", {**raw, key: other}


def plain(model_type: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    return result


_QWEN = plain("qwen3")
FAMILIES = {
    **{family.name: plain(family.model_type) for family in _ALL if family.model_type in TEXT_TYPES},
    "llada": tiny_masked.LLADA_CONFIG,
    **{t: {**_QWEN, "model_type": t, "mask_token_id": 5} for t in ("Dream", "sdar", "a2d-qwen3")},
}
OTHERS = {
    "multimodal": {"model_type": "gemma3", "text_config": plain("gemma3_text")},
    "unspool": {
        "model_type": "unspool",
        "settings": json.loads(json.dumps(config_from_hf(plain("phi3")).to_dict())),
    },
    "fp8": {**_QWEN, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}},
    "gptq": {**_QWEN, "quantization_config": {"quant_method": "gptq", "bits": 4}},
    "compressed": {
        **_QWEN,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"type": "int", "num_bits": 4}}},
        },
    },
}


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_any_value_is_read_or_refused(name: str) -> None:
    raw = {**FAMILIES, **OTHERS}[name]
    config_from_hf(raw)
    keys = {"model_type", "quantization_config", "quantization", "text_config", "settings"}
    if name in FAMILIES:
        keys |= family_of_model_type(raw["model_type"]).settings
    for where, other in changed(raw, sorted(keys)):
        try:
            config_from_hf(other)
        except UnspoolError as error:
            assert "cannot be understood as" not in str(error), f"{where} is not named: {error}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": ["llama"]}, r"model_type must be a string, got \["),
        ({"eos_token_id": "x"}, "eos_token_id must be an integer or a list of them, got"),
        ({"quantization_config": "x"}, "quantization_config must be an object, got"),
        ({"text_config": 5}, "text_config must be an object, got 5"),
        ({"num_hidden_layers": "12"}, 'num_hidden_layers must be an integer, got "12"'),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a number, got null"),
        ({"attention_bias": 1}, "attention_bias must be true or false, got 1"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": "4"}}, "factor must be a number"),
    ],
)
def test_a_wrong_type_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        config_from_hf({**plain("llama"), **changes})


def test_any_gguf_metadata_is_read_or_refused(tmp_path: Path) -> None:
    file = GGUFFile(write_tiny(tmp_path / "m.gguf"))
    config_from_gguf(file)
    optional = (
        "rope.freq_base", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor",
        "rope.scaling.original_context_length", "attention.sliding_window", "attention.causal",
        "attention.key_length", "attention.value_length", "expert_count", "expert_used_count",
    )  # fmt: skip
    arrays = [np.array(["x"]), np.array([], np.int64), np.array([1, 2]), np.array([math.nan])]
    metadata = dict(file.metadata)
    for key in (*metadata, *(f"llama.{key}" for key in optional)):
        for value in (*WRONG, *arrays):
            file.metadata = {**metadata, key: value}
            with contextlib.suppress(UnspoolError):
                config_from_gguf(file)
    file.metadata = {**metadata, "llama.block_count": "x"}
    with pytest.raises(ModelFileError, match="block_count is 'x', not a number"):
        config_from_gguf(file)


def test_any_adapter_config_is_read_or_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 67, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = config_from_hf({**plain("llama"), **sizes, **heads})
    write_adapter(random_adapter(config, 2, seed=0), tmp_path, config)
    file = tmp_path / "adapter_config.json"
    raw = json.loads(file.read_text())
    for _, other in changed(raw, raw):
        file.write_text(json.dumps(other))
        with contextlib.suppress(UnspoolError):
            read_adapter(tmp_path, config)
    file.write_text(json.dumps({**raw, "lora_alpha": "x", "alpha_pattern": {}}))
    with pytest.raises(ModelFileError, match="lora_alpha must be a number, got 'x'"):
        read_adapter(tmp_path, config)


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id must be an integer"),
        ("generation_config.json", {"eos_token_id": [True]}, "eos_token_id must be an integer"),
        ("tokenizer_config.json", {"add_bos_token": "yes"}, "add_bos_token must be true or false"),
        ("tokenizer_config.json", {"eos_token": 5}, "eos_token must be a string, got 5"),
        ("tokenizer_config.json", {"chat_template": 5}, "chat_template must be a string, got 5"),
    ],
)
def test_a_wrong_type_beside_the_vocabulary_is_named(
    file: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(tmp_path / "tokenizer.json"))
    read_tokenizer_json(tmp_path / "tokenizer.json")
    (tmp_path / file).write_text(json.dumps(changes))
    with pytest.raises(ModelFileError, match=message):
        read_tokenizer_json(tmp_path / "tokenizer.json")


# -- What config.json says of models with Mamba-2 layers, in the words of their makers ------------


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


def test_sinusoidal_is_the_papers_formula():
    table = sinusoidal(np.arange(50), 16)
    for position in (0, 1, 7, 49):
        for pair in range(8):
            angle = position / 10000 ** (2 * pair / 16)
            assert table[position, 2 * pair] == pytest.approx(math.sin(angle), abs=1e-6)
            assert table[position, 2 * pair + 1] == pytest.approx(math.cos(angle), abs=1e-6)


def test_memory_of_states_is_known_before_a_model_is_opened(tmp_path: Path):
    tiny.save("qwen3.5", tmp_path)
    observed = summarize_model(tmp_path)
    assert not observed.problem and observed.state_bytes > 0
    text = sequence_memory(observed.kv_bytes, observed.context)
    with_states = sequence_memory(observed.kv_bytes, observed.context, observed.state_bytes)
    assert with_states == text + PLANNED_STATES * observed.state_bytes
