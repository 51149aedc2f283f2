"""A vocabulary written out as GGUF metadata from its tokenizer.json: both forms are equal.

llama.cpp's sources hold no vectors for gemma's SentencePiece model, so the metadata that its
converter would write is made here, and the library is the oracle.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
from hypothesis import given
from test_tokenizer_json import load_tokenizer as from_json

from helpers import assets
from helpers.tokenizer_texts import SAME_EVERY_RUN, TEXTS
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
