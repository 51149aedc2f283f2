"""Layers that differ from each other, and the files that say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from helpers import tiny
from helpers.paged_texts import RandomCheckpoint, config
from unspool.backends.torch.backend import TorchModel
from unspool.errors import ModelFileError
from unspool.model.config import LayerShape, ModelConfig
from unspool.model.families.registry import FAMILIES
from unspool.model.files.checkpoint import load_transformer, open_checkpoint
from unspool.model.files.config_json import config_from_hf
from unspool.model.hub.inspect import summarize_model

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def shape(**changes: int) -> LayerShape:
    return LayerShape(**{"heads": 4, "kv_heads": 2, "head_width": 16, "ff_width": 48, **changes})


DIFFERENT = {
    "layers": 4,
    "shapes": (shape(), shape(heads=2, kv_heads=1), shape(ff_width=20), shape(kv_heads=1)),
    "windows": (5, 0, 5, 5),
}


def test_one_shape_for_all_or_one_for_each() -> None:
    alike, different = config(), config(**DIFFERENT)
    assert [alike.shape(layer) for layer in range(2)] == [shape()] * 2
    assert different.shape(1).out_width == 32 and different.shape(1).kv_width == 16
    assert different.kv_floats_per_token == 2 * 16 * (2 + 1 + 2 + 1)
    again = ModelConfig.from_dict(json.loads(json.dumps(different.to_dict())))
    assert again == different


def test_layers_without_keys_read_those_of_the_last_of_their_kind() -> None:
    shared = config(layers=6, windows=(5, 0, 5, 5, 0, 5), kv_shared=2)
    assert [shared.kv_source(layer) for layer in range(6)] == [0, 1, 2, 3, 1, 3]
    assert shared.kv_layers == (0, 1, 2, 3)
    assert shared.kv_floats_per_token == 4 * 2 * 32
    backend = TorchModel(load_transformer(RandomCheckpoint(shared))).backend(
        memory=1 << 20, context=64
    )
    assert backend.page_bytes == shared.kv_floats_per_token * 16 * 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shapes": (shape(),)}, "one for each layer"),
        ({"shapes": (shape(), shape(heads=8))}, "sizes from 1 to heads, which is 4"),
        ({"shapes": (shape(), shape(kv_heads=0))}, "sizes from 1 to kv_heads"),
        ({"shapes": (shape(), shape(heads=3))}, "heads that are multiples of kv_heads"),
        ({"shapes": (shape(), shape(head_width=8))}, "attention_scale must be set"),
        (
            {"shapes": (shape(), shape(head_width=8)), "attention_scale": 1.0},
            "as wide as their rotary width",
        ),
        ({"kv_shared": 2}, "kv_shared must be 0 to 1, got 2"),
        ({"kv_shared": 1, "windows": (0, 5)}, "one layer of each kind must have its own"),
        ({"kv_shared": 1, "shapes": (shape(), shape(kv_heads=1))}, "sharing layers"),
        ({"query_growth": 0.1}, "query_span"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        config(**wrong)


@torch.no_grad()
def test_experts_of_qwen3_vl_as_their_makers_store_them(tmp_path: Path) -> None:
    """Turned, and all in one tensor; what transformers writes today is not turned."""
    reference = tiny.save("qwen3-vl-moe", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    experts = [name for name in tensors if ".mlp.experts." in name]
    assert experts, "the experts are stored together"
    for name in experts:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    tokens = torch.arange(3, 40)[None]
    model = load_transformer(open_checkpoint(tmp_path))
    assert (model(tokens) - reference(tokens).logits).abs().max() < 1e-4


def test_settings_of_models_that_see_pictures() -> None:
    """Older files have the settings of the text beside those of the pictures, or leave out what
    kind of model the text's part is."""
    text = {
        "vocab_size": 259, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6,
        "intermediate_size": 80, "rms_norm_eps": 1e-6, "num_key_value_heads": 6,
    }  # fmt: skip
    rope = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}
    old = config_from_hf({"model_type": "qwen2_5_vl", **text, **rope, "vision_config": {}})
    assert (old.family, old.qkv_bias, old.tied) == ("qwen2", True, False)
    assert old.rotary is not None and (old.rotary.base, old.rotary.scaling) == (1e6, "none")
    inner = config_from_hf({"model_type": "mistral3", "text_config": text})
    assert (inner.family, inner.windows) == ("mistral", ())
    outer = {"model_type": "qwen3_vl", "text_config": text, "tie_word_embeddings": True}
    assert config_from_hf(outer).tied
    with pytest.raises(ModelFileError, match=r"'clip'.*qwen3_vl"):
        config_from_hf({"model_type": "clip", "text_config": {"model_type": "clip", **text}})


def test_a_glance_knows_that_layers_share(tmp_path: Path) -> None:
    tiny.save("gemma4-shared", tmp_path)
    result = open_checkpoint(tmp_path).config
    assert summarize_model(tmp_path).kv_bytes == 2 * result.kv_floats_per_token
    assert result.kv_floats_per_token == 2 * (3 * 2 * 8 + 2 * 2 * 16), (
        "five of nine layers keep any"
    )


def test_every_family_says_what_it_is() -> None:
    for family in FAMILIES.values():
        assert family.rules and family.keys["layers"], family.name
