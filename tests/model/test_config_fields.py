"""Every setting of transformers' configuration classes is honoured, irrelevant, or refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING

from unspool.model.families import _ALL, family_of_model_type
from unspool.model.family import Family
from unspool.model.today_families import ALIASES

_BASE = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
_TRAINING = "only training"
_TOKENS = "a token's number: the tokenizer's business"
_OTHER_HEAD = "of heads for other tasks than language modelling"
_HOW = "how it is computed, not what"
_OUTPUT = "what is returned beside the logits"
_DRAFTS = "of layers that draft, which are not loaded"

# Fields that do not change the logits of a text, each with the reason.
IRRELEVANT: dict[str, str] = {
    "initializer_range": _TRAINING,
    "initializer_cutoff_factor": _TRAINING,
    "rescale_prenorm_residual": _TRAINING,
    "router_aux_loss_coef": _TRAINING,
    "router_jitter_noise": _TRAINING,
    "time_step_min": _TRAINING,
    "time_step_max": _TRAINING,
    "time_step_floor": _TRAINING,
    "expand": "mamba_num_heads and mamba_head_dim say it",
    "sparse_prediction": _TRAINING,
    "sparse_pred_ignore_index": _TRAINING,
    "bos_token_id": _TOKENS,
    "pad_token_id": _TOKENS,
    "cls_token_id": _TOKENS,
    "sep_token_id": _TOKENS,
    "use_cache": _HOW,
    "pretraining_tp": _HOW,
    "reorder_and_upcast_attn": _HOW,
    "deterministic_flash_attn": _HOW,
    "use_mamba_kernels": _HOW,
    "residual_in_fp32": _HOW,
    "mamba_ssm_cache_dtype": _HOW,
    "mamba_chunk_size": _HOW,
    "chunk_size": _HOW,
    "moe_shared_expert_overlap": _HOW,
    "num_logits_to_keep": _OUTPUT,
    "output_router_logits": _OUTPUT,
    "classifier_pooling": _OTHER_HEAD,
    "summary_type": _OTHER_HEAD,
    "summary_use_proj": _OTHER_HEAD,
    "summary_activation": _OTHER_HEAD,
    "summary_proj_to_labels": _OTHER_HEAD,
    "num_mtp_layers": _DRAFTS,
    "mtp_layer_types": _DRAFTS,
    "mtp_mlp_layer_types": _DRAFTS,
    "num_nextn_predict_layers": _DRAFTS,
    "mtp_layers_block_type": _DRAFTS,
    "type_vocab_size": "the table's shape says it, and a text is of one type",
}
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
    theirs = fields_of(model_type)
    sizes = {family.keys[name] for name in SIZES}
    differing = {
        name: (value, family.defaults.get(name))
        for name, value in theirs.items()
        if name in family.settings
        and not (name in sizes and name not in family.defaults)
        and not same(family, name, value, family.defaults.get(name))
    }
    assert not differing, f"(transformers' default, ours): {differing}"


def same(family: Family, name: str, theirs: Any, ours: Any) -> bool:
    if name == "rope_parameters":  # the default is made by code there
        return True
    if name in ("eos_token_id", "time_step_limit", "intermediate_size"):
        return True  # nothing is made up
    wanted = family.required.get(name, ours)
    return (theirs or None) == ((wanted if ours is None else ours) or None)
