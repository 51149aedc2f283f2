"""How each byte-pair vocabulary cuts text into words before any merging.

A GGUF file names its cut in `tokenizer.ggml.pre`. The name stands for one or more regular
expressions, applied one after the other: each cuts the pieces that the one before left, and what
lies between two matches is a piece too. Where llama.cpp had to rewrite an expression for an engine
without Unicode classes, the vocabulary's original expression stands here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from unspool.errors import ModelFileError

# The English endings that most vocabularies cut off as words of their own, in any case.
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_ENDINGS_2 = r"'(?i:[sdmt]|ll|ve|re)"
# Runs of white space: up to the last line break; all but the last blank before a word; the rest.
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# A word of capitals then small letters, in scripts that have them; others fit both classes.
_CAPITALS = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_SMALL = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_NOT_WORD = r"[^\r\n\p{L}\p{N}]?"
_ASCII_PUNCTUATION_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _like_llama3(digits: str) -> str:
    return rf"{_ENDINGS}|{_NOT_WORD}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_BLANKS}"


def _cased(digits: str, endings: str, capitals: str = _CAPITALS, small: str = _SMALL,
           after_symbols: str = r"[\r\n/]*") -> str:  # fmt: skip
    return (
        rf"{_NOT_WORD}[{capitals}]*[{small}]+{endings}|{_NOT_WORD}[{capitals}]+[{small}]*{endings}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+{after_symbols}|{_BLANKS}"
    )


LLAMA3 = _like_llama3(r"\p{N}{1,3}")
QWEN2 = _like_llama3(r"\p{N}")
CL100K = (
    rf"{_ENDINGS_2}|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}++|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s++\z|\s*[\r\n]|\s+(?!\S)|\s"
)
O200K = _cased(r"\p{N}{1,3}", f"{_ENDINGS}?")
_QWEN35 = (
    rf"{_ENDINGS}|{_NOT_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}"
)
_DEEPSEEK3 = (
    rf"{_ASCII_PUNCTUATION_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_HAN_KANA = r"[一-龥぀-ゟ゠-ヿ]+"
_LETTERS_WITH_CASE = (  # escaped, because some editors rewrite letters such as the Kelvin sign
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293"
    "\u0295-\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c"
    "\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5"
    "\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59"
    "\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc"
    "\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee"
    "\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e"
    "\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)


@dataclass(frozen=True)
class Pretokenizer:
    """The expressions of one `tokenizer.ggml.pre` name, and what else the name implies."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is a token is taken at once, whatever the merges say
    add_bos: bool = False
    byte_level: bool = True  # False: pieces are plain text, ▁ for a space, <0xHH> for the rest
    byte_fallback: bool = False
    has_bos: bool = True


_DIGITS_THEN_GPT2 = Pretokenizer((r"\p{N}", GPT2))
_PLAIN_GPT2 = Pretokenizer((GPT2,))
_QWEN2 = Pretokenizer((QWEN2,))
_LLAMA3 = Pretokenizer((LLAMA3,))
_O200K = Pretokenizer((O200K,))
_BAILING = Pretokenizer(
    (
        rf"{_ENDINGS_2}|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_DEEPSEEK_V3 = Pretokenizer((r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK3))
# Merging runs over whole lines here; llama.cpp cuts at line breaks, and so do we.
_SPACE_MARKED = Pretokenizer((r"[^\n]+|\n+",), byte_level=False, byte_fallback=True)

# Without a name llama.cpp falls back to this cut, which is that of the oldest files.
_DEFAULT = Pretokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

_BY_NAMES: dict[str, Pretokenizer] = {
    "default": _DEFAULT,
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": replace(
        _LLAMA3, whole_words=True, add_bos=True
    ),
    "dbrx smaug-bpe": _LLAMA3,
    "glm4 chatglm-bpe": replace(_LLAMA3, has_bos=False),
    "minicpm5": Pretokenizer((r"\p{N}{1,3}", _like_llama3(r"\p{N}+")), whole_words=True),
    "jais-2": Pretokenizer(
        (
            LLAMA3.removesuffix(r"\s+(?!\S)|\s+")
            + "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4))
            + r"\s{1,2}(?!\S)|\s{1}",
        )
    ),
    "deepseek-llm": Pretokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_LETTERS_WITH_CASE}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            r"[一-龥ࠀ-一가-퟿]+",
            r"\p{N}+",
        )
    ),
    "deepseek-coder": Pretokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")
    ),
    "deepseek-v3 hunyuan-dense joyai-llm": _DEEPSEEK_V3,
    "youtu": Pretokenizer(
        (
            r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
            _cased(r"\p{N}", f"{_ENDINGS}?"),
        ),
        whole_words=True,
    ),
    "falcon": Pretokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]")),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": _DIGITS_THEN_GPT2,
    "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert "
    "jina-v1-en jina-v2-code roberta-bpe mpt olmo jais trillion granite-docling "
    "exaone4": _PLAIN_GPT2,
    "qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2": _QWEN2,
    "qwen35": Pretokenizer((_QWEN35,)),
    "poro-chat bloom gpt3-finnish": Pretokenizer((_BLOOM,)),
    "viking": Pretokenizer((_BLOOM, r"\p{N}")),
    "tekken": Pretokenizer((_cased(r"\p{N}", ""),), whole_words=True, add_bos=True),
    "chameleon": Pretokenizer(
        (
            r"<sentinel:[0-9]+>",
            r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT2,
        ),
        add_bos=True,
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _O200K,
    "granite-embed-multi-97m": replace(_O200K, whole_words=True),
    "tiny_aya cohere2moe": Pretokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", O200K)),
    "kimi-k2": Pretokenizer(
        (
            r"[\p{Han}]+|"
            + _cased(
                r"\p{N}{1,3}",
                f"{_ENDINGS}?",
                rf"{_CAPITALS}&&[^\p{{Han}}]",
                rf"{_SMALL}&&[^\p{{Han}}]",
                r"[\r\n]*",
            ),
        )
    ),
    "superbpe": Pretokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "bailingmoe bailingmoe2 llada-moe": _BAILING,
    "seed-coder": Pretokenizer(
        (rf"{_ENDINGS}|{_NOT_WORD}\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",)
    ),
    "afmoe": Pretokenizer(
        (
            r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",  # digits in threes, counted from the right
            "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f"
            "\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
            _DEEPSEEK3,
        )
    ),
    "exaone-moe": Pretokenizer(
        (
            rf"{_ENDINGS}|{_NOT_WORD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "gemma4 granite-embed-multi-311m": replace(_SPACE_MARKED, add_bos=True),
    "sarvam-moe": _SPACE_MARKED,
    "whitespace": Pretokenizer((r"\S+",), byte_level=False),
}

PRETOKENIZERS: dict[str, Pretokenizer] = {
    name: cut for names, cut in _BY_NAMES.items() for name in names.split()
}


def pretokenizer_named(name: str | None) -> Pretokenizer:
    """The cut that `tokenizer.ggml.pre` names; without a name, llama.cpp's default."""
    if not name:
        return _DEFAULT
    if name not in PRETOKENIZERS:
        raise ModelFileError(
            f"the vocabulary's pre-tokenizer {name!r} (tokenizer.ggml.pre) is not known; "
            "use a checkpoint with one of the known ones, or one with a tokenizer.json"
        )
    return PRETOKENIZERS[name]
