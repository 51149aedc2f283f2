"""A tokenizer learned from text: the library against the plain trainer, and what is saved."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.errors import SettingsError
from unspool.text.tokenizer.bpe import learn_merges
from unspool.text.tokenizer.pieces import byte_level_bytes
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.tokenizer import (
    PRETOKENIZERS,
    TokenizerSettings,
    count_words,
    make_tokenizer,
    save_tokenizer_files,
    train_bpe,
)

TEXT = Path(__file__).parents[1].joinpath("data", "training_text.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNSPOOL_CACHE", str(tmp_path / "cache"))


def library_merges(texts: list[str], chosen: TokenizerSettings) -> list[tuple[bytes, bytes]]:
    described = json.loads(train_bpe(texts, chosen).to_str())
    merges = described["model"]["merges"]
    return [(byte_level_bytes(unread), byte_level_bytes(right)) for unread, right in merges]


@pytest.mark.parametrize("cut", PRETOKENIZERS)
def test_the_library_learns_what_the_plain_trainer_learns(cut: str) -> None:
    chosen = TokenizerSettings(vocab_size=900, pretokenizer=cut)
    plain = list(learn_merges(count_words([TEXT], cut), 900 - 259))
    assert len(plain) == 641
    assert [merge.pair for merge in plain] == library_merges([TEXT], chosen)
    assert [merge.number for merge in plain] == list(range(641))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("ab cé1\n", max_size=40), min_size=1, max_size=8))
def test_ties_and_repeated_letters(texts: list[str]) -> None:
    """Few letters: nearly all counts are equal, and pairs overlap themselves."""
    chosen = TokenizerSettings(vocab_size=290)
    plain = [merge.pair for merge in learn_merges(count_words(texts, "qwen2"), 31)]
    assert plain == library_merges(texts, chosen)


def test_each_merge_is_the_most_frequent_pair() -> None:
    """Counted anew from the words at every step, with nothing kept between them."""
    words = {b"hug": 10, b"pug": 5, b"pun": 12, b"bun": 4, b"hugs": 5}
    split = {word: [bytes([byte]) for byte in word] for word in words}
    for merge in learn_merges(words, 7):
        counts: Counter[tuple[bytes, bytes]] = Counter()
        for word, pieces in split.items():
            for pair in pairwise(pieces):
                counts[pair] += words[word]
        assert counts[merge.pair] == merge.count == max(counts.values())
        for word, pieces in split.items():
            text = b"\0".join(pieces).replace(b"\0".join(merge.pair), merge.piece)
            split[word] = text.split(b"\0")
    assert split[b"hugs"] == [b"hugs"] and split[b"bun"] == [b"bun"]
    assert list(learn_merges({b"a": 3}, 5)) == []


def test_the_folder_is_read_by_us_and_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "text.md").write_text(TEXT)
    created = make_tokenizer(tmp_path / "text.md", TokenizerSettings(vocab_size=600))
    reference = AutoTokenizer.from_pretrained(created.folder)
    actual = created.tokenizer
    assert actual.vocab_size == len(reference) == 600 and actual.kind == "byte-level BPE"
    assert actual.token_id("<|endoftext|>") == actual.eos_id == reference.eos_token_id == 0
    assert actual.end_ids == {0, 2} and not actual.add_bos
    for text in (TEXT[:3000], "naïve 🍁 <|im_end|>\t\n 12345", "  spaces  "):
        assert actual.decode(actual.encode(text)) == text
        assert actual.encode(text, specials=True) == reference.encode(text)
    assert 0 not in actual.encode("<|endoftext|>")
    assert 1.5 < created.bytes_per_token < 6
    said = [{"role": "user", "content": "Hi"}]
    rendered = reference.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    created.tokenizer.save(tmp_path / "again")  # as a checkpoint does
    assert Tokenizer.from_file(tmp_path / "again").encode(TEXT) == actual.encode(TEXT)


def test_made_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from unspool.train.data import tokenizer as module

    file = tmp_path / "a.txt"
    file.write_text(TEXT)
    first = make_tokenizer(file, TokenizerSettings(vocab_size=400))

    def no_learning(*given: Any) -> Any:
        raise AssertionError("learned again")

    with monkeypatch.context() as patch:
        patch.setattr(module, "train_bpe", no_learning)
        file.rename(tmp_path / "b.txt")  # another name, the same text
        again = make_tokenizer(tmp_path / "b.txt", TokenizerSettings(vocab_size=400))
        assert again.folder == first.folder and again.bytes_per_token == first.bytes_per_token
    (tmp_path / "b.txt").write_text(TEXT + "!")
    assert make_tokenizer(tmp_path / "b.txt", TokenizerSettings(400)).folder != first.folder
    assert make_tokenizer(tmp_path / "b.txt", TokenizerSettings(401)).tokenizer.vocab_size == 401


def test_what_is_held_out_is_not_learned_from(tmp_path: Path) -> None:
    lines = [{"text": f"w{n:03d} " * 50} for n in range(100)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    created = make_tokenizer(tmp_path / "a.jsonl", TokenizerSettings(2000), held_out=0.2)
    complete = [created.tokenizer.token_id(f" w{n:03d}") for n in range(100)]
    assert created.tokenizer.vocab_size < 2000  # there was no more to learn
    # Digits are words of their own, so no token holds a number; the plain cut shows who was seen.
    assert all(token is None for token in complete)
    chosen = TokenizerSettings(2000, "gpt2", most_bytes=10**9)
    created = make_tokenizer(tmp_path / "a.jsonl", chosen, held_out=0.2)
    observed = sum(created.tokenizer.token_id(f"{n:03d}") is not None for n in range(100))
    assert 80 <= observed < 100


def test_settings(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=">= 259"):
        TokenizerSettings(vocab_size=100)
    with pytest.raises(SettingsError, match="choose from gpt2, qwen2"):
        TokenizerSettings(pretokenizer="words")
    with pytest.raises(SettingsError, match="all different"):
        TokenizerSettings(specials=("<a>", "<a>"))
    chosen = TokenizerSettings(300, specials=("<eos>", "<mask>"), chat_template=None)
    save_tokenizer_files(train_bpe([TEXT], chosen), chosen, tmp_path)
    result = Tokenizer.from_file(tmp_path)
    assert result.special_tokens == {"<eos>": 0, "<mask>": 1} and result.eos_id == 0
    assert result.chat_template is None
