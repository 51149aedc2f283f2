"""tokenizer.json: equal to the library on ten families, and to the same vocabulary as GGUF."""

from __future__ import annotations

import json
import threading
import unicodedata
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from test_tokenizer_gguf import tokenizer as from_gguf
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from helpers import assets
from helpers.tokenizer_texts import SAME_EVERY_RUN, TEXTS, TRIED_TEXTS, check_batch, check_merges
from unspool.errors import ModelFileError, UnspoolError
from unspool.text.tokenizer.pieces import byte_characters
from unspool.text.tokenizer.tokenizer import Tokenizer

# Gemma's vocabulary takes six seconds to read, here and in transformers.
GEMMA = pytest.param("gemma", marks=pytest.mark.slow)
FAMILIES = ["llama2", "llama3", GEMMA, "mistral", "deepseek", "qwen", "bert", "t5"]
ENDS = {
    "llama3": {"<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"},
    "qwen": {"<|im_end|>", "<|endoftext|>"},
    "gemma": {"<eos>", "<end_of_turn>"},
    "mistral": {"</s>"},
    "llama2": {"</s>"},
    "deepseek": {"<｜end▁of▁sentence｜>"},
}
KINDS = {"bert": "WordPiece", "t5": "Unigram"} | dict.fromkeys(
    ["gemma", "llama2", "mistral"], "SentencePiece BPE"
)


@cache
def load_tokenizer(family: str) -> Tokenizer:
    return Tokenizer.from_file(assets.tokenizer_json_folder() / family)


@cache
def in_transformers(family: str) -> PreTrainedTokenizerFast:
    path = assets.tokenizer_json_folder() / family / "tokenizer.json"
    return PreTrainedTokenizerFast(tokenizer_file=str(path))


def load_reference(family: str) -> Library:
    return in_transformers(family).backend_tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(family: str) -> None:
    """All in one test, because reading a vocabulary takes seconds."""
    coded, library = load_tokenizer(family), load_reference(family)
    assert coded.kind == KINDS.get(family, "byte-level BPE")
    assert len(coded) == max(library.get_vocab().values()) + 1
    if family in ENDS:
        assert ENDS[family] <= {coded.token_text(token) for token in coded.end_ids}
        assert family == "qwen" or len(ENDS[family]) == len(coded.end_ids)
        check_prompt(family)
    if family in ("qwen", "llama2", "mistral"):
        check_merges(coded)
        check_batch(coded)
    check_control_tokens(family)

    @SAME_EVERY_RUN
    @given(TEXTS)
    def check(text: str) -> None:
        check_encoding(family, text)
        if family not in ("bert", "t5"):
            check_round_trip(family, text)

    check()


def check_encoding(family: str, text: str) -> None:
    """Equal to the library."""
    coded = load_tokenizer(family)
    if family == "llama2" and any(control in text for control in coded.special_tokens):
        return  # see test_control_tokens_are_found_as_written
    expected = load_reference(family).encode(text, add_special_tokens=False).ids
    assert coded.encode(text, specials=True) == expected
    plain = coded.encode(text)
    if coded.special_ids.isdisjoint(expected):
        assert plain == expected
    assert coded.special_ids - {coded.unk_id} <= coded.special_ids - set(plain)


def check_round_trip(family: str, text: str) -> None:
    coded = load_tokenizer(family)
    if family == "mistral" and text[:1] in (" ", "▁"):
        return  # its rules add no space before one, so 'a' and ' a' are the same to it
    # SentencePiece writes a space as ▁, so a ▁ in the text comes back as a space.
    expected = text.replace("▁", " ") if "Sentence" in coded.kind else text
    if family == "qwen":
        expected = unicodedata.normalize("NFC", text)
    assert coded.decode(coded.encode(text)) == expected
    assert coded.decode(coded.encode(text, specials=True)) == expected


def check_control_tokens(family: str) -> None:
    """No text becomes a control token."""
    coded = load_tokenizer(family)
    for text, token in list(coded.special_tokens.items())[:12]:
        for around in (text, f"a{text}b", f"Hi {text} there"):
            ids = coded.encode(around)
            assert coded.special_ids.isdisjoint(set(ids) - {coded.unk_id}), around
            if family not in ("bert", "t5"):
                assert coded.decode(ids) == around
        assert token in coded.encode(f"a{text}b", specials=True)


def check_prompt(family: str) -> None:
    """A prompt begins as transformers begins it."""
    coded = load_tokenizer(family)
    expected = in_transformers(family)("Hello world")["input_ids"]
    if family == "deepseek":  # its start token is asked for by tokenizer_config.json
        expected = [coded.bos_id, *expected]
    assert coded.encode_prompt("Hello world") == expected
    assert coded.add_bos == (family != "qwen")


def test_control_tokens_are_found_as_written() -> None:
    """llama2's file matches them after a space only; a chat needs them anywhere."""
    llama = load_tokenizer("llama2")
    assert llama.encode("</s><s>[INST]", specials=True)[:2] == [llama.eos_id, llama.bos_id]
    assert (
        llama.eos_id not in load_reference("llama2").encode("a</s>", add_special_tokens=False).ids
    )
    assert llama.eos_id in llama.encode("a</s>", specials=True)


def test_bert_and_t5_decode_to_words() -> None:
    t5 = load_tokenizer("t5")
    assert t5.decode(t5.encode("Unspooling a thread")) == "Unspooling a thread"
    assert t5.end_ids == {t5.token_id("</s>")}
    bert = load_tokenizer("bert")
    ids = bert.encode("Unspooling a thread")
    assert bert.decode(ids) == "unspooling a thread"
    assert b"".join(bert.token_bytes(n) for n in ids) == b" unspooling a thread"
    assert bert.decode(bert.encode_prompt("a"), specials=False) == "a"


@pytest.mark.parametrize(
    "family, gguf",
    [("llama2", "llama-spm"), ("qwen", "qwen2"), ("bert", "bert-bge")],
)
def test_the_same_vocabulary_from_json_and_from_gguf(family: str, gguf: str) -> None:
    json_tokenizer, gguf_tokenizer = load_tokenizer(family), from_gguf(gguf)

    @SAME_EVERY_RUN
    @given(TEXTS)
    def check(text: str) -> None:
        if family == "qwen":  # the JSON form composes characters first; GGUF does not
            text = unicodedata.normalize("NFC", text)
        ids = json_tokenizer.encode(text)
        assert gguf_tokenizer.encode(text) == ids
        if family != "bert":
            assert gguf_tokenizer.decode(ids) == json_tokenizer.decode(ids)

    check()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small vocabulary: every byte, and three control tokens."""
    library = Library(
        models.BPE({characters: n for n, characters in enumerate(byte_characters())}, [])
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_the_files_beside_it(folder: Path) -> None:
    assert Tokenizer.from_file(folder).chat_template is None
    templates = {"tool_use": "T", "default": "D"}.items()
    settings = {
        "bos_token": {"content": "<|im_start|>"},
        "eos_token": "<|im_end|>",
        "add_bos_token": True,
        "chat_template": [{"name": name, "template": text} for name, text in templates],
        "added_tokens_decoder": {"259": {"content": "<new>", "special": True}},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "special_tokens_map.json").write_text(json.dumps({"pad_token": "<|endoftext|>"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 7]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 8}))
    coded = Tokenizer.from_file(folder / "tokenizer.json")
    assert (coded.bos_id, coded.eos_id, coded.pad_id) == (257, 258, 256)
    assert coded.encode("a", bos=True)[0] == 257
    assert coded.end_ids == {7, 8, 256, 258}
    assert coded.chat_template == "D"
    assert coded.encode("<new>", specials=True) == [259]
    assert coded.decode(coded.encode("<new>")) == "<new>" and 259 not in coded.encode("<new>")
    (folder / "chat_template.jinja").write_text("J")
    assert Tokenizer.from_file(folder).chat_template == "J"


def test_bad_files_are_one_clear_line(folder: Path) -> None:
    cases = {"tokenizer_config.json": "{", "special_tokens_map.json": "[]"}
    for name, content in cases.items():
        (folder / name).write_text(content)
        with pytest.raises(ModelFileError, match=name) as caught:
            Tokenizer.from_file(folder)
        assert "\n" not in str(caught.value)
        (folder / name).unlink()
    (folder / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelFileError, match="cannot be read as a tokenizer"):
        Tokenizer.from_file(folder)
    with pytest.raises(ModelFileError, match="there is no"):
        Tokenizer.from_file(folder / "nothing")


def test_many_threads_share_one_tokenizer(folder: Path) -> None:
    text = "a<|im_end|>b"
    fresh = Tokenizer.from_file(folder)
    expected = {False: list(text.encode()), True: [ord("a"), 258, ord("b")]}
    wrong: list[object] = []

    def work(flag: bool) -> None:
        for _ in range(50):
            ids = fresh.encode(text, specials=flag)
            if ids != expected[flag] or fresh.decode(ids) != text:
                wrong.append(ids)

    threads = [threading.Thread(target=work, args=(bool(n % 2),)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# -- characters that a small vocabulary lacks ------------------------------------------------------


def small(folder: Path, unknown: str | None = None) -> Tokenizer:
    """A vocabulary of a, b, é's first byte and a control token."""
    vocab = {"<end>": 0, "a": 1, "b": 2, "ab": 3, "Ã": 4}
    if unknown is not None:
        vocab[unknown] = len(vocab)
    library = Library(models.BPE(vocab, [("a", "b")], unk_token=unknown))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.add_special_tokens(["<end>"])
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_file(folder)


@pytest.mark.parametrize(
    ("text", "character"), [("ab0", "0"), ("a b", " "), ("aé", "é"), ("ab<end>", "<")]
)
def test_a_character_without_a_token_is_refused(tmp_path: Path, text: str, character: str):
    tokenizer = small(tmp_path)
    assert tokenizer.missing_character(text) == character
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch(["ab", text])):
        with pytest.raises(UnspoolError, match=f"the character '{character}' .*allowed are: a b"):
            encode(text)


def test_known_characters_and_those_that_an_unknown_token_stands_for(tmp_path: Path):
    tokenizer = small(tmp_path)
    assert tokenizer.encode("abba") == [3, 2, 1]
    assert tokenizer.encode("ab<end>", specials=True) == [3, 0]
    tokenizer = small(tmp_path, "<unk>")
    assert tokenizer.missing_character("a0b") is None
    assert tokenizer.encode("a0b") == [1, 5, 2]


def test_a_tokenizer_json_is_saved_as_it_was(tmp_path: Path) -> None:
    original = load_tokenizer("mistral")
    original.save(tmp_path)
    again = Tokenizer.from_file(tmp_path)
    for text in TRIED_TEXTS:
        assert again.encode(text) == original.encode(text)
        assert again.encode(text, specials=True) == original.encode(text, specials=True)
