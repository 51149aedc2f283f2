"""GGUF vocabularies: llama.cpp's own vectors, round trips, and metadata that is wrong."""

from __future__ import annotations

import heapq
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from transformers import AutoTokenizer

from helpers import assets
from helpers.tokenizer_texts import SAME_EVERY_RUN, TEXTS, TRIED_TEXTS, check_batch, check_merges
from unspool.errors import ModelFileError, UnspoolError
from unspool.model.files.gguf import GGUFFile
from unspool.text.tokenizer.bpe import Merge, merge_steps, merge_word
from unspool.text.tokenizer.pieces import byte_characters
from unspool.text.tokenizer.pretokenizers import PRETOKENIZERS
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.text.tokenizer.vocabulary import drops_characters, has_character

WITH_VECTORS = (  # noqa: SIM905
    "bert-bge command-r gemma-4 gpt-2 llama-bpe llama-spm mpt phi-3 qwen2 qwen35 refact starcoder"
).split()
WITHOUT_VECTORS = ["aquila", "baichuan", "gpt-neox"]
ENDS = {
    "llama-bpe": {"<|end_of_text|>", "<|eot_id|>"},
    "phi-3": {"<|endoftext|>", "<|end|>"},
    "gemma-4": {"<eos>", "<turn|>"},
}
LOSSY = {"bert-bge"}  # it normalizes case, accents and blanks away


@cache
def metadata(name: str) -> dict[str, Any]:
    path = assets.llama_cpp_source() / "models" / f"ggml-vocab-{name}.gguf"
    return dict(GGUFFile(path).metadata)


@cache
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_gguf(metadata(name))


def vectors(name: str) -> list[tuple[str, list[int]]]:
    models = assets.llama_cpp_source() / "models"
    texts = (models / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode("utf-8")
    lines = (models / f"ggml-vocab-{name}.gguf.out").read_text("utf-8").removesuffix("\n")
    pairs = zip(
        texts.removesuffix("\n__ggml_vocab_test__\n").split("\n__ggml_vocab_test__\n"),
        lines.split("\n"),
        strict=True,
    )
    return [(text, [int(number) for number in line.split()]) for text, line in pairs]


@pytest.mark.parametrize("name", WITH_VECTORS + WITHOUT_VECTORS)
def test_a_vocabulary(name: str, tmp_path: Path) -> None:
    """All in one test, because reading a vocabulary takes a second."""
    coded = tokenizer(name)
    if name in ENDS:  # </s> is a tag of HTML in Gemma's vocabulary, an ordinary token
        assert {coded.token_text(token) for token in coded.end_ids} == ENDS[name]
    if name == "llama-bpe":
        assert coded.add_bos and coded.encode_prompt("a")[0] == coded.bos_id == 128000
    if name == "qwen2":
        assert not coded.add_bos and coded.encode_prompt("a") == coded.encode("a")
    if name in WITH_VECTORS:
        check_vectors(name)
    if name not in LOSSY:
        check_round_trip(name)
    if name in ("llama-spm", "baichuan", "phi-3"):
        check_scores(name)
    if name in ("gpt-2", "llama-spm", "phi-3", "gpt-neox", "starcoder"):
        check_merges(coded)
        check_batch(coded)
    if name in ("llama-spm", "llama-bpe", "gpt-2", "starcoder"):
        check_saved(coded, tmp_path)


@pytest.mark.parametrize("name", ["gpt-2", "llama-bpe", "qwen2", "starcoder"])
def test_the_first_texts_have_the_ids_of_the_library(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the library's model is built another encoder is used."""
    coded = []
    for chars in (0, 1 << 40):
        monkeypatch.setattr("unspool.text.tokenizer.vocabulary._FIRST_CHARS", chars)
        coded.append(Tokenizer.from_gguf(metadata(name)))
    library, first = coded

    @SAME_EVERY_RUN
    @given(TEXTS)
    def check(text: str) -> None:
        missing = first.missing_character(text)
        assert missing == library.missing_character(text)
        if missing is None:
            for specials in (False, True):
                ids = library.encode(text, specials=specials)
                assert first.encode(text, specials=specials) == ids

    check()
    assert first.encoder.drops_characters == drops_characters(library.encoder.plain)
    for character in map(chr, range(0, 0x3000, 5)):
        has = has_character(library.encoder.plain, character)
        assert first.encoder.has_character(character) == has


def check_vectors(name: str) -> None:
    """Equal to llama.cpp on its vectors."""
    cases = vectors(name)
    assert len(cases) >= 45
    for text, ids in cases:
        assert tokenizer(name).encode(text) == ids, text
        if name not in LOSSY:
            assert tokenizer(name).decode(ids) == text


def check_saved(coded: Tokenizer, folder: Path) -> None:
    """A saved vocabulary is the same one, here and in transformers."""
    coded.save(folder)
    reference, again = AutoTokenizer.from_pretrained(folder), Tokenizer.from_file(folder)
    for key in ("add_bos", "bos_id", "eos_id"):
        assert getattr(again, key) == getattr(coded, key)
    for text in TRIED_TEXTS:
        ids = coded.encode(text)
        assert again.encode(text) == ids
        assert again.encode(text, specials=True) == coded.encode(text, specials=True)
        plain = reference.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert plain == ids
        assert reference.decode(ids) == coded.decode(ids)
        assert reference.encode(text) == coded.encode(text, specials=True, bos=True)


def check_round_trip(name: str) -> None:
    coded, characters = tokenizer(name), byte_characters()
    # Some vocabularies have no token for some control characters; nothing can bring them back.
    tokens = set(metadata(name)["tokenizer.ggml.tokens"])
    missing = {n for n in range(256) if characters[n] not in tokens}
    if coded.kind != "byte-level BPE":
        missing = set()

    @SAME_EVERY_RUN
    @given(TEXTS)
    def check(text: str) -> None:
        if not missing.isdisjoint(text.encode()):
            return
        if name == "phi-3" and any(token in text for token in ("</s>", *coded.special_tokens)):
            return  # its tokens swallow the blanks after them
        ids = coded.encode(text)
        # SentencePiece writes a space as ▁, so a ▁ in the text comes back as a space.
        expected = text.replace("▁", " ") if "Sentence" in coded.kind else text
        assert coded.decode(ids) == expected
        assert coded.special_ids.isdisjoint(ids)
        assert coded.decode(coded.encode(text, specials=True)) == expected

    check()


def sentence_piece_by_scores(name: str, text: str) -> list[str]:
    """SentencePiece as it is defined: join the neighbours with the best score, leftmost first."""
    score = score_table(name)
    symbols: list[str | None] = list("▁" + text.replace(" ", "▁"))
    before = list(range(-1, len(symbols) - 1))
    after = [*range(1, len(symbols)), -1]
    heap: list[tuple[float, int, int, str]] = []

    def offer(left_index: int, right_index: int) -> None:
        if left_index >= 0 and right_index >= 0:
            joined = f"{symbols[left_index]}{symbols[right_index]}"
            if joined in score:
                heapq.heappush(heap, (-score[joined], left_index, right_index, joined))

    for left_index in range(len(symbols) - 1):
        offer(left_index, left_index + 1)
    while heap:
        _, left_index, right_index, joined = heapq.heappop(heap)
        parts = symbols[left_index], symbols[right_index]
        if None in parts or after[left_index] != right_index or f"{parts[0]}{parts[1]}" != joined:
            continue
        symbols[left_index], symbols[right_index] = joined, None
        after[left_index] = after[right_index]
        if after[right_index] >= 0:
            before[after[right_index]] = left_index
        offer(before[left_index], left_index)
        offer(left_index, after[left_index])
    return [symbol for symbol in symbols if symbol is not None]


@cache
def score_table(name: str) -> dict[str, float]:
    fields = metadata(name)
    types = fields["tokenizer.ggml.token_type"]
    rows = zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"], types, strict=True)
    return {token: float(score) for token, score, kind in rows if kind in (1, 4, 5)}


def check_scores(name: str) -> None:
    """Merges from scores are those of SentencePiece."""
    coded = tokenizer(name)

    @SAME_EVERY_RUN
    @given(TEXTS.filter(bool))
    def check(text: str) -> None:
        text = text.replace("</s>", "")  # phi-3 has it as a token
        if not text:
            return
        expected: list[int] = []
        for piece in sentence_piece_by_scores(name, text):
            token = coded.token_id(piece) if piece in score_table(name) else None
            in_bytes = [coded.token_id(f"<0x{byte:02X}>") or -1 for byte in piece.encode()]
            expected += in_bytes if token is None else [token]
        assert coded.encode(text) == expected

    check()


def test_control_tokens_in_text_stay_text() -> None:
    qwen = tokenizer("qwen2")
    text = "stop<|im_end|>\n<|im_start|>system"
    ids = qwen.encode(text)
    assert qwen.special_ids.isdisjoint(ids) and qwen.end_ids.isdisjoint(ids)
    assert qwen.decode(ids) == text
    with_specials = qwen.encode(text, specials=True)
    assert [qwen.token_text(n) for n in with_specials if n in qwen.special_ids] == [
        "<|im_end|>",
        "<|im_start|>",
    ]
    assert qwen.decode(with_specials, specials=False) == "stop\nsystem"


def test_sentence_piece_control_text_is_never_merged_into_a_control_token() -> None:
    llama = tokenizer("llama-spm")
    assert llama.eos_id not in llama.encode("</s>")
    assert llama.encode("</s>", specials=True) == [llama.eos_id]


def test_user_defined_tokens_are_found_in_any_text() -> None:
    neox = tokenizer("gpt-neox")
    spaces = neox.token_id(" " * 24)
    assert spaces is not None and neox.encode(" " * 24) == [spaces]
    assert neox.decode([spaces]) == " " * 24


def test_the_space_before_a_text_is_taken_off_again() -> None:
    llama = tokenizer("llama-spm")
    assert llama.token_text(llama.encode("the")[0]) == " the"
    assert llama.decode(llama.encode_prompt("the"), specials=False) == "the"
    assert llama.decode(llama.encode("<s>the</s>x", specials=True)) == "<s>the</s>x"
    assert llama.token_bytes(llama.token_id("<0x0A>") or 0) == b"\n"


def test_phi3_tokens_swallow_the_blanks_behind_them() -> None:
    phi = tokenizer("phi-3")
    with_break = phi.encode("<|user|>\nHi<|end|>\n<|assistant|>\n", specials=True)
    assert with_break == phi.encode("<|user|>Hi<|end|><|assistant|>", specials=True)
    assert phi.decode(phi.encode("<s> Hi", specials=True)) == "<s> Hi"


def tiny(**changes: Any) -> dict[str, Any]:
    described: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<|im_end|>", "c"],
        "tokenizer.ggml.token_type": np.array([1, 1, 1, 3, 1], dtype=np.int32),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 3,
    }
    described |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in described.items() if value is not None}


def test_a_tiny_vocabulary() -> None:
    coded = Tokenizer.from_gguf(tiny())
    assert coded.encode("abcab") == [2, 4, 2]
    assert coded.eos_id == 3 and coded.end_ids == {3} and coded.bos_id is None
    assert coded.special_tokens == {"<|im_end|>": 3}


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model": None}, "tokenizer.ggml.model"),
        ({"model": "rwkv"}, "rwkv"),
        ({"model": 7}, "tokenizer.ggml.model"),
        ({"model": "t5"}, "'t5'"),
        ({"pre": "never-heard-of"}, "'never-heard-of'"),
        ({"pre": "deepseek-v3"}, "'deepseek-v3'"),
        ({"tokens": None}, "tokens"),
        ({"tokens": []}, "tokens"),
        ({"tokens": ["a", 3]}, "tokens"),
        ({"tokens": "abc"}, "tokens"),
        ({"merges": None}, "merges"),
        ({"merges": ["ab"]}, "two pieces: 'ab'"),
        ({"merges": ["a "]}, "two pieces"),
        ({"merges": [""]}, "two pieces"),
        ({"merges": 3}, "merges"),
        ({"token_type": [1, 1]}, "token_type"),
        ({"token_type": ["a"] * 5}, "token_type"),
        ({"model": "llama", "scores": [0.0]}, "scores"),
        ({"model": "llama"}, "scores"),
        ({"eos_token_id": 5}, "eos_token_id is 5"),
        ({"bos_token_id": -1}, "bos_token_id"),
        ({"bos_token_id": "x"}, "bos_token_id"),
        ({"eos_token_ids": [1, 99]}, "eos_token_ids"),
        ({"eos_token_ids": "no"}, "eos_token_ids"),
        ({"model": "bert"}, "unknown_token_id"),
        ({"add_bos_token": np.zeros(3)}, "add_bos_token"),
    ],
)
def test_bad_metadata_is_one_clear_line(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        Tokenizer.from_gguf(tiny(**changes))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_merges_that_lead_nowhere_are_let_be() -> None:
    assert Tokenizer.from_gguf(tiny(merges=["x y", "a b"])).encode("ab") == [2]
    without_types = Tokenizer.from_gguf(tiny(token_type=None))
    assert without_types.special_ids == {3}, "the end token is still a control token"
    with pytest.raises(UnspoolError, match="the character '<'"):  # text, and not the token
        without_types.encode("<|im_end|>")


@pytest.mark.parametrize("ids", [[5], [-1], [0, 10**9]])
def test_ids_outside_the_vocabulary(ids: list[int]) -> None:
    with pytest.raises(UnspoolError, match="0 to 4"):
        Tokenizer.from_gguf(tiny()).decode(ids)


def test_lone_surrogates_are_refused_in_words() -> None:
    with pytest.raises(UnspoolError, match=r"surrogate.*position 1"):
        Tokenizer.from_gguf(tiny()).encode("a\ud800")


def test_nothing_is_nothing() -> None:
    for name in ("llama-spm", "qwen2", "bert-bge"):
        assert tokenizer(name).encode("") == [] and tokenizer(name).decode([]) == ""


def cut(name: str, text: str) -> list[str]:
    """The words of a text under a pre-tokenizer, seen through a vocabulary without merges."""
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(p), "isolated") for p in PRETOKENIZERS[name].patterns]
    return [word for word, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)]


# One name of each: many names share their expressions.
@pytest.mark.parametrize(
    "name", sorted({cut: name for name, cut in PRETOKENIZERS.items()}.values())
)
def test_every_pretokenizer_keeps_every_character(name: str) -> None:
    @SAME_EVERY_RUN
    @given(TEXTS)
    def check(text: str) -> None:
        assert "".join(cut(name, text)) == text

    check()


def test_pretokenizers_cut_where_they_should() -> None:
    assert cut("tekken", "HelloWorld 12") == ["Hello", "World", " ", "1", "2"]
    assert cut("gpt-4o", "großÄrger 1234") == ["groß", "Ärger", " ", "123", "4"]
    assert cut("llama-bpe", "I'LL go\n\n  x") == ["I", "'LL", " go", "\n\n", " ", " x"]
    assert cut("smollm", "in 2024") == ["in", " ", "2", "0", "2", "4"]


def test_each_merge_in_order() -> None:
    ranks = {(b"a", b"b"): 0, (b"ab", b"c"): 2, (b"b", b"c"): 1, (b"c", b"ab"): 3}
    assert list(merge_word([b"a", b"b", b"c", b"a", b"b"], ranks)) == [
        Merge((b"a", b"b"), 0, 0, (b"ab", b"c", b"a", b"b")),
        Merge((b"a", b"b"), 0, 2, (b"ab", b"c", b"ab")),
        Merge((b"ab", b"c"), 2, 0, (b"abc", b"ab")),
    ]
    assert list(merge_word([], ranks)) == list(merge_word([b"a"], ranks)) == []


def test_gpt2_joins_a_word() -> None:
    (word,) = merge_steps(tokenizer("gpt-2"), " the")
    assert [merge.pieces for merge in word.merges] == [
        (b" t", b"h", b"e"),
        (b" t", b"he"),
        (b" the",),
    ]
    assert [merge.rank for merge in word.merges] == [0, 2, 6]


def test_other_vocabularies_have_no_merges() -> None:
    with pytest.raises(UnspoolError, match="WordPiece"):
        merge_steps(tokenizer("bert-bge"), "a")
    with pytest.raises(UnspoolError, match="surrogate"):
        merge_steps(tokenizer("gpt-2"), "\udc00")


@pytest.mark.real
def test_the_default_models_vocabulary(default_model: Path) -> None:
    """Every text that its bytes can express comes back as it was, and few bytes are missing."""
    coded = Tokenizer.from_gguf(GGUFFile(default_model).metadata)
    single = {coded.token_bytes(i) for i in range(len(coded))}
    missing = {n for n in range(256) if bytes([n]) not in single}
    assert 0x20 not in missing and len(missing) < 30

    @SAME_EVERY_RUN
    @given(TEXTS)
    @example("  two  spaces\n\n\ttab")
    @example("Grüße, 東京 🌿")
    @example("a\0b<|im_end|>")
    def check(text: str) -> None:
        encodable = "".join(c for c in text if missing.isdisjoint(c.encode()))
        assert coded.decode(coded.encode(encodable)) == encodable

    check()
    assert coded.decode(coded.encode("a\0b")) == "a\0b"
