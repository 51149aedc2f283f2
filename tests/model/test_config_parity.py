"""A config.json means to us what it means to transformers: nulls, leftovers, rare settings.

Each case is a tiny model whose config.json is changed; transformers reads the same folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import unspool
from helpers import tiny
from helpers.gguf_converted import converted_models
from helpers.paged_texts import Library, batch_of
from unspool import native
from unspool.backends.cpu.model import load_cpu
from unspool.errors import ContextError, ModelFileError
from unspool.model.files.checkpoint import load_transformer, open_checkpoint, save_checkpoint

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
CLOSE = 2e-4
LENGTH = 40  # tokens: several windows
GONE: Any = object()  # a key that is not in the file

_LISTED = {"layer_types": ["full_attention", "sliding_attention"] * 2}
_OLD_ROPE = {"rope_parameters": GONE, "rope_theta": 500.0}
_LONG = {"short_factor": [1.0, 1.25, 1.5, 2.0], "long_factor": [2.0, 5.0, 6.0, 7.0]}

# A name, the model of `tiny.py`, what its config.json says otherwise.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral: no window": ("mistral", {"sliding_window": None}),
    "mistral: by list": ("mistral", _LISTED),
    "llama: leftovers": (
        "llama",
        {"sliding_window": 7, **_LISTED, "use_sliding_window": True, "partial_rotary_factor": 0.5},
    ),
    "llama: nulls": (
        "llama",
        {"head_dim": None, "rope_scaling": None, "sliding_window": None, "pretraining_tp": None},
    ),
    "llama: old names": ("llama", _OLD_ROPE),
    "llama: the original context beside the scaling": (
        "llama-llama3", {"original_max_position_embeddings": 8},
    ),
    "llama: both ways": ("llama", {"is_causal": False}),
    "llama: another activation, scaled": (
        "llama", {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 0.01},
    ),
    "mistral: both ways in a window": ("mistral", {"is_causal": False}),
    "qwen2: leftover window": ("qwen2", {"use_sliding_window": False, "sliding_window": 7}),
    "qwen2: window null": ("qwen2", {"use_sliding_window": True, "sliding_window": None}),
    "qwen2: window by list": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 7, **_LISTED},
    ),
    "qwen3: window of later layers": (
        "qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1,
                  "layer_types": None},
    ),
    "qwen3-moe: window of all layers": (
        "qwen3-moe", {"use_sliding_window": True, "sliding_window": 7, **_LISTED},
    ),
    "qwen3-moe: some layers dense": (
        "qwen3-moe", {"mlp_only_layers": [1], "norm_topk_prob": False, "num_experts_per_tok": 2},
    ),
    "gemma2: no caps": (
        "gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma2: by list": ("gemma2", {**_LISTED, "query_pre_attn_scalar": 7}),
    "gemma3: pattern": (
        "gemma3", {"layer_types": None, "sliding_window_pattern": 3, "sliding_window": 5},
    ),
    "gemma3: capped": (
        "gemma3", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3: both ways": (
        "gemma3", {"use_bidirectional_attention": True, "sliding_window": 10},
    ),
    "gemma3: silent about the window's positions": (
        "gemma3", {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    ),
    "gemma3: old names": (
        "gemma3",
        {"rope_parameters": GONE, "rope_theta": 5000.0, "rope_local_base_freq": 300.0,
         "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "gemma: leftover names": ("gemma", {"hidden_act": "gelu", "sliding_window": 7}),
    "gemma: another activation": ("gemma", {"hidden_act": "silu"}),
    "phi3: window of all layers": ("phi3", {"sliding_window": 7, **_LISTED}),
    "phi3: short text, old names": (
        "phi3",
        {"rope_parameters": GONE, "rope_theta": 1000.0, "sliding_window": None,
         "max_position_embeddings": 256, "original_max_position_embeddings": 64,
         "rope_scaling": {"type": "su", "original_max_position_embeddings": 64, **_LONG}},
    ),
    "phi3: long text": (
        "phi3",
        {"rope_parameters": GONE, "rope_scaling": {"type": "yarn", **_LONG},
         "original_max_position_embeddings": 16, "max_position_embeddings": 256},
    ),
    "olmo2: leftovers": ("olmo2", {"sliding_window": 7}),
    "granite: leftovers": ("granite", {"sliding_window": 7, **_LISTED}),
    "olmo3: silent": ("olmo3", {"rope_parameters": GONE, "layer_types": None}),
    "smollm3: a list is a switch": (
        "smollm3", {"use_sliding_window": False, "sliding_window": 7, **_LISTED},
    ),
    "smollm3: window where nothing turns": (
        "smollm3",
        {"use_sliding_window": True, "sliding_window": 7, "layer_types": None,
         "no_rope_layers": [1, 0, 1, 0]},
    ),
    "mixtral: window of all layers": ("mixtral", {"sliding_window": 7, **_LISTED}),
    "gpt2: unscaled": ("gpt2", {"scale_attn_weights": False, "sliding_window": 7}),
    "gpt2: scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2: scaled by layer alone": (
        "gpt2", {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
    ),
    "gpt-neox: old names": (
        "gpt-neox",
        {"rope_parameters": GONE, "rotary_emb_base": 300, "rotary_pct": 0.5, "rope_theta": 7.0},
    ),
    "gpt-neox: leftovers": ("gpt-neox", {"sliding_window": 7, "partial_rotary_factor": 1.0}),
    "ministral3: silent": ("ministral3", {"rope_parameters": GONE}),
    "ministral3: the original context beside the scaling": (
        "ministral3", {"original_max_position_embeddings": 2},
    ),
    "ministral3: window": ("ministral3", {"sliding_window": 7, **_LISTED}),
    "mellum: silent": ("mellum", {"rope_parameters": GONE}),
    "mellum: other positions": (
        "mellum",
        {"rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 77.0}},
         "mlp_layer_types": None},
    ),
    "gpt-oss: silent": ("gpt-oss", {"rope_parameters": None}),
    "gpt-oss: old names": (
        "gpt-oss",
        {"rope_parameters": GONE, "rope_theta": 999.0,
         "rope_scaling": {"rope_type": "linear", "factor": 3.0}, **_LISTED},
    ),
    "lfm2: leftovers": ("lfm2", {"hidden_act": "gelu", "sliding_window": 7}),
    "nemotron-h: leftovers": ("nemotron-h", {"attention_bias": True, "sliding_window": 7}),
    "qwen3.5: leftovers": ("qwen3.5", {"partial_rotary_factor": 0.25, "mlp_only_layers": [1]}),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """Give a model's folder and its logits; each model is made once."""

    @cache
    def save(name: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(name)
        with torch.no_grad():
            return folder, tiny.save(name, folder)(tokens()).logits

    return save


def change(folder: Path, target: Path, changes: dict[str, Any]) -> Path:
    """The same weights under another config.json."""
    raw = {**json.loads((folder / "config.json").read_text()), **changes}
    text = json.dumps({key: value for key, value in raw.items() if value is not GONE})
    (target / "config.json").write_text(text)
    (target / "model.safetensors").symlink_to(folder / "model.safetensors")
    return target


def tokens() -> torch.Tensor:
    return torch.randint(3, 259, (1, LENGTH), generator=torch.Generator().manual_seed(1))


def difference(a: Any, b: Any) -> float:
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


@torch.no_grad()
@pytest.mark.parametrize("case", CASES)
def test_the_same_logits_as_transformers(case: str, saved: Any, tmp_path: Path) -> None:
    base, changes = CASES[case]
    folder, plain = saved(base)
    change(folder, tmp_path, changes)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    expected = reference.eval()(tokens()).logits
    is_ignored = "leftover" in case or "null" in case
    assert (difference(plain, expected) < CLOSE) == is_ignored, "the case is not what it says"
    checkpoint = open_checkpoint(tmp_path)
    model = load_transformer(checkpoint)
    assert difference(model(tokens()), expected) < CLOSE
    save_checkpoint(model, tmp_path / "again")
    again = open_checkpoint(tmp_path / "again")
    assert (
        again.config == checkpoint.config
        or difference(load_transformer(again)(tokens()), expected) < CLOSE
    )
    if native.missing_reason() is None and not checkpoint.config.state_bytes:
        assert difference(native_logits(checkpoint), expected[0]) < CLOSE


def native_logits(checkpoint: Any, context: int = 64, length: int = LENGTH) -> Any:
    model = load_cpu(checkpoint, store="float32", kv_bits=32)
    backend = model.backend(memory=1 << 22, context=context)
    batch = batch_of([(Library(16, 259).again(tokens()[0, :length].tolist()), length)])
    if checkpoint.config.sight == "whole":
        batch = replace(batch, visible_end=np.full(length, length))
    return backend.launch(batch).result().logits


@pytest.fixture(scope="module")
def longrope(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of an original context of 32 tokens, as a folder and as a GGUF file."""
    folder = tmp_path_factory.mktemp("longrope")
    tiny.save("phi3-longrope", folder / "phi3-longrope")
    shutil.copy(converted_models(tmp_path_factory) / "phi3-longrope.gguf", folder)
    return folder


@torch.no_grad()
@pytest.mark.skipif(native.missing_reason() is not None, reason=str(native.missing_reason()))
@pytest.mark.parametrize("file", ["phi3-longrope", "phi3-longrope.gguf"])
def test_longrope_goes_by_the_context(longrope: Path, file: str) -> None:
    """Short texts have the factors for short ones by default, long ones those for long ones."""
    checkpoint, reference = open_checkpoint(longrope / file), tiny.make("phi3-longrope")
    config = checkpoint.config
    assert (config.default_context, config.context) == (32, 128)
    with unspool.load(longrope / file) as lm:
        assert lm.context == 32
        with pytest.raises(ContextError, match="load the model with context=128"):
            lm.generate(tokens()[0].tolist(), max_tokens=1)
    with unspool.load(longrope / file, context=100) as lm:
        assert lm.context == 100
    short = reference(tokens()[:, :30]).logits[0]
    assert difference(native_logits(checkpoint, config.default_context, 30), short) < CLOSE
    assert difference(native_logits(checkpoint, 128, 30), short) > 1e-2
    assert difference(native_logits(checkpoint, 128), reference(tokens()).logits[0]) < CLOSE


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "olmo3", "gpt-oss"])
def test_no_window_where_it_is_null(name: str, saved: Any, tmp_path: Path) -> None:
    """transformers cannot run these; no window is what the file says."""
    folder = change(saved(name)[0], tmp_path, {"sliding_window": None})
    assert open_checkpoint(folder).config.windows == ()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("llama", {"per_layer_config": {"0": {"head_dim": 4}}}, "per_layer_config"),
        ("qwen3.5", {"hidden_act": "gelu"}, "hidden_act"),
        ("granite-hybrid", {"hidden_act": "gelu"}, "hidden_act"),
        ("gemma3", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters"),
        ("lfm2", {"is_causal": False}, "sight"),
        ("granite", {"attention_multiplier": 0}, "attention_multiplier"),
        # Found by reading random changes of config.json beside transformers.
        ("qwen3.5", {"head_dim": None}, "do not belong together"),
        (
            "gpt-neox",
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "dynamic RoPE scaling needs more than 2 rotated dimensions, got 2",
        ),
    ],
)
def test_settings_that_are_refused(
    name: str, changes: dict[str, Any], message: str, saved: Any, tmp_path: Path
) -> None:
    change(saved(name)[0], tmp_path, changes)
    with pytest.raises(ModelFileError, match=message):
        load_transformer(open_checkpoint(tmp_path))
