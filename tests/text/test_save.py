"""A saved vocabulary is the same one, here and in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from test_tokenizer_gguf import tokenizer as from_gguf
from test_tokenizer_json import load_tokenizer as from_json

from unspool.text.tokenizer.tokenizer import Tokenizer

TEXTS = [
    "Why do leaves change color in fall?",
    "äöü 🌿 東京\n\n\tx  y   z 12345 won't",
    "control: <|im_end|> </s> <|endoftext|> <s>",
    " lead and trail ",
]


@pytest.mark.parametrize("name", ["llama-spm", "gpt-2", "starcoder"])
def test_gguf_vocabularies(name: str, tmp_path: Path):
    original = from_gguf(name)
    original.save(tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    again = Tokenizer.from_file(tmp_path)
    assert (again.add_bos, again.bos_id, again.eos_id) == (
        original.add_bos,
        original.bos_id,
        original.eos_id,
    )
    for text in TEXTS:
        ids = original.encode(text)
        assert again.encode(text) == ids
        assert again.encode(text, specials=True) == original.encode(text, specials=True)
        plain = reference.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert plain == ids
        assert reference.decode(ids) == original.decode(ids)
        assert reference.encode(text) == original.encode(text, specials=True, bos=True)


def test_a_tokenizer_json_is_saved_as_it_was(tmp_path: Path):
    original = from_json("mistral")
    original.save(tmp_path)
    again = Tokenizer.from_file(tmp_path)
    for text in TEXTS:
        assert again.encode(text) == original.encode(text)
        assert again.encode(text, specials=True) == original.encode(text, specials=True)
