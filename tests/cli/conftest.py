"""Shared by the tests of the command line: a tiny model, and commands run in this process."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unspool as package
from unspool.cli.main import _exit_code

TEXT = """The scheduler plans rows, and the batch builder makes a step of them. A branch is a path
of the tree: a node is one full page of tokens. The red row and the blue row are in a page. It is
the same with a text: what was computed of it is cached, as long as there is room, and is computed
again later. Tokens may be provisional: computed, replaced, until the text is done."""
TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
SPECIALS = ["<|end|>", "<|turn|>", "<|mask|>"]
WIDTH, INNER, LAYERS, HEADS, KV_HEADS = 48, 80, 2, 6, 2


def write_model(folder: Path, context: int = 512) -> Path:
    """Write a random Llama with a BPE vocabulary and a chat template; needs no torch."""
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIALS,
        initial_alphabet=[*map(chr, range(33, 127)), "Ġ", "Ċ", "č"],  # no control characters
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    vocab_size = tokenizer.get_vocab_size()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
        "vocab_size": vocab_size, "hidden_size": WIDTH, "intermediate_size": INNER,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": context,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "eos_token_id": 0,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    rng, kv_width, ones = np.random.default_rng(0), WIDTH // HEADS * KV_HEADS, np.ones(WIDTH)
    shapes = {
        "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (kv_width, WIDTH),
        "self_attn.v_proj": (kv_width, WIDTH), "self_attn.o_proj": (WIDTH, WIDTH),
        "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH),
        "mlp.down_proj": (WIDTH, INNER),
    }  # fmt: skip
    weights = {
        "model.embed_tokens.weight": rng.standard_normal((vocab_size, WIDTH)),
        "lm_head.weight": rng.standard_normal((vocab_size, WIDTH)) * 3 / WIDTH**0.5,
        "model.norm.weight": ones,
    }
    for layer in (f"model.layers.{number}" for number in range(LAYERS)):
        for name, shape in shapes.items():
            weights[f"{layer}.{name}.weight"] = rng.standard_normal(shape) / shape[1] ** 0.5
        weights[f"{layer}.input_layernorm.weight"] = ones
        weights[f"{layer}.post_attention_layernorm.weight"] = ones
    arrays = {name: array.astype(np.float32) for name, array in weights.items()}
    save_file(arrays, str(folder / "model.safetensors"))
    return folder


@pytest.fixture(scope="session")
def words_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with words and a chat template, for child processes."""
    return write_model(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="session")
def long_words_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a long context: it generates until it is stopped."""
    return write_model(tmp_path_factory.mktemp("long"), context=65536)


@pytest.fixture(scope="session")
def words(words_folder: Path) -> Any:
    return package.load(words_folder, backend="native", memory=8 << 20)


@pytest.fixture
def model(words: Any) -> Any:
    """The model that commands run on; a module may override it."""
    return words


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def unspool(model: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process on a loaded model; returns exit code, stdout, stderr."""
    monkeypatch.setattr("unspool.loading.load", lambda *args, **options: model)
    return command_runner(monkeypatch, capfd)


@pytest.fixture
def bare_unspool(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The same without a model."""
    return command_runner(monkeypatch, capfd)


def command_runner(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: str, stdin: str | bytes | None = None) -> tuple[int, str, str]:
        data = stdin.encode() if isinstance(stdin, str) else stdin or b""
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        capfd.readouterr()
        code = _exit_code(arguments, piped=stdin is not None)
        return code, *capfd.readouterr()

    return run
