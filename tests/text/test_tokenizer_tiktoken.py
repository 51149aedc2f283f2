"""OpenAI's vocabularies: equal to the tiktoken package."""

from __future__ import annotations

import hashlib
import shutil
from functools import cache
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given
from tiktoken_ext import openai_public

from helpers import assets
from helpers.tokenizer_texts import SAME_EVERY_RUN, TEXTS
from unspool.errors import ModelFileError, SettingsError
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


@pytest.mark.parametrize("name", FILES)
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


def test_published_ids(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, ids in FACTS.items():
        assert load_tokenizer(name).encode("How do transformers work?") == ids
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
