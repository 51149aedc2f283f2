"""Texts to try a tokenizer on: words, blanks, digits, scripts, marks, and anything at all."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unspool.errors import UnspoolError
from unspool.text.tokenizer.bpe import merge_steps
from unspool.text.tokenizer.tokenizer import Tokenizer

_FRAGMENTS = [
    "the", " the", "The", "THE", "don't", "DON'T", "we'Ll", "I'm", "'s", "'", "ſ", "'ſ",
    " ", "  ", "   ", "\t", "\n", "\n\n", " \n", "\r\n", "\u00a0", "\u3000", "\u0085", "\u2028",
    "1", "12", "123", "1234", "12345678", "½", "٣", "Ⅷ", "3.14", "1,000",
    "ä", "Äpfel", "a\u0308", "ÇA", "Привет", "мир", "Ωmega", "ǅ", "你好", "世界", "日本語",
    "カタカナ", "한국어", "ไทย", "हिन्दी", "العربية", "🦙", "👩‍👩‍👧", "🇩🇪", "e\u0301\u0301",
    "...", "!?", "--", "==", "=>", "/*", "#", "_", "`", "$+<=>^~|", "…", "。", "“", "”", "/", "/\n",
    "<", ">", "</s>", "<s>", "<unk>", "<|im_end|>", "<|endoftext|>", "<0x0A>", "[PAD]", "▁", "▁▁",
    "\x00", "\x7f", "\ufeff", "\ufffd", "\u200b", "aaaa", "abab", "banana", "lolol", "unspooling",
]  # fmt: skip

TEXTS = st.one_of(
    st.text(max_size=40),
    st.lists(
        st.one_of(st.sampled_from(_FRAGMENTS), st.text(max_size=4)), min_size=1, max_size=14
    ).map("".join),
    st.text(alphabet="ab ▁n\n", max_size=30),
)

TRIED_TEXTS = [
    "Why do leaves change color in fall?",
    "äöü 🌿 東京\n\n\tx  y   z 12345 won't",
    "control: <|im_end|> </s> <|endoftext|> <s>",
    " lead and trail ",
]
# The same examples in every run, so that a failure is never a matter of luck.
SAME_EVERY_RUN = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@SAME_EVERY_RUN
@given(TEXTS)
def check_merges(tokenizer: Tokenizer, text: str) -> None:
    """The plain BPE implementation gives the ids of the library, one merge after the other."""
    if tokenizer.missing_character(text) is not None:
        for encode in (tokenizer.encode, partial(merge_steps, tokenizer)):
            with pytest.raises(UnspoolError, match="is not in the model's vocabulary"):
                encode(text)
        return
    words = merge_steps(tokenizer, text)
    assert [token for word in words for token in word.ids] == tokenizer.encode(text)
    for word in words:
        pieces = word.start
        for merge in word.merges:
            assert pieces[merge.position : merge.position + 2] == merge.pair
            assert len(merge.pieces) == len(pieces) - 1
            assert merge.pieces[merge.position] == b"".join(merge.pair)
            assert b"".join(merge.pieces) == b"".join(pieces)
            pieces = merge.pieces
        assert pieces == word.pieces


def check_batch(tokenizer: Tokenizer) -> None:
    """A batch is encoded as each text alone."""
    control = next(iter(tokenizer.special_tokens), "<s>")
    texts = ["", "Why do leaves?", f"a {control} in a text", " 12 \n\n é🍁", "word " * 2000]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
    with pytest.raises(UnspoolError, match="lone surrogate"):
        tokenizer.encode_batch(["fine", "half \ud83d"])
