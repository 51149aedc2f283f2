"""Vocabularies written out as GGUF metadata from their tokenizer.json: both forms are equal.

llama.cpp's sources hold no vectors for gemma's SentencePiece model nor for t5's Unigram model, so
the metadata that its converter would write is made here, and the library is the oracle.
"""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import assets
import numpy as np
import pytest
from hypothesis import given
from sample_texts import SAME_EVERY_RUN, TEXTS
from test_tokenizer_json import ours as from_json

from unspool.text.tokenizer.tokenizer import Tokenizer


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


def t5_metadata() -> dict[str, Any]:
    read = described("t5")
    tokens = [piece for piece, _ in read["model"]["vocab"]]
    types = types_of(tokens, read["added_tokens"])
    charsmap = base64.b64decode(read["normalizer"]["precompiled_charsmap"])
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([score for _, score in read["model"]["vocab"]]),
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.precompiled_charsmap": np.frombuffer(charsmap, dtype=np.int8),
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 2,
    }


@pytest.mark.parametrize("family", ["gemma", "t5"])
def test_equal_to_the_json_form(family: str) -> None:
    rebuilt = Tokenizer.from_gguf(gemma_metadata() if family == "gemma" else t5_metadata())
    original = from_json(family)
    assert rebuilt.kind == original.kind and len(rebuilt) == len(original)

    @SAME_EVERY_RUN
    @given(TEXTS)
    def check(text: str) -> None:
        if family == "gemma" and "▁" in text:
            return  # a written ▁ meets the tokens with ▁ in one form and with spaces in the other
        if family == "t5" and ("▁" in text or not text.isprintable()):
            return  # the two forms split at other blanks than the space in their own ways
        ids = rebuilt.encode(text)
        assert ids == original.encode(text)
        assert rebuilt.decode(ids) == original.decode(ids)

    check()
