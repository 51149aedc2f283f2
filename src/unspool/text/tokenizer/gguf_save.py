"""Write a vocabulary as GGUF metadata, with the keys of llama.cpp's converter.

A GGUF file does not contain the pre-tokenizer's regular expressions; it names one that llama.cpp
knows. The name is found by comparing splits of a probe text that every known pre-tokenizer splits
differently.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from tokenizers import Tokenizer as Library

from unspool.errors import ModelFileError
from unspool.text.tokenizer.encoders import AddedTokenEncoder
from unspool.text.tokenizer.gguf_models import TokenType
from unspool.text.tokenizer.pieces import SPACE_MARK
from unspool.text.tokenizer.pretokenizers import PRETOKENIZERS, Pretokenizer, byte_level_splits
from unspool.text.tokenizer.vocabulary import Vocabulary

# Blanks, digits, contractions, capitals, scripts, punctuation: every known pre-tokenizer splits
# this text differently.
_PROBE_TEXT = (
    "I've  He'LL we'RE 's x=1234567.89\n\n \t a1b22 TheHTMLPage don't\r\n  --==//\n/ $3,000.50!!!\n"
    "\nÅngströmÉtude 我想在apple工作1314151天 кириллица ಕನ್ನಡ é̀a \u200d🌫️🦙🦙 end   \n   \n"
)
# Names to prefer where a pre-tokenizer has several.
_PREFERRED_NAMES = ("gpt-2", "qwen2", "llama-bpe", "smollm", "tekken", "gpt-4o", "default")
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def vocabulary_metadata(vocabulary: Vocabulary, size: int) -> dict[str, Any]:
    """Return the `tokenizer.*` metadata for a model with `size` logits."""
    if vocabulary.size > size:
        raise ModelFileError(
            f"the vocabulary has {vocabulary.size:,} tokens and the model only {size:,}; "
            "they do not belong together"
        )
    library = _library(vocabulary)
    model = json.loads(library.to_str())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges", ())]
    fields: dict[str, Any]
    if vocabulary.kind == "byte-level BPE":
        fields = {
            "model": "gpt2",
            "pre": _pretokenizer_name(library, bool(model.get("ignore_merges"))),
        }
    elif vocabulary.kind == "SentencePiece BPE" and model.get("byte_fallback"):
        fields = {"model": "llama", "pre": "default"}
    else:
        raise ModelFileError(
            f"a vocabulary of the kind {vocabulary.kind!r} cannot be written into a GGUF file; "
            "byte-level BPE and SentencePiece BPE can"
        )
    tokens = [_piece(vocabulary, n) for n in range(size)]
    fields["tokens"] = tokens
    if fields["model"] == "llama":
        fields["scores"] = _scores(tokens, merges)
        fields["add_space_prefix"] = vocabulary.leading_space
    fields["token_type"] = [int(_type(vocabulary, n, tokens[n])) for n in range(size)]
    if fields["model"] == "gpt2":
        fields["merges"] = merges
    for name, gguf_name in _SPECIAL.items():
        token = getattr(vocabulary, f"{name}_id")
        if token is not None:
            fields[f"{gguf_name}_token_id"] = token
    fields["add_bos_token"] = vocabulary.add_bos and vocabulary.bos_id is not None
    fields["add_eos_token"] = vocabulary.add_eos and vocabulary.eos_id is not None
    metadata = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    if vocabulary.chat_template is not None:
        metadata["tokenizer.chat_template"] = vocabulary.chat_template
    return metadata


def _library(vocabulary: Vocabulary) -> Library:
    encoder = vocabulary.encoder
    return encoder.library if isinstance(encoder, AddedTokenEncoder) else encoder.plain


def _piece(vocabulary: Vocabulary, token: int) -> str:
    """Return the piece to write; an unused id gets a name, as the model has a row for it."""
    piece = vocabulary.piece(token) if token < vocabulary.size else None
    if piece is None:
        return f"[PAD{token}]"
    user_defined = token in vocabulary.split_token_ids and token not in vocabulary.control.values()
    return piece.replace(SPACE_MARK, " ") if user_defined else piece


def _type(vocabulary: Vocabulary, token: int, piece: str) -> TokenType:
    if token >= vocabulary.size or vocabulary.piece(token) is None:
        return TokenType.UNUSED
    if token == vocabulary.unk_id and vocabulary.kind != "byte-level BPE":
        return TokenType.UNKNOWN
    if token in vocabulary.control.values():
        return TokenType.CONTROL
    if token in vocabulary.split_token_ids:
        return TokenType.USER_DEFINED
    if vocabulary.kind != "byte-level BPE" and _BYTE.fullmatch(piece):
        return TokenType.BYTE
    return TokenType.NORMAL


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Return scores that reproduce the merge order: llama.cpp merges the highest score first."""
    rank: dict[str, int] = {}
    for number, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", ""), number)
    return [-float(rank.get(token, len(merges))) for token in tokens]


def _pretokenizer_name(library: Library, whole_words: bool) -> str:
    pieces = _split_probe(library.pre_tokenizer)
    for name, pretokenizer in _pretokenizers_by_preference():
        if (
            pretokenizer.whole_words == whole_words
            and _split_probe(byte_level_splits(pretokenizer.patterns)) == pieces
        ):
            return name
    raise ModelFileError(
        "llama.cpp has no name for this vocabulary's pre-tokenizer, so it cannot be written into a "
        f"GGUF file; it has names for those of {', '.join(_PREFERRED_NAMES[:-1])}"
    )


@cache
def _pretokenizers_by_preference() -> list[tuple[str, Pretokenizer]]:
    """Return the known byte-level pre-tokenizers, preferred names first."""
    names = [*_PREFERRED_NAMES, *(name for name in PRETOKENIZERS if name not in _PREFERRED_NAMES)]
    return [(name, PRETOKENIZERS[name]) for name in names if PRETOKENIZERS[name].byte_level]


def _split_probe(pre_tokenizer: Any) -> list[str]:
    return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(_PROBE_TEXT)]
