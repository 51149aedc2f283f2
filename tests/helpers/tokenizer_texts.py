"""Texts to try a tokenizer on: words, blanks, digits, scripts, marks, and anything at all."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

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

# The same examples in every run, so that a failure is never a matter of luck.
SAME_EVERY_RUN = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
