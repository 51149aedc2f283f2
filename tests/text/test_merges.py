"""The plain BPE implementation gives the ids of the library."""

from __future__ import annotations

from functools import partial
from itertools import chain

import pytest
from hypothesis import given
from test_tokenizer_gguf import tokenizer as from_gguf
from test_tokenizer_json import load_tokenizer as from_json
from test_tokenizer_tiktoken import load_tokenizer as from_tiktoken

from helpers.tokenizer_texts import SAME_EVERY_RUN, TEXTS
from unspool.errors import UnspoolError
from unspool.text.tokenizer.bpe import Merge, merge_steps, merge_word
from unspool.text.tokenizer.tokenizer import Tokenizer

VOCABULARIES = {
    "gpt-2": (from_gguf, "gpt-2"),
    "whole words first (tiktoken)": (from_tiktoken, "gpt2"),
    "scores with byte fallback": (from_gguf, "llama-spm"),
    "scores, user-defined tokens": (from_gguf, "phi-3"),
    "user-defined tokens": (from_gguf, "gpt-neox"),
    "bytes without a token": (from_gguf, "starcoder"),
    "json, byte level": (from_json, "qwen"),
    "json, prefixed with a space": (from_json, "llama2"),
    "json, prefixed at the start only": (from_json, "mistral"),
}


@pytest.mark.parametrize("case", VOCABULARIES, scope="module")
def test_equal_to_the_library(case: str) -> None:
    load, name = VOCABULARIES[case]
    tokenizer: Tokenizer = load(name)

    @SAME_EVERY_RUN
    @given(TEXTS)
    def check(text: str) -> None:
        if tokenizer.missing_character(text) is not None:
            for encode in (tokenizer.encode, partial(merge_steps, tokenizer)):
                with pytest.raises(UnspoolError, match="is not in the model's vocabulary"):
                    encode(text)
            return
        words = merge_steps(tokenizer, text)
        ids = list(chain.from_iterable(word.ids for word in words))
        assert ids == tokenizer.encode(text)
        for word in words:
            pieces = word.start
            for merge in word.merges:
                assert pieces[merge.position : merge.position + 2] == merge.pair
                assert len(merge.pieces) == len(pieces) - 1
                assert merge.pieces[merge.position] == b"".join(merge.pair)
                assert b"".join(merge.pieces) == b"".join(pieces)
                pieces = merge.pieces
            assert pieces == word.pieces

    check()


@pytest.mark.parametrize("case", VOCABULARIES, scope="module")
def test_a_batch_is_encoded_as_each_text_alone(case: str) -> None:
    load, name = VOCABULARIES[case]
    tokenizer: Tokenizer = load(name)
    control = next(iter(tokenizer.special_tokens), "<s>")
    texts = ["", "Why do leaves?", f"a {control} in a text", " 12 \n\n é🍁", "word " * 2000]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    with pytest.raises(UnspoolError, match="lone surrogate"):
        tokenizer.encode_batch(["fine", "half \ud83d"])


def test_each_merge_in_order() -> None:
    ranks = {(b"a", b"b"): 0, (b"ab", b"c"): 2, (b"b", b"c"): 1, (b"c", b"ab"): 3}
    assert list(merge_word([b"a", b"b", b"c", b"a", b"b"], ranks)) == [
        Merge((b"a", b"b"), 0, 0, (b"ab", b"c", b"a", b"b")),
        Merge((b"a", b"b"), 0, 2, (b"ab", b"c", b"ab")),
        Merge((b"ab", b"c"), 2, 0, (b"abc", b"ab")),
    ]
    assert list(merge_word([], ranks)) == list(merge_word([b"a"], ranks)) == []


def test_gpt2_joins_a_word() -> None:
    (word,) = merge_steps(from_gguf("gpt-2"), " the")
    assert [merge.pieces for merge in word.merges] == [
        (b" t", b"h", b"e"),
        (b" t", b"he"),
        (b" the",),
    ]
    assert [merge.rank for merge in word.merges] == [0, 2, 6]


def test_a_word_that_is_a_token_needs_no_merges() -> None:
    (word,) = merge_steps(from_tiktoken("gpt2"), " the")
    assert word.start == word.pieces == (b" the",) and word.merges == ()


def test_other_vocabularies_have_no_merges() -> None:
    with pytest.raises(UnspoolError, match="WordPiece"):
        merge_steps(from_gguf("bert-bge"), "a")
    with pytest.raises(UnspoolError, match="surrogate"):
        merge_steps(from_gguf("gpt-2"), "\udc00")
