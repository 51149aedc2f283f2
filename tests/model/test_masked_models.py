"""Models that look ahead, from the files to the commands: what is said, what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Library
from typer.testing import CliRunner

import unspool
from helpers import assets, tiny, tiny_masked
from helpers.gguf_converted import MASKED, converted_models
from helpers.paged_texts import config as small_config
from unspool import native
from unspool.backends.cpu.model import load_cpu
from unspool.backends.step import Backend, LoadedModel, ObserveRequest, StepBatch, TableUpdates
from unspool.backends.torch.backend import TorchModel
from unspool.cli.main import app_with
from unspool.errors import ModelFileError, UnspoolError
from unspool.model.config import ModelConfig
from unspool.model.files.checkpoint import load_transformer, open_checkpoint, save_checkpoint
from unspool.model.files.config_json import config_from_hf
from unspool.model.files.export import check_writable, save_gguf
from unspool.model.layers.transformer import Transformer
from unspool.model.weights import parameter_count, weight_shapes
from unspool.train.learning.forward import AttentionMask, hidden_states


@pytest.mark.parametrize(
    ("nonsense", "word"),
    [
        ({"sight": "far"}, "sight"),
        ({"sight": "block"}, "block"),
        ({"sight": "block", "block": 2049}, "block"),
        ({"block": -1}, "block"),
        ({"mask_id": 100}, "mask_id"),
        ({"mask_id": -1}, "mask_id"),
        ({"mask_id": "[MASK]"}, "mask_id"),
        ({"norm_sums": True, "norm_after": True}, "norm_sums"),
        ({"norm_sums": True, "parallel": True}, "norm_sums"),
    ],
)
def test_settings_that_make_no_sense(nonsense: dict[str, Any], word: str):
    with pytest.raises(ModelFileError, match=word):
        small_config(**nonsense)


def test_a_config_of_our_own_keeps_how_far_it_looks():
    config = small_config(sight="block", block=4, mask_id=0, shifted=True)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_how_far_a_token_sees():
    complete, block = ({"sight": "whole"}, {"sight": "block", "block": 4})
    result = [
        [small_config(**sight).visible_end(at, 10) for at in (0, 3, 4, 9)]
        for sight in ({}, complete, block)
    ]
    assert result == [[1, 4, 5, 10], [10] * 4, [4, 4, 8, 10]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"alibi": True}, "alibi is true"),
        ({"block_type": "sequential"}, 'only where it is "llama"'),
        ({"mask_token_id": 259}, "mask_id must be .* got 259"),
        ({"unspool": {"sight": "both"}}, "sight must be .* got 'both'"),
        ({"unspool": 3}, "unspool must be an object, got 3"),
        ({"d_model": None}, "d_model"),
    ],
)
def test_files_that_say_what_we_cannot_do(changes: dict[str, Any], words: str):
    with pytest.raises(ModelFileError, match=words):
        config_from_hf({**tiny_masked.LLADA_CONFIG, **changes})


def test_causal_berts_and_dreams_with_blocks_are_refused():
    small = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    small |= {"max_position_embeddings": 8, "intermediate_size": 8}
    with pytest.raises(ModelFileError, match="is_decoder"):
        config_from_hf({"model_type": "bert", **small, "is_decoder": True})
    with pytest.raises(ModelFileError, match=r"block_size is 32.*without it"):
        config_from_hf({"model_type": "Dream", **small, "block_size": 32})


# -- the mask token ----------------------------------------------------------------------------


def masked_folder(tmp_path: Path, name: str, **beside: Any) -> Path:
    """A checkpoint whose config.json names no mask token, with other files beside it."""
    folder = tmp_path / name
    tiny_masked.save(name, folder)
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("mask_token_id", None)
    (folder / "config.json").write_text(json.dumps(raw))
    for file, content in beside.items():
        (folder / f"{file}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    "beside",
    [
        {
            "tokenizer_config": {
                "mask_token": "<|mask|>",
                "added_tokens_decoder": {"7": {"content": "x"}, "201": {"content": "<|mask|>"}},
            }
        },
        {
            "special_tokens_map": {"mask_token": {"content": "[MASK]"}},
            "tokenizer": {"added_tokens": [{"content": "[MASK]", "id": 201}]},
        },
        {
            "tokenizer_config": {"mask_token": "[MASK]"},
            "tokenizer": {"model": {"vocab": {"a": 1, "[MASK]": 201}}},
        },
        {"tokenizer": {"added_tokens": [], "model": {"vocab": {"[MASK]": 201}}}},
    ],
    ids=["config", "added", "vocabulary", "nobody"],
)
def test_the_vocabulary_names_the_mask_token(tmp_path: Path, beside: dict[str, Any]):
    assert open_checkpoint(masked_folder(tmp_path, "a2d-qwen2", **beside)).config.mask_id == 201


def test_nobody_names_the_mask_token(tmp_path: Path):
    assert open_checkpoint(masked_folder(tmp_path, "sdar")).config.mask_id is None
    usual = {"model_type": "llada", "d_model": 8, "n_heads": 1, "n_layers": 1}
    usual |= {"embedding_size": 126464, "max_sequence_length": 16}
    assert config_from_hf(usual).mask_id == 126336, "what all of them have"


def test_the_name_tells_of_blocks_where_the_files_do_not(tmp_path: Path):
    for name, sight in {"Qwen3-0.6B-diffusion-bd3lm-v0.1": "block", "mdlm": "whole"}.items():
        tiny_masked.save("a2d-qwen3", tmp_path / name)
        config = open_checkpoint(tmp_path / name).config
        assert (config.sight, config.block) == (sight, 32 if sight == "block" else 0)


def test_old_files_call_a_norm_gamma_and_beta(tmp_path: Path):
    expected = tiny_masked.save("bert", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    old = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): tensor
        for name, tensor in weights.items()
    }
    assert old.keys() != weights.keys()
    save_file(old, tmp_path / "model.safetensors")
    tokens = torch.arange(3, 30)[None]
    result = load_transformer(open_checkpoint(tmp_path))(tokens)
    assert float((result - expected(tokens)).abs().max()) < 1e-4


# -- what people meet -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "advice"), [("sdar", r"lm\.diffuse.*lm\.fill"), ("bert", "no mask token")]
)
def test_writing_from_left_to_right_is_refused(tmp_path: Path, name: str, advice: str):
    tiny_masked.save(name, tmp_path)
    with unspool.load(tmp_path) as lm:
        for ask in (
            lambda: lm.generate([5, 6]),
            lambda: lm.stream([5, 6]),
            lambda: lm.samples([5, 6], 2),
            lambda: lm.beam([5, 6]),
            lambda: lm.score([5, 6]),
            lambda: lm.embed([5, 6]),
            lambda: lm.look([5, 6]),
        ):
            with pytest.raises(UnspoolError, match=advice):
                ask()


def test_what_a_model_is(tmp_path: Path):
    tiny_masked.save("fast_dllm_qwen", tmp_path)
    listing = CliRunner().invoke(app_with(), ["models", "show", str(tmp_path)])
    assert "to the end of its block of 8; predicts the next position" in listing.output
    assert str(tiny_masked.MASK) in listing.output


def test_berts_vocabulary_beside_berts_weights(tmp_path: Path):
    """Real pieces on random weights: encoded as the library does, decoded to the same words."""
    folder = masked_folder(tmp_path, "bert")
    for file in (assets.tokenizer_json_folder() / "bert").iterdir():
        shutil.copy(file, folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "vocab_size": 30522}))
    weights = load_file(folder / "model.safetensors")
    for name in ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias"):
        weights[name] = weights[name].repeat(120, *[1] * (weights[name].ndim - 1))[:30522]
    save_file(
        {name: tensor.clone() for name, tensor in weights.items()}, folder / "model.safetensors"
    )
    with unspool.load(folder) as lm:
        library = Library.from_file(str(folder / "tokenizer.json"))
        text = "the unspoolable [MASK] sat on 3 mats, didn't it?"
        expected = library.encode(text).ids
        start, end = lm.tokenizer.bos_id, lm.tokenizer.eos_id
        assert [start, *lm.tokenizer.encode(text, specials=True), end] == expected
        assert lm.config.mask_id in expected
        plain = lm.tokenizer.encode("the unspoolable cat sat")
        assert lm.tokenizer.decode(plain) == "the unspoolable cat sat"


def test_a_vocabulary_from_before_tokenizer_json(tmp_path: Path):
    """Pieces and merges in files of their own, as Dream has them: cut as transformers cuts them."""
    source = assets.tokenizer_json_folder() / "qwen" / "tokenizer.json"
    complete = json.loads(source.read_text(encoding="utf-8"))
    model, size = complete["model"], 20_000  # of 150,000 pieces, which would take seconds to read
    vocab = {piece: number for piece, number in model["vocab"].items() if number < size}
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    merges = [pair for pair in pairs if pair.replace(" ", "") in vocab]
    model |= {"vocab": vocab, "merges": merges}
    for number, token in enumerate(complete["added_tokens"], size):
        token["id"] = number
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges), encoding="utf-8")
    added = {str(t["id"]): {**t, "id": None} for t in complete["added_tokens"]}
    settings = {"added_tokens_decoder": added, "eos_token": "<|im_end|>"}
    settings["tokenizer_class"] = "DreamTokenizer"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    model = unspool.Tokenizer.from_file(tmp_path)
    library = Library.from_str(json.dumps(complete))
    reference = transformers.Qwen2TokenizerFast(tokenizer_object=library)
    for text in ("It's 1234 apples,\n\n  naïve — 東京 🙂", "e\u0301tude", "<|im_end|> ends"):
        assert model.encode(text, specials=True) == reference.encode(text, add_special_tokens=False)
    assert model.decode(model.encode("naïve 東京 🙂")) == "naïve 東京 🙂"
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "OtherTokenizer"}')
    with pytest.raises(ModelFileError, match=r"OtherTokenizer.*DreamTokenizer"):
        unspool.Tokenizer.from_file(tmp_path)


def test_what_the_guide_shows(capsys: pytest.CaptureFixture[str]):
    page = Path(__file__).parents[2] / "docs/reference/diffusion-options.md"
    block = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    exec(compile(block, page.name, "exec"), {})
    listing = [line.split("# ")[1] for line in block.splitlines() if "# " in line]
    assert capsys.readouterr().out.splitlines() == listing


def test_llama_cpp_knows_no_blocks(tmp_path: Path):
    config = small_config(family="llama", sight="block", block=4)
    with pytest.raises(ModelFileError, match="block attention mask"):
        check_writable(config, "Q8_0")


# -- Every family that looks ahead gives transformers' logits -------------------------------------


transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
CLOSE = 2e-4  # 5e-5 at the most was seen, in logits of size 13
CLOSE_FAR = 1e-3  # in long texts, where angles are large
BERTS = [name for name, family in tiny_masked.FAMILIES.items() if family.is_bert]


@dataclass(frozen=True)
class Case:
    name: str
    checkpoint: Any
    model: Transformer
    tokens: torch.Tensor
    logits: torch.Tensor  # of transformers


def some_tokens(count: int = 45) -> torch.Tensor:
    return torch.randint(3, 257, (1, count), generator=torch.Generator().manual_seed(1))


def difference(a: Any, b: Any) -> float:
    assert a.shape == b.shape
    return float(np.abs(np.asarray(a) - np.asarray(b)).max())


@pytest.fixture(scope="module", params=tiny_masked.FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder, tokens = tmp_path_factory.mktemp(request.param), some_tokens()
    logits = tiny_masked.save(request.param, folder)(tokens)
    checkpoint = open_checkpoint(folder)
    return Case(request.param, checkpoint, load_transformer(checkpoint), tokens, logits)


def loaded(kind: str, checkpoint: Any) -> LoadedModel:
    if kind == "torch":
        return TorchModel(load_transformer(checkpoint))
    if native.missing_reason() is not None:
        pytest.skip(str(native.missing_reason()))
    return load_cpu(checkpoint, store="float32", kv_bits=32, threads=2)


def at_once(
    backend: Backend, tokens: torch.Tensor, ends: Any, look: ObserveRequest | None = None
) -> Any:
    """A whole text in one run, in pages that lie in no order."""
    count = tokens.shape[1]
    pages = np.random.default_rng(0).permutation(backend.page_count)[: -(-count // 16)]
    batch = StepBatch(
        tokens[0].numpy(),
        np.arange(count),
        ends,
        np.array([0, count]),
        np.array([3]),
        table_updates=TableUpdates(np.full(len(pages), 3), np.arange(len(pages)), pages),
        logits_indices=np.arange(count),
        observe=look,
    )
    return backend.launch(batch).result()


# -- what is computed ------------------------------------------------------------------------


def test_what_the_files_say(case: Case):
    result = case.checkpoint.config.to_dict()
    expected = tiny_masked.FAMILIES[case.name].expected
    assert {key: result[key] for key in expected} == expected


def test_the_plain_transformer_and_the_forward_pass_of_training(case: Case):
    model, tokens = case.model, case.tokens
    assert case.logits.std() > 0.2, "logits of a constant model would prove nothing"
    assert difference(model(tokens), case.logits) < CLOSE
    x = hidden_states(model, tokens, AttentionMask.build(model.config, tokens))
    assert difference(model.logits(x), case.logits) < CLOSE
    assert {k: tuple(v.shape) for k, v in model.state_dict().items()} == weight_shapes(model.config)
    assert parameter_count(model.config) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_pages(case: Case, kind: str):
    backend = loaded(kind, case.checkpoint).backend(memory=4 << 20, context=128)
    count = case.tokens.shape[1]
    ends = np.array([case.checkpoint.config.visible_end(at, count) for at in range(count)])
    assert difference(at_once(backend, case.tokens, ends).logits, case.logits[0]) < CLOSE


@pytest.mark.parametrize("name", ["bert", "modernbert", "llada"])
def test_both_backends_see_the_same_inside(tmp_path: Path, name: str):
    tiny_masked.save(name, tmp_path)
    checkpoint, tokens = open_checkpoint(tmp_path), some_tokens()
    count = tokens.shape[1]
    every, ends = np.arange(count), np.full(count, count)
    look = ObserveRequest(residuals=every[::3], attention=every[1::4], parts=every[::7])
    observed = []
    for kind in ("torch", "native"):
        backend = loaded(kind, checkpoint).backend(memory=4 << 20, context=128)
        observed.append(at_once(backend, tokens, ends, look).observations)
    model, reference = observed
    assert difference(model.residuals, reference.residuals) < 3e-4
    assert difference(model.parts, reference.parts) < 3e-4
    for single, other in zip(model.attention, reference.attention, strict=True):
        assert single.shape[-1] == count
        assert difference(single, other) < CLOSE
        assert difference(single.sum(-1), np.ones(single.shape[:2])) < CLOSE


@pytest.mark.parametrize("kind", ["torch", "native"])
def test_a_window_reaches_ahead_in_long_texts(tmp_path: Path, kind: str):
    """More than a segment of keys and a chunk of queries; then single positions again, as a canvas
    computes them: masked keys are in other segments."""
    expected = tiny_masked.save("modernbert", tmp_path)
    tokens, count = some_tokens(1300), 1300
    backend = loaded(kind, open_checkpoint(tmp_path)).backend(memory=64 << 20, context=2048)
    reference = expected(tokens)[0]
    result = at_once(backend, tokens, np.full(count, count)).logits
    assert difference(result, reference) < CLOSE_FAR
    for place in (0, 509, 700, count - 1):
        arrays = ([int(tokens[0, place])], [place], [count], [0, 1], [3])
        again = StepBatch(*map(np.array, arrays), logits_indices=np.array([0]))
        assert difference(backend.launch(again).result().logits[0], reference[place]) < CLOSE_FAR


# -- files -----------------------------------------------------------------------------------


def test_saved_and_loaded_again(case: Case, tmp_path: Path):
    save_checkpoint(case.model, tmp_path, largest_file=40_000)
    again = open_checkpoint(tmp_path)
    assert again.config == case.checkpoint.config
    assert difference(load_transformer(again)(case.tokens), case.model(case.tokens)) == 0
    if case.name in BERTS:
        reference = transformers.AutoModelForMaskedLM.from_pretrained(
            tmp_path, dtype=torch.float32, attn_implementation="eager"
        )
        with torch.no_grad():
            assert difference(reference(case.tokens).logits, case.logits) < CLOSE


def test_a_causal_family_taught_to_look_ahead_is_saved_with_that(tmp_path: Path):
    tiny.save("qwen3", tmp_path / "causal")
    causal = load_transformer(open_checkpoint(tmp_path / "causal"))
    taught = {"sight": "block", "block": 4, "mask_id": 7, "shifted": True}
    twin = Transformer(replace(causal.config, **taught))
    twin.load_state_dict(causal.state_dict())
    save_checkpoint(twin, tmp_path / "twin")
    again = open_checkpoint(tmp_path / "twin").config
    assert {name: getattr(again, name) for name in taught} == taught
    assert open_checkpoint(tmp_path / "causal").config.sight == "causal"


@pytest.mark.parametrize("name", MASKED)
def test_gguf(tmp_path_factory: pytest.TempPathFactory, name: str, tmp_path: Path):
    """From llama.cpp's converter, and written again by `save_gguf`."""
    expected = tiny_masked.save(name, tmp_path / "original")
    tokens, config = some_tokens(), tiny_masked.FAMILIES[name].expected
    model = load_transformer(open_checkpoint(converted_models(tmp_path_factory) / f"{name}.gguf"))
    assert (model.config.sight, model.config.shifted) == ("whole", config["shifted"])
    assert difference(model(tokens), expected(tokens)) < CLOSE
    folder = open_checkpoint(tmp_path / "original")
    save_gguf(load_transformer(folder), tmp_path / "again.gguf", type="F32", vocabulary={})
    again = open_checkpoint(tmp_path / "again.gguf")
    assert difference(load_transformer(again)(tokens), expected(tokens)) < CLOSE
    settings = (again.config.sight, again.config.mask_id, again.config.shifted)
    assert settings == ("whole", tiny_masked.MASK, config["shifted"])
