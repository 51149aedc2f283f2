"""OpenAI's vocabularies: equal to the tiktoken package."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiktoken
from hypothesis import given
from test_tokenizer_json import load_tokenizer as from_json
from tiktoken_ext import openai_public

from helpers import assets
from helpers.tokenizer_texts import SAME_EVERY_RUN, TEXTS, check_merges
from unspool.errors import ModelFileError, SettingsError
from unspool.text.tokenizer.bpe import merge_steps
from unspool.text.tokenizer.tokenizer import Tokenizer

FACTS = {
    "cl100k": [4438, 656, 87970, 990, 30],
    "o200k": [5299, 621, 152728, 1101, 30],
    "gpt2": [2437, 466, 6121, 364, 670, 30],
}
FILES = {"cl100k": "cl100k_base", "o200k": "o200k_base", "gpt2": "r50k_base"}


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rank files under the names that tiktoken gives them: the hash of their address."""
    folder = tmp_path_factory.mktemp("tiktoken")
    for file in set(FILES.values()):
        url = f"https://openaipublic.blob.core.windows.net/encodings/{file}.tiktoken"
        shutil.copy(
            assets.tiktoken_ranks() / f"{file}.tiktoken",
            folder / hashlib.sha1(url.encode()).hexdigest(),
        )
    return folder


@cache
def load_tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_tiktoken(assets.tiktoken_ranks() / f"{FILES[name]}.tiktoken")


def load_reference(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tiktoken.Encoding:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(folder))
    factory = getattr(openai_public, FILES[name])
    return tiktoken.Encoding(**factory())


@pytest.mark.parametrize("name", ["cl100k", pytest.param("o200k", marks=pytest.mark.slow), "gpt2"])
def test_equal_to_tiktoken(name: str, cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = load_reference(name, cache_folder, monkeypatch)
    coded = load_tokenizer(name)
    assert coded.vocab_size == oracle.n_vocab
    assert coded.special_tokens == oracle._special_tokens
    for token in [*range(1000), *range(0, oracle.n_vocab, 97)]:
        try:
            assert coded.token_bytes(token) == oracle.decode_single_token_bytes(token)
        except KeyError:
            assert coded.token_bytes(token) == b""

    @SAME_EVERY_RUN
    @given(TEXTS)
    def check(text: str) -> None:
        ids = coded.encode(text)
        assert ids == oracle.encode_ordinary(text)
        assert coded.decode(ids) == text
        assert coded.encode(text, specials=True) == oracle.encode(text, allowed_special="all")

    check()
    assert coded.encode("How do transformers work?") == FACTS[name]
    if name == "gpt2":
        check_merges(coded)
        (word,) = merge_steps(coded, " the")  # a word that is a token needs no merges
        assert word.start == word.pieces == (b" the",) and word.merges == ()


def test_published_ids(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(cache_folder))  # one of them by its name
    assert Tokenizer.from_tiktoken("r50k").encode("How do transformers work?") == FACTS["gpt2"]


def test_files_may_have_plain_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(assets.tiktoken_ranks()))
    assert Tokenizer.from_tiktoken("gpt2").encode("How do") == FACTS["gpt2"][:2]


def test_the_end_of_a_text_is_known() -> None:
    coded = load_tokenizer("cl100k")
    assert coded.eos_id == 100257 and coded.end_ids == {100257}
    assert not coded.add_bos and coded.encode_prompt("a") == coded.encode("a")
    assert 100257 not in coded.encode("<|endoftext|>")
    assert coded.encode("<|endoftext|>", specials=True) == [100257]


def test_missing_and_damaged_rank_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    with pytest.raises(ModelFileError, match=r"cl100k_base\.tiktoken"):
        Tokenizer.from_tiktoken("cl100k")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(ModelFileError, match="TIKTOKEN_CACHE_DIR"):
        Tokenizer.from_tiktoken("o200k")
    with pytest.raises(SettingsError, match="unknown encoding 'cl99'"):
        Tokenizer.from_tiktoken("cl99")
    with pytest.raises(ModelFileError, match="cannot read"):
        Tokenizer.from_tiktoken(tmp_path / "gpt2.tiktoken")
    mine = tmp_path / "mine.tiktoken"
    for broken in ("no ranks at all here\n", "!!! 1\n", "YQ== x\n", "YQ== 1\n", "\x00"):
        mine.write_text(broken)
        with pytest.raises(ModelFileError):
            Tokenizer.from_tiktoken(mine, kind="gpt2")
    with pytest.raises(SettingsError, match="kind"):
        Tokenizer.from_tiktoken(mine)
    wrong = assets.tiktoken_ranks() / "o200k_base.tiktoken"
    with pytest.raises(ModelFileError, match="different encoding"):
        Tokenizer.from_tiktoken(wrong, kind="gpt2")


# -- A vocabulary written out as GGUF metadata from its tokenizer.json ----------------------------


def described(family: str) -> dict[str, Any]:
    path = assets.tokenizer_json_folder() / family / "tokenizer.json"
    read: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return read


def types_of(tokens: list[str], added: list[dict[str, Any]]) -> list[int]:
    types = [6 if re.fullmatch("<0x[0-9A-F]{2}>", token) else 1 for token in tokens]
    for token in added:
        types[token["id"]] = 3 if token["special"] else 4
    return types


def gemma_metadata() -> dict[str, Any]:
    read = described("gemma")
    tokens = sorted(read["model"]["vocab"], key=read["model"]["vocab"].get)
    types = types_of(tokens, read["added_tokens"])
    # The converter writes tokens that are matched as they stand with real spaces.
    tokens = [
        t.replace("▁", " ") if kind == 4 else t for t, kind in zip(tokens, types, strict=True)
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": -np.arange(len(tokens), dtype=np.float32),
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_space_prefix": False,
    }


@pytest.mark.slow  # reading the vocabulary twice takes six seconds
def test_equal_to_the_json_form() -> None:
    rebuilt = Tokenizer.from_gguf(gemma_metadata())
    original = from_json("gemma")
    assert rebuilt.kind == original.kind and len(rebuilt) == len(original)

    @SAME_EVERY_RUN
    @given(TEXTS)
    def check(text: str) -> None:
        if "▁" in text:
            return  # a written ▁ meets the tokens with ▁ in one form and with spaces in the other
        ids = rebuilt.encode(text)
        assert ids == original.encode(text)
        assert rebuilt.decode(ids) == original.decode(ids)

    check()
