"""A vocabulary as the metadata of a GGUF file, in the words of llama.cpp's own converter.

The file does not hold the expression by which text is cut into words; it names one that llama.cpp
knows. So the cut is recognized by what it does to a text that every known one cuts differently.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as Library

from unspool.errors import ModelFileError
from unspool.text.tokenizer.encoders import AddedTokenEncoder
from unspool.text.tokenizer.gguf_models import TokenType
from unspool.text.tokenizer.pieces import SPACE_MARK
from unspool.text.tokenizer.pretokenizers import PRETOKENIZERS, Pretokenizer
from unspool.text.tokenizer.vocabulary import Vocabulary

# Blanks, digits, endings, capitals, scripts, signs: no two of the known cuts agree on all of it.
_TELLING = (
    "I've  He'LL we'RE 's x=1234567.89\n\n \t a1b22 TheHTMLPage don't\r\n  --==//\n/ $3,000.50!!!\n"
    "\nÅngströmÉtude 我想在apple工作1314151天 кириллица ಕನ್ನಡ é̀a \u200d🌫️🦙🦙 end   \n   \n"
)
# The name to write, where a cut has several: the one that is best known.
_USUAL = ("gpt-2", "qwen2", "llama-bpe", "smollm", "tekken", "gpt-4o", "default")
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def gguf_vocabulary(vocabulary: Vocabulary, size: int) -> dict[str, Any]:
    """The `tokenizer.*` metadata for a model with `size` logits."""
    if vocabulary.size > size:
        raise ModelFileError(
            f"the vocabulary has {vocabulary.size:,} tokens and the model only {size:,}; "
            "they do not belong together"
        )
    library = _library(vocabulary)
    model = json.loads(library.to_str())["model"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges", ())]
    found: dict[str, Any]
    if vocabulary.kind == "byte-level BPE":
        found = {"model": "gpt2", "pre": _name_of_cut(library, bool(model.get("ignore_merges")))}
    elif vocabulary.kind == "SentencePiece BPE" and model.get("byte_fallback"):
        found = {"model": "llama", "pre": "default"}
    else:
        raise ModelFileError(
            f"a vocabulary of the kind {vocabulary.kind!r} cannot be written into a GGUF file; "
            "byte-level BPE and SentencePiece BPE can"
        )
    tokens = [_piece(vocabulary, n) for n in range(size)]
    found["tokens"] = tokens
    if found["model"] == "llama":
        found["scores"] = _scores(tokens, merges)
        found["add_space_prefix"] = vocabulary.leading_space
    found["token_type"] = [int(_type(vocabulary, n, tokens[n])) for n in range(size)]
    if found["model"] == "gpt2":
        found["merges"] = merges
    for ours, theirs in _SPECIAL.items():
        token = getattr(vocabulary, f"{ours}_id")
        if token is not None:
            found[f"{theirs}_token_id"] = token
    found["add_bos_token"] = vocabulary.add_bos and vocabulary.bos_id is not None
    found["add_eos_token"] = vocabulary.add_eos and vocabulary.eos_id is not None
    named = {f"tokenizer.ggml.{key}": value for key, value in found.items()}
    if vocabulary.chat_template is not None:
        named["tokenizer.chat_template"] = vocabulary.chat_template
    return named


def _library(vocabulary: Vocabulary) -> Library:
    encoder = vocabulary.encoder
    return encoder.library if isinstance(encoder, AddedTokenEncoder) else encoder.plain


def _piece(vocabulary: Vocabulary, token: int) -> str:
    """What stands in the file; a number that no token has gets a name, as the model has a row."""
    piece = vocabulary.piece(token) if token < vocabulary.size else None
    if piece is None:
        return f"[PAD{token}]"
    own_text = token in vocabulary.cut_out_ids and token not in vocabulary.control.values()
    return piece.replace(SPACE_MARK, " ") if own_text else piece


def _type(vocabulary: Vocabulary, token: int, piece: str) -> TokenType:
    if token >= vocabulary.size or vocabulary.piece(token) is None:
        return TokenType.UNUSED
    if token == vocabulary.unk_id and vocabulary.kind != "byte-level BPE":
        return TokenType.UNKNOWN
    if token in vocabulary.control.values():
        return TokenType.CONTROL
    if token in vocabulary.cut_out_ids:
        return TokenType.USER_DEFINED
    if vocabulary.kind != "byte-level BPE" and _BYTE.fullmatch(piece):
        return TokenType.BYTE
    return TokenType.NORMAL


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """llama.cpp joins to the token with the highest score: the earlier merge has the higher."""
    rank: dict[str, int] = {}
    for number, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", ""), number)
    return [-float(rank.get(token, len(merges))) for token in tokens]


def _name_of_cut(library: Library, whole_words: bool) -> str:
    pieces = _cut(library.pre_tokenizer)
    for name, cut in _by_name():
        if cut.whole_words == whole_words and _cut(_pre_tokenizer(cut)) == pieces:
            return name
    raise ModelFileError(
        "llama.cpp has no name for the way in which this vocabulary cuts text into words, so it "
        f"cannot be written into a GGUF file; it has one for those of {', '.join(_USUAL[:-1])}"
    )


@cache
def _by_name() -> list[tuple[str, Pretokenizer]]:
    """The known cuts over bytes, the best known names first."""
    names = [*_USUAL, *(name for name in PRETOKENIZERS if name not in _USUAL)]
    return [(name, PRETOKENIZERS[name]) for name in names if PRETOKENIZERS[name].byte_level]


def _cut(pre_tokenizer: Any) -> list[str]:
    return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(_TELLING)]


def _pre_tokenizer(cut: Pretokenizer) -> Any:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in cut.patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, last])
