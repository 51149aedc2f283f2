"""Export: what other programs make of our models is what we make of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from safetensors.numpy import load_file

import unspool
from helpers import ask_llama_cpp as llama_cpp
from helpers import assets, tiny, tiny_recurrent
from helpers import small_model as small
from helpers.gguf_converted import (
    EXPORTED_CAUSAL,
    EXPORTED_RECURRENT,
    converted_models,
    save_for_export,
)
from unspool.errors import ModelFileError, SettingsError, UnspoolError
from unspool.model.files.checkpoint import load_transformer, open_checkpoint, save_checkpoint
from unspool.model.files.export import quantize_folder
from unspool.model.files.gguf import GGUFFile
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.export import export_folder, export_gguf
from unspool.train.running.runs import Run

PROMPTS = [[5, 9, 17, 200, 33, 2], [7], [250, 3, 3, 3, 90, 120, 11, 260, 44, 18, 6, 77]]


def log_probabilities(model: Any, prompts: list[list[int]]) -> np.ndarray[Any, Any]:
    """What the transformers model says after each prompt."""
    with torch.no_grad():
        rows = [model(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
    return torch.stack(rows).log_softmax(-1).numpy()


def our_logits(path: Path, prompts: list[list[int]]) -> np.ndarray[Any, Any]:
    with unspool.load(path, backend="torch", memory=8 << 20) as lm:
        rows = []
        for prompt in prompts:
            with lm.open_branch(prompt) as branch:
                rows.append(lm.engine.extend(branch)[-1])
    return torch.tensor(np.stack(rows)).log_softmax(-1).numpy()


@pytest.mark.parametrize("name", [*EXPORTED_CAUSAL, *EXPORTED_RECURRENT])
def test_llama_cpp_gives_the_logits_of_transformers(name: str, tmp_path: Path):
    model = save_for_export(name, tmp_path / "model")
    small.save_vocabulary(tmp_path / "model")
    path = export_gguf(tmp_path / "model", tmp_path / "model.gguf", type="F32")
    expected = log_probabilities(model, PROMPTS)
    result = np.array(llama_cpp.ask(path, prompts=PROMPTS)["logprobs"])
    assert np.abs(result - expected).max() < 1e-3
    assert np.abs(our_logits(path, PROMPTS) - expected).max() < 1e-3
    if name in EXPORTED_RECURRENT:  # what came out of a GGUF file goes into one again as it was
        again = export_gguf(path, tmp_path / "again.gguf", type="F32")
        first, other = GGUFFile(path), GGUFFile(again)
        assert first.tensors.keys() == other.tensors.keys()
        for tensor in first.tensors:
            np.testing.assert_allclose(first.float32(tensor), other.float32(tensor), rtol=1e-6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("small") / "model"
    small.save_model(folder)
    return folder


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1", "Q4_0"])
def test_packed_numbers(folder: Path, tmp_path: Path, kind: str):
    """The blocks are those of gguf's own quantizer, and llama.cpp computes with them as we do."""
    plain = GGUFFile(export_gguf(folder, tmp_path / "plain.gguf", type="F32"))
    path = export_gguf(folder, tmp_path / "packed.gguf", type=kind)
    packed = GGUFFile(path)
    kinds = set()
    for name, tensor in packed.tensors.items():
        kinds.add(tensor.type.name)
        kind_of = gguf.GGMLQuantizationType[tensor.type.name]
        again = quantize(plain.float32(name), kind_of).view(np.uint8)
        assert np.array_equal(packed.raw(name).reshape(-1), again.reshape(-1)), name
    heads = set() if kind == "F16" else {"Q8_0"}
    assert kinds == {"F32", kind} | heads
    message = np.array(llama_cpp.ask(path, prompts=PROMPTS)["logprobs"])
    local, exact = our_logits(path, PROMPTS), our_logits(folder, PROMPTS)
    # llama.cpp rounds what goes into a product of packed numbers to 8 bits too; we do not here.
    assert np.abs(message - local).mean() < 0.05
    assert np.abs(local - exact).mean() < {"F16": 0.01, "Q8_0": 0.05}.get(kind, 1.0)


@pytest.mark.parametrize("name", ["llama-llama3", "qwen3", *EXPORTED_RECURRENT])
def test_settings_and_tensors_are_those_of_llama_cpps_converter(
    name: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
):
    converted = converted_models(tmp_path_factory) / "exported"
    shutil.copytree(converted / name, tmp_path / name)
    small.save_vocabulary(tmp_path / name)
    mine = GGUFFile(export_gguf(tmp_path / name, tmp_path / "mine.gguf", type="F32"))
    reference = GGUFFile(converted / f"{name}.gguf")
    ignored = ["general.name", "general.size_label", "general.sampling"]
    if name in EXPORTED_RECURRENT:
        ignored = ["general.", "tokenizer.", "qwen35.rope.dimension_sections"]
        ignored += ["qwen35moe.rope.dimension_sections", "lfm2.feed_forward_length"]
    for key, value in reference.metadata.items():
        if not key.startswith(tuple(ignored)):
            assert np.array_equal(mine.metadata[key], value), key
    if name not in EXPORTED_RECURRENT:
        extra = {key for key in mine.metadata if not key.startswith("tokenizer.")}
        assert {key.partition(".")[2] for key in extra - reference.metadata.keys()} <= {
            "rope.dimension_count", "vocab_size", "attention.key_length", "attention.value_length",
        }  # fmt: skip
    assert mine.tensors.keys() == reference.tensors.keys()
    for tensor in reference.tensors:
        result, expected = mine.float32(tensor), reference.float32(tensor)
        np.testing.assert_allclose(result.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)


def test_the_vocabulary_is_the_same_in_llama_cpp(folder: Path, tmp_path: Path):
    path = export_gguf(folder, tmp_path / "model.gguf", name="small one")
    tokenizer = Tokenizer.from_file(folder)
    messages = [{"role": "user", "content": "Hello there"}]
    message = llama_cpp.ask(path, texts=small.TEXTS, messages=messages)
    assert message["ids"] == [tokenizer.encode(text) for text in small.TEXTS]
    assert message["written"] == "<|user|>\nHello there<|end|>\n<|assistant|>\n"
    again = Tokenizer.from_gguf(GGUFFile(path).metadata)
    assert [again.encode(t) for t in small.TEXTS] == message["ids"]
    assert again.chat_template == small.TEMPLATE
    assert (again.eos_id, again.bos_id, again.add_bos) == (1, 0, False)
    existing = GGUFFile(path).metadata
    assert existing["general.name"] == "small one"
    assert existing["tokenizer.ggml.pre"] == "gpt-2"
    types = existing["tokenizer.ggml.token_type"].tolist()
    assert types[:4] == [3, 3, 3, 3]
    assert set(types[4:]) == {1, 4, 5}  # normal, <tool>, and a row of the model without a token


@pytest.mark.parametrize(
    ("family", "file", "name"),
    [
        ("llama3", "llama-bpe", "llama-bpe"),
        pytest.param("qwen", "qwen2", "qwen2", marks=pytest.mark.slow),
        ("llama2", "llama-spm", ""),
    ],
)
def test_known_vocabularies_as_llama_cpp_wrote_them(family: str, file: str, name: str):
    """Real families: tokens, types, merges and the cut's name as in llama.cpp's own files."""
    source = assets.tokenizer_json_folder() / family
    reference = GGUFFile(
        assets.llama_cpp_source() / "models" / f"ggml-vocab-{file}.gguf", glance=False
    )
    expected = reference.metadata
    tokens = expected["tokenizer.ggml.tokens"]
    mine = Tokenizer.from_file(source).gguf_metadata(len(tokens))
    assert mine["tokenizer.ggml.model"] == expected["tokenizer.ggml.model"]
    is_same = [a == b for a, b in zip(mine["tokenizer.ggml.tokens"], tokens, strict=True)]
    assert np.mean(is_same) > 0.995  # some reserved ones were named later
    if name:
        assert mine["tokenizer.ggml.pre"] == name
        assert mine["tokenizer.ggml.merges"] == expected["tokenizer.ggml.merges"]
        return  # that decides how it encodes
    again, original = Tokenizer.from_gguf(mine), Tokenizer.from_gguf(expected)
    for text in [*small.TEXTS, "Hello  World\n\n  it's 2024, 我们 go"]:
        assert again.encode(text) == original.encode(text)


def test_a_folder_for_transformers(folder: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    expected = our_logits(folder, PROMPTS)
    target = export_folder(folder, tmp_path / "exported")
    model = AutoModelForCausalLM.from_pretrained(target)
    assert np.abs(log_probabilities(model, PROMPTS) - expected).max() < 1e-4
    reference = AutoTokenizer.from_pretrained(target)
    assert reference.encode(small.TEXTS[0]) == Tokenizer.from_file(folder).encode(small.TEXTS[0])
    assert reference.chat_template == small.TEMPLATE
    export_gguf(target, tmp_path / "one.gguf", type="F32")
    back = export_folder(tmp_path / "one.gguf", tmp_path / "back", dtype="bfloat16")
    again = AutoModelForCausalLM.from_pretrained(back)
    assert again.dtype == torch.bfloat16
    assert np.abs(log_probabilities(again.float(), PROMPTS) - expected).mean() < 0.1


@pytest.mark.parametrize(("kind", "bits", "near"), [("mlx8", 8, 0.1), ("mlx4", 4, 4.0)])
def test_a_folder_for_mlx(folder: Path, tmp_path: Path, kind: str, bits: int, near: float):
    """A number is scale times a whole number plus the group's minimum, as MLX has it; the file is
    smaller, and the model says nearly the same."""
    target = export_folder(folder, tmp_path / "packed", dtype=kind)
    output = json.loads((target / "config.json").read_text())
    assert output["quantization"] == {"group_size": 32, "bits": bits, "mode": "affine"}
    stored, plain = (load_file(item / "model.safetensors") for item in (target, folder))
    at = "model.layers.0.mlp.up_proj"
    words, expected = stored[f"{at}.weight"], plain[f"{at}.weight"].astype(np.float32)
    item = (words[..., None] >> np.arange(0, 32, bits, dtype=np.uint32)) & (2**bits - 1)
    scales, minima = (stored[f"{at}.{part}"].astype(np.float32) for part in ("scales", "biases"))
    result = item.reshape(*scales.shape, 32) * scales[..., None] + minima[..., None]
    off = np.abs(result.reshape(expected.shape) - expected).reshape(*scales.shape, 32).max(-1)
    assert (off <= 0.55 * scales + 1e-3 * np.abs(minima) + 1e-6).all()
    assert np.abs(our_logits(target, PROMPTS) - our_logits(folder, PROMPTS)).max() < near
    read = dict(open_checkpoint(target).weights())["layers.0.feed.up.weight"].float32()
    np.testing.assert_allclose(read, result.reshape(expected.shape), atol=1e-6)


def test_a_large_folder_for_mlx_has_its_index(folder: Path, tmp_path: Path):
    model = load_transformer(open_checkpoint(folder))
    save_checkpoint(model, tmp_path / "large", largest_file=100_000)
    assert len(list((tmp_path / "large").glob("*.safetensors"))) > 1
    quantize_folder(tmp_path / "large", 8)
    first = dict(open_checkpoint(export_folder(folder, tmp_path / "one", dtype="mlx8")).weights())
    several = dict(open_checkpoint(tmp_path / "large").weights())
    assert first.keys() == several.keys()
    for name, stored in first.items():
        np.testing.assert_array_equal(stored.float32(), several[name].float32())


def test_a_run_is_exported_by_its_newest_checkpoint(folder: Path, tmp_path: Path):
    run = Run.create(tmp_path / "run", "new")
    with pytest.raises(UnspoolError, match="no checkpoint yet"):
        export_gguf(run.folder, tmp_path / "a.gguf")
    checkpoint = run.folder / "checkpoints" / "000010"
    export_folder(folder, checkpoint)
    (checkpoint / "training.json").write_text(json.dumps({"step": 10, "tokens": 100}))
    export_gguf(run.folder, tmp_path / "a.gguf", type="F32")
    difference = our_logits(tmp_path / "a.gguf", PROMPTS) - our_logits(folder, PROMPTS)
    assert np.abs(difference).max() < 1e-5


def test_what_is_there_stays_until_the_new_one_is_whole(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = export_gguf(folder, tmp_path / "model.gguf")
    before = path.read_bytes()
    with pytest.raises(UnspoolError, match="already exists"):
        export_gguf(folder, path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    with pytest.raises(UnspoolError, match="No space left"):
        export_gguf(folder, path, force=True, type="F32")
    monkeypatch.setattr("unspool.train.export.save_checkpoint", full)
    with pytest.raises(UnspoolError, match="No space left"):
        export_folder(folder, tmp_path / "other")
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["model.gguf"]


def test_what_cannot_be_written_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(SettingsError, match="must be one of F32"):
        export_gguf(folder, tmp_path / "x.gguf", type="Q3_K")
    tiny.save("gpt2", tmp_path / "gpt2")
    with pytest.raises(ModelFileError, match="gpt2 model cannot be written as GGUF"):
        export_gguf(tmp_path / "gpt2", tmp_path / "x.gguf")
    tiny.save("mistral", tmp_path / "mistral")
    with pytest.raises(ModelFileError, match="window"):
        export_gguf(tmp_path / "mistral", tmp_path / "x.gguf")
    tiny.save("llama", tmp_path / "llama")
    with pytest.raises(ModelFileError, match=r"no tokenizer\.json"):
        export_gguf(tmp_path / "llama", tmp_path / "x.gguf")
    small.save_vocabulary(tmp_path / "llama")
    with pytest.raises(ModelFileError, match="do not belong together"):
        export_gguf(tmp_path / "llama", tmp_path / "x.gguf")
    monkeypatch.setitem(tiny._SHAPE, "vocab_size", 300)
    tiny.save("llama", tmp_path / "llama")
    small.save_vocabulary(tmp_path / "llama", pattern=r"\p{L}{1,2}|[^\p{L}]+")
    with pytest.raises(ModelFileError, match="has no name for this"):
        export_gguf(tmp_path / "llama", tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


def test_every_known_cut_is_recognized():
    """Every pre-tokenizer splits the probe text differently, so that it can be identified."""
    from unspool.text.tokenizer import gguf
    from unspool.text.tokenizer.pretokenizers import PRETOKENIZERS, byte_level_splits

    # bailingmoe writes what qwen2 does in another way.
    names = [name for name in PRETOKENIZERS if not name.startswith(("bailingmoe", "llada"))]
    cuts = {PRETOKENIZERS[name] for name in names if PRETOKENIZERS[name].byte_level}
    pieces = {cut.patterns: gguf._split_probe(byte_level_splits(cut.patterns)) for cut in cuts}
    assert len({tuple(result) for result in pieces.values()}) == len(pieces) > 5


def test_packed_numbers_of_recurrent_layers_are_run_by_llama_cpp(tmp_path: Path):
    small.save_model(
        tmp_path / "model", "Qwen3_5",
        **{**tiny_recurrent._DELTA, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
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
        assert np.corrcoef(message.ravel(), our_logits(path, PROMPTS).ravel())[0, 1] > alike


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
