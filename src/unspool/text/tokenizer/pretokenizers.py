"""Pre-tokenizers of BPE vocabularies: how text is split into words before merging.

A GGUF file names its pre-tokenizer in `tokenizer.ggml.pre`. The name means one or more regular
expressions, applied one after the other: each splits the pieces of the one before, and the text
between two matches is a piece too. Where llama.cpp had to rewrite an expression for an engine
without Unicode classes, the vocabulary's original expression is used here. Supported are the
pre-tokenizers of the supported model families and all names that share one of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tokenizers import Regex, pre_tokenizers

from unspool.errors import ModelFileError

# English contractions that most vocabularies split off, in upper or lower case.
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDINGS_2 = r"'(?i:[sdmt]|ll|ve|re)"
# Runs of whitespace: up to the last line break; all but the last blank before a word; others.
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Upper and lower case letters; letters of scripts without case are in both classes.
_CAPITALS = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_SMALL = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_NOT_WORD = r"[^\r\n\p{L}\p{N}]?"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _llama3_pattern(digits: str) -> str:
    return rf"{_ENDINGS}|{_NOT_WORD}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"


def _cased_pattern(digits: str, endings: str) -> str:
    return (
        rf"{_NOT_WORD}[{_CAPITALS}]*[{_SMALL}]+{endings}|{_NOT_WORD}[{_CAPITALS}]+[{_SMALL}]*{endings}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}"
    )


LLAMA3 = _llama3_pattern(r"\p{N}{1,3}")
QWEN2 = _llama3_pattern(r"\p{N}")
CL100K = (
    rf"{_ENDINGS_2}|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}++|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s++\z|\s*[\r\n]|\s+(?!\S)|\s"
)
O200K = _cased_pattern(r"\p{N}{1,3}", f"{_ENDINGS}?")
_QWEN35 = (
    rf"{_ENDINGS}|{_NOT_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
)


@dataclass(frozen=True)
class Pretokenizer:
    """The regular expressions and settings that a `tokenizer.ggml.pre` name implies."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is a token is not merged (ignore_merges)
    add_bos: bool = False
    byte_level: bool = True  # False: pieces are plain text, ▁ for a space, <0xHH> for a byte


_LLAMA3 = Pretokenizer((LLAMA3,))
_O200K = Pretokenizer((O200K,))

# llama.cpp's default for files without a name, the oldest ones.
_DEFAULT = Pretokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

_BY_NAMES: dict[str, Pretokenizer] = {
    "default": _DEFAULT,
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": replace(
        _LLAMA3, whole_words=True, add_bos=True
    ),
    "dbrx smaug-bpe": _LLAMA3,
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": Pretokenizer(
        (r"\p{N}", GPT2)
    ),
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert "
    "jina-v1-en jina-v2-code roberta-bpe mpt olmo jais trillion granite-docling "
    "exaone4": Pretokenizer((GPT2,)),
    "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2": Pretokenizer(
        (QWEN2,)
    ),
    "qwen35": Pretokenizer((_QWEN35,)),
    "tekken": Pretokenizer((_cased_pattern(r"\p{N}", ""),), whole_words=True, add_bos=True),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _O200K,
    "granite-embed-multi-97m": replace(_O200K, whole_words=True),
    "bailingmoe bailingmoe2 llada-moe": Pretokenizer(
        (
            rf"{_ENDINGS_2}|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    # Merging runs over whole lines here; like llama.cpp, split at line breaks.
    "gemma4 granite-embed-multi-311m": Pretokenizer(
        (r"[^\n]+|\n+",), byte_level=False, add_bos=True
    ),
}

PRETOKENIZERS: dict[str, Pretokenizer] = {
    name: pretokenizer for names, pretokenizer in _BY_NAMES.items() for name in names.split()
}


def byte_level_splits(patterns: Iterable[str]) -> pre_tokenizers.Sequence:
    """Return the library's pre-tokenizer: split by each pattern, then write bytes as characters."""
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*splits, last])


def pretokenizer_named(name: str | None) -> Pretokenizer:
    """Return the pre-tokenizer that `tokenizer.ggml.pre` names; llama.cpp's default if None."""
    if not name:
        return _DEFAULT
    if name not in PRETOKENIZERS:
        raise ModelFileError(
            f"the vocabulary's pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; "
            "use a checkpoint with a tokenizer.json"
        )
    return PRETOKENIZERS[name]
