"""Models with recurrent layers as GGUF: in llama.cpp and here the logits are transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_export import PROMPTS, log_probabilities, ours

from helpers import ask_llama_cpp as llama_cpp
from helpers import small_model as small
from helpers import tiny, tiny_recurrent
from helpers.gguf_converted import convert
from unspool.errors import ModelFileError
from unspool.model.files.gguf import GGUFFile
from unspool.train.export import export_gguf

# llama.cpp needs keys and values of a recurrent head to have the same width.
SQUARE = {**tiny_recurrent._DELTA, "linear_value_head_dim": 12}
SHARED = {**SQUARE, **tiny_recurrent._EXPERTS, "shared_expert_intermediate_size": 24}
FAMILIES = {
    "lfm2": tiny_recurrent.FAMILIES["lfm2"],
    "lfm2-moe": tiny_recurrent.FAMILIES["lfm2-moe"],
    "qwen3.5": tiny.named("Qwen3_5", **SQUARE),
    "qwen3.5-moe": tiny.named("Qwen3_5Moe", **SHARED),
    "qwen3-next": tiny.named("Qwen3Next", **SHARED),
}


@pytest.fixture
def sized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models with as many rows as the small vocabulary needs."""
    monkeypatch.setitem(tiny._SHAPE, "vocab_size", 300)
    for name, make in FAMILIES.items():
        monkeypatch.setitem(tiny_recurrent.FAMILIES, name, make)


def saved(name: str, folder: Path) -> Any:
    model = tiny.save(name, folder)
    small.save_vocabulary(folder)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_gives_the_logits_of_transformers(name: str, sized: None, tmp_path: Path):
    model = saved(name, tmp_path / "model")
    path = export_gguf(tmp_path / "model", tmp_path / "model.gguf", type="F32")
    expected = log_probabilities(model, PROMPTS)
    assert np.abs(ours(path, PROMPTS) - expected).max() < 1e-4
    result = np.array(llama_cpp.ask(path, prompts=PROMPTS)["logprobs"])
    assert np.abs(result - expected).max() < 1e-3
    # What came out of a GGUF file goes into one again as it was.
    again = export_gguf(path, tmp_path / "again.gguf", type="F32")
    first, other = GGUFFile(path), GGUFFile(again)
    assert first.tensors.keys() == other.tensors.keys()
    for tensor in first.tensors:
        np.testing.assert_allclose(first.float32(tensor), other.float32(tensor), rtol=1e-6)


@pytest.mark.slow  # starting the converter takes long, and what it writes is run above
def test_settings_and_tensors_are_those_of_llama_cpps_converter(sized: None, tmp_path: Path):
    pairs = {}
    for name in FAMILIES:
        tiny.save(name, tmp_path / name)
        pairs[tmp_path / name] = tmp_path / f"{name}-theirs.gguf"
    convert(pairs.items())
    for name in FAMILIES:
        small.save_vocabulary(tmp_path / name)
        mine = GGUFFile(export_gguf(tmp_path / name, tmp_path / f"{name}.gguf", type="F32"))
        theirs = GGUFFile(tmp_path / f"{name}-theirs.gguf")
        for key, value in theirs.metadata.items():
            output = key.startswith(("general.", "tokenizer.")) or key.endswith(
                "dimension_sections"
            )
            if not output and not (name == "lfm2" and key.endswith("feed_forward_length")):
                assert np.array_equal(mine.metadata[key], value), key
        assert mine.tensors.keys() == theirs.tensors.keys()
        for tensor in theirs.tensors:
            result, expected = mine.float32(tensor), theirs.float32(tensor)
            np.testing.assert_allclose(
                result.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6
            )


def test_packed_numbers_are_run_by_llama_cpp(sized: None, tmp_path: Path):
    small.save_model(
        tmp_path / "model", "Qwen3_5",
        **{**SQUARE, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
        num_hidden_layers=4,
    )  # fmt: skip
    for kind, alike in (("F16", 0.999), ("Q8_0", 0.9)):
        path = export_gguf(tmp_path / "model", tmp_path / f"{kind}.gguf", type=kind)
        kinds = {name: tensor.type.name for name, tensor in GGUFFile(path).tensors.items()}
        assert kinds["blk.0.ssm_conv1d.weight"] == "F32" and kinds["blk.0.ssm_a"] == "F32"
        assert kinds["blk.0.attn_qkv.weight"] == kind
        # llama.cpp rounds what goes into a product of packed numbers to 8 bits too, and the norm
        # behind the state of a random model makes much of that.
        message = np.array(llama_cpp.ask(path, prompts=PROMPTS)["logprobs"])
        assert np.corrcoef(message.ravel(), ours(path, PROMPTS).ravel())[0, 1] > alike


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("qwen3.5-alike", "every n-th layer"),
        ("lfm2-moe-no-bias", "sum to one"),
        ("qwen3-next-dense", "of equal width"),
    ],
)
def test_what_llama_cpp_would_read_otherwise_is_refused(name: str, word: str, tmp_path: Path):
    tiny.save(name, tmp_path / "model")
    with pytest.raises(ModelFileError, match=word):
        export_gguf(tmp_path / "model", tmp_path / "model.gguf", type="F32")
    assert not (tmp_path / "model.gguf").exists()
