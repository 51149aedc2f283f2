"""The default model's vocabulary: every text that its bytes can express comes back as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.model.files.gguf import GGUFFile
from unspool.text.tokenizer.tokenizer import Tokenizer

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return Tokenizer.from_gguf(GGUFFile(default_model).metadata)


@pytest.fixture(scope="module")
def expressible(tokenizer: Tokenizer) -> bytes:
    """The bytes that have a token of their own."""
    single = {tokenizer.token_bytes(i) for i in range(len(tokenizer))}
    return bytes(b for b in range(256) if bytes([b]) in single)


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=60))
def test_round_trip(tokenizer: Tokenizer, expressible: bytes, text: str):
    encodable = "".join(c for c in text if all(b in expressible for b in c.encode()))
    assert tokenizer.decode(tokenizer.encode(encodable)) == encodable


def test_few_bytes_are_missing(tokenizer: Tokenizer, expressible: bytes):
    missing = set(range(256)) - set(expressible)
    assert 0x20 not in missing and len(missing) < 30
    for text in ("  two  spaces\n\n\ttab", "Grüße, 東京 🌿", "a\0b", "<|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
