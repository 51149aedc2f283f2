"""Folders and files that are not what they should be: each a sentence that says what to do."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import tiny
from unspool.errors import ModelFileError, UnspoolError, UnspoolWarning
from unspool.model.files.checkpoint import load_transformer, open_checkpoint
from unspool.model.files.config_json import config_from_hf


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny.save("llama", folder)
    return folder


@pytest.fixture
def folder(llama: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to change."""
    return shutil.copytree(llama, tmp_path, dirs_exist_ok=True)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    raw = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in raw.items() if v != "gone"}))


def refused(folder: Path, words: str) -> None:
    with pytest.raises(ModelFileError, match=words) as caught:
        load_transformer(open_checkpoint(folder))
    assert "\n" not in str(caught.value)


def test_missing(tmp_path: Path):
    refused(tmp_path / "nothing", "no such file")
    refused(tmp_path, r"no \.safetensors or \.gguf")


def test_pickles_are_refused_with_the_reason(tmp_path: Path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "run",))

    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(pickle.dumps(Evil()))
    refused(file, "runs any code")
    refused(tmp_path, "runs any code")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mamba"}, "'mamba' are not supported; these are: .*llama"),
        ({"model_type": "gone"}, "model_type"),
        ({"hidden_size": -4}, "hidden_size must be an integer from 1 to 1,000,000, got -4"),
        ({"hidden_size": 10**12}, "hidden_size must be .* got 1000000000000"),
        ({"hidden_size": "many"}, 'hidden_size must be an integer, got "many"'),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be .* 10,000, got 1000000000"),
        ({"num_attention_heads": 0}, "num_attention_heads must be .* got 0"),
        ({"num_key_value_heads": 4}, "kv_heads must be .* got 4"),
        ({"vocab_size": "gone"}, "lacks 'vocab_size'"),
        ({"rms_norm_eps": -1.0}, "norm_eps must be .* got -1.0"),
        ({"rms_norm_eps": "small"}, 'rms_norm_eps must be a number, got "small"'),
        ({"hidden_act": "mish"}, "'mish' is not supported"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "'spiral' is not supp"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "low_freq_factor"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"hidden_size": 96}, "do not belong together"),
        ({"num_hidden_layers": 5}, r"lacks model\.layers\.4\.[^{}]*$"),
        ({"num_hidden_layers": 6}, r"lacks model\.layers\.4\..*, .* and 14 more, which a llama"),
        (
            {"num_hidden_layers": 3},
            r"3 layers, and the file has more: model\.layers\.3.* and 5 more",
        ),
    ],
)
def test_impossible_settings(folder: Path, changes: dict[str, Any], words: str):
    change_config(folder, **changes)
    refused(folder, words)


def test_gemma3_as_the_older_versions_and_the_pictures_model_write_it():
    text = {
        "hidden_size": 64, "num_hidden_layers": 7, "intermediate_size": 128, "sliding_window": 5,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "vocab_size": 100,
    }  # fmt: skip
    config = config_from_hf({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]})
    assert config.windows == (5, 5, 5, 5, 5, 0, 5)
    assert config.end_ids == (1, 106)
    first, sixth = config.layer_rope(0), config.layer_rope(5)
    assert first is not None and sixth is not None
    assert (first.base, first.scaling) == (1e4, "none")
    assert (sixth.base, sixth.scaling, sixth.factor) == (1e6, "linear", 8.0)
    assert (config.heads, config.kv_heads, config.head_width) == (8, 4, 256)


def test_broken_json(folder: Path):
    (folder / "config.json").write_text("{" * 100_000)
    refused(folder, "not valid JSON")
    (folder / "config.json").write_text("[1, 2]")
    refused(folder, "must hold a JSON object, got list")


def test_shards_stay_in_their_folder(folder: Path):
    names = load_file(folder / "model.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "../../etc/passwd")}))
    refused(folder, "not a plain file name")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-2.safetensors")}))
    refused(folder, "model-2.safetensors is missing")
    index.write_text(json.dumps({"weight_map": []}))
    refused(folder, "no weight_map")


# -- tensors that are missing, that differ from the settings, or that nothing reads ---------------


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors; "__" stands for a dot."""
    file = folder / "model.safetensors"
    tensors: dict[str, Any] = load_file(file)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, file, metadata={"format": "pt"})


def logits_of_both(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """What we and transformers compute from a folder."""
    import transformers

    tokens = torch.arange(3, 20)[None]
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    with torch.no_grad():
        return load_transformer(open_checkpoint(folder))(tokens), oracle(tokens).logits


@pytest.mark.parametrize("silent", [False, True])
def test_a_head_that_differs_from_the_embedding_is_used(tmp_path: Path, silent: bool):
    """The settings say that the two are tied, or are silent where the family ties them."""
    tiny.save("smollm3", tmp_path)
    change_tensors(tmp_path, lm_head__weight=torch.randn(259, 48))
    change_config(tmp_path, tie_word_embeddings="gone" if silent else True)
    model, reference = logits_of_both(tmp_path)
    assert not open_checkpoint(tmp_path).config.tied
    assert (model - reference).abs().max() < 1e-4


def test_a_head_that_is_the_embedding_stays_tied(tmp_path: Path):
    tiny.save("llama-tied-bias", tmp_path)
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(tmp_path, lm_head__weight=table.clone())
    assert open_checkpoint(tmp_path).config.tied
    change_tensors(tmp_path, model__embed_tokens__weight=None)  # saved under one of its two names
    model, reference = logits_of_both(tmp_path)
    assert (model - reference).abs().max() < 1e-4


def test_a_checkpoint_without_a_head_gives_vectors_and_no_text(tmp_path: Path):
    import transformers

    import unspool

    config = transformers.LlamaConfig(**tiny._SHAPE, num_labels=1)
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    with unspool.load(tmp_path, backend="torch", memory=8 << 20) as lm:
        assert lm.embed([1, 2, 3]).shape == (48,)
        for use in (
            lambda: lm.generate([1, 2, 3], max_tokens=2),
            lambda: lm.score([1, 2, 3]),
            lambda: lm.look([1, 2, 3]),
            lambda: lm.choices([1, 2, 3], 2),
            lambda: lm.save(tmp_path / "saved"),
        ):
            with pytest.raises(UnspoolError, match=r"no output head \(lm_head\.weight\)"):
                use()


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("mlp__up_proj__weight", torch.full((80, 48), torch.nan), r"1\.feed\.up\.weight holds NaN"),
        ("input_layernorm__weight", torch.ones(48, dtype=torch.int8), "holds int8 numbers"),
        ("self_attn__q_proj__bias", torch.ones(48), "does not use: .*q_proj.bias"),
        ("self_attn__q_norm__weight", torch.ones(48), "does not use: .*q_norm"),
        ("self_attn__surprise", torch.ones(3), "does not use: .*surprise"),
    ],
)
def test_tensors_of_a_layer_that_cannot_be_used(
    folder: Path, name: str, tensor: torch.Tensor, words: str
):
    change_tensors(folder, **{f"model__layers__1__{name}": tensor})
    refused(folder, words)


def test_harmless_tensors_are_left_out(folder: Path, recwarn: pytest.WarningsRecorder):
    change_tensors(
        folder,
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4),
        model__layers__0__self_attn__q_proj__bias=torch.zeros(48),  # as some quantizers write it
        model__visual__patch_embed__weight=torch.ones(4, 4),
        mtp__layers__0__self_attn__q_proj__weight=torch.ones(4, 4),
        score__weight=torch.ones(1, 48),
    )
    load_transformer(open_checkpoint(folder))
    assert not recwarn.list


def test_unknown_tensors_outside_the_layers_are_named(folder: Path):
    change_tensors(folder, something__weight=torch.ones(4))
    with pytest.warns(UnspoolWarning, match=r"unused tensors.*something\.weight"):
        load_transformer(open_checkpoint(folder))
