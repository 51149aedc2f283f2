"""Read the vocabulary from a GGUF file's metadata.

The keys begin with `tokenizer.ggml.`; their meaning and defaults follow llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from unspool.errors import ModelFileError
from unspool.text.tokenizer.encoders import SplittingEncoder
from unspool.text.tokenizer.end_tokens import UNAMBIGUOUS_END_TEXTS, end_ids
from unspool.text.tokenizer.gguf_models import (
    BuiltTokenizer,
    GgufTokens,
    TokenType,
    build_bpe,
    build_sentencepiece,
    build_wordpiece,
)
from unspool.text.tokenizer.pretokenizers import Pretokenizer, pretokenizer_named
from unspool.text.tokenizer.vocabulary import Vocabulary

_PREFIX = "tokenizer.ggml."
# Special tokens where the file does not name them. "seperator" is llama.cpp's spelling.
_DEFAULT_IDS: dict[str, dict[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "bert": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0},
    "gpt2": {"bos": 11, "eos": 11},
}
_KINDS = ("gpt2", "llama", "bert", "gemma4")


def read_gguf_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Read the vocabulary of a GGUF file."""
    model = _text(metadata, "model")
    if model is None:
        raise ModelFileError(
            "the GGUF file has no vocabulary (tokenizer.ggml.model is missing); "
            "use a complete model file, or give a tokenizer.json"
        )
    if model not in _KINDS:
        raise ModelFileError(
            f"the GGUF vocabulary is of the kind {model!r}, which is not supported; "
            f"supported are {', '.join(_KINDS)}"
        )
    return _GgufVocabularyReader(metadata, model).vocabulary()


class _GgufVocabularyReader:
    """Builds a `Vocabulary` from metadata."""

    def __init__(self, metadata: Mapping[str, Any], model: str) -> None:
        self.metadata = metadata
        self.model = model
        self.tokens = self._tokens()
        self.ids = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        self.types = self._types()
        self.bos_id = self._special("bos")
        if self.bos_id is None and model == "bert":
            self.bos_id = self._special("cls")
        self.eos_id = self._special("eos")
        self.unk_id = self._special("unknown")
        self.pad_id = self._special("padding", lenient=True)
        self.pretokenizer = self._find_pretokenizer()
        self.ends = self._mark_control()

    def vocabulary(self) -> Vocabulary:
        table = GgufTokens(self.tokens, self.types, self._scores(), self.unk_id)
        space_prefix = self._flag("add_space_prefix", self.model == "llama")
        try:
            built = self._build(table, space_prefix)
        except ModelFileError:
            raise
        except Exception as error:  # the library raises bare exceptions
            reason = " ".join(str(error).split())[:200]
            raise ModelFileError(f"the GGUF vocabulary cannot be used: {reason}") from None
        control = self._texts(table, TokenType.CONTROL, TokenType.UNKNOWN)
        user_defined = self._texts(table, TokenType.USER_DEFINED)
        split_tokens = {*control.values(), *user_defined.values()}
        leading_space = built.kind == "WordPiece" or (
            built.kind != "byte-level BPE" and space_prefix
        )
        return Vocabulary(
            kind=built.kind,
            size=len(self.tokens),
            encoder=SplittingEncoder(
                built.library,
                user_defined,
                control,
                absorbs_before=self._absorbs_before(),
                absorbs_after=self._absorbs_after(split_tokens),
            ),
            piece=lambda n: self.tokens[n],
            id_of=self.ids.get,
            piece_bytes=built.piece_bytes,
            text_piece=built.text_piece,
            plain_text_ids=frozenset(
                split_tokens if built.kind == "byte-level BPE" else control.values()
            ),
            split_token_ids=frozenset(split_tokens),
            control=control,
            end_ids=self.ends,
            bos_id=self.bos_id,
            eos_id=self.eos_id,
            unk_id=self.unk_id,
            pad_id=self.pad_id,
            add_bos=self._add_bos(),
            add_eos=self._flag("add_eos_token", False),
            chat_template=self._chat_template(),
            leading_space=leading_space,
            space_after_added=leading_space,
        )

    def _build(self, table: GgufTokens, space_prefix: bool) -> BuiltTokenizer:
        if self.model == "llama":
            return build_sentencepiece(table, space_prefix=space_prefix)
        if self.model == "bert":
            lowercase = self._flag("normalizer.lowercase", True)
            accents = self._flag("normalizer.strip_accents", lowercase)
            return build_wordpiece(table, lowercase=lowercase, strip_accents=accents)
        merges = _strings(self.metadata.get(_PREFIX + "merges"), "merges")
        if merges is None:
            raise ModelFileError(
                "the vocabulary has no merges (tokenizer.ggml.merges); the file is not complete"
            )
        return build_bpe(table, merges, self.pretokenizer)

    def _find_pretokenizer(self) -> Pretokenizer:
        if self.model == "gpt2":
            return pretokenizer_named(_text(self.metadata, "pre"))
        return pretokenizer_named("gemma4" if self.model == "gemma4" else None)

    def _add_bos(self) -> bool:
        default = self.model in ("llama", "bert") or self.pretokenizer.add_bos
        if self.model == "gemma4":
            return True  # older files wrongly say false
        return self._flag("add_bos_token", default)

    def _tokens(self) -> list[str]:
        tokens = _strings(self.metadata.get(_PREFIX + "tokens"), "tokens")
        if not tokens:
            raise ModelFileError(
                "the GGUF file has no tokens (tokenizer.ggml.tokens); the file is not complete"
            )
        if "" in tokens:
            tokens = [piece or f"[EMPTY_{n}]" for n, piece in enumerate(tokens)]
        return list(tokens)

    def _numbers(self, name: str, kinds: str = "iuf") -> np.ndarray[Any, Any] | None:
        values = self.metadata.get(_PREFIX + name)
        if values is None:
            return None
        try:
            numbers = np.asarray(values)
        except ValueError:
            numbers = np.asarray([], dtype=object)
        if numbers.ndim != 1 or numbers.dtype.kind not in kinds or len(numbers) != len(self.tokens):
            raise ModelFileError(
                f"tokenizer.ggml.{name} must hold {len(self.tokens)} numbers, one for each token;"
                " the file is damaged"
            )
        return numbers

    def _types(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        types = self._numbers("token_type", kinds="iu")
        if types is not None:
            return types.astype(np.int64)
        return np.full(len(self.tokens), TokenType.NORMAL, dtype=np.int64)

    def _scores(self) -> np.ndarray[Any, np.dtype[np.float64]]:
        scores = self._numbers("scores")
        if scores is not None:
            return scores.astype(np.float64)
        if self.model == "llama":
            raise ModelFileError(
                "a SentencePiece vocabulary needs tokenizer.ggml.scores, and the file has none"
            )
        return np.zeros(len(self.tokens))

    def _flag(self, name: str, default: bool) -> bool:
        value = self.metadata.get(_PREFIX + name, default)
        if not isinstance(value, bool | int | np.bool_ | np.integer):
            raise ModelFileError(
                f"tokenizer.ggml.{name} must be true or false, got a {type(value).__name__}"
            )
        return bool(value)

    def _special(self, name: str, *, lenient: bool = False) -> int | None:
        key = f"{_PREFIX}{name}_token_id"
        value = self.metadata.get(key)
        if value is None:
            default = _DEFAULT_IDS.get(self.model, {}).get(name)
            # Use the default id only if that token is not an ordinary one: gpt2's is Falcon's.
            if default is None or default >= len(self.tokens):
                return None
            plain = self.types[default] == TokenType.NORMAL
            return None if plain and (self.model == "gpt2" or name == "padding") else default
        if not isinstance(value, int | np.integer):
            raise ModelFileError(f"{key} must be a token id, got a {type(value).__name__}")
        if not 0 <= value < len(self.tokens):
            if lenient:
                return None  # some converters write an invalid id for 'none'
            raise ModelFileError(
                f"{key} is {value}, but the vocabulary has {len(self.tokens)} tokens; "
                "the file is damaged"
            )
        return int(value)

    def _mark_control(self) -> frozenset[int]:
        """Mark tokens that must never come from text as control tokens; return the end tokens."""
        ids = self.ids
        named = [self.bos_id, self.eos_id, self._special("eot"), self._special("eom")]
        listed_ends = self._end_list()
        ends = {n for n in named[1:] if n is not None} | set(listed_ends)
        control = {n for n in [*named, *listed_ends] if n is not None}
        control |= {ids[text] for text in UNAMBIGUOUS_END_TEXTS if text in ids}
        if self.unk_id is not None and self.types[self.unk_id] == TokenType.NORMAL:
            control.add(self.unk_id)
        self.types = self.types.copy()
        for n in control:
            if self.types[n] != TokenType.UNKNOWN:
                self.types[n] = TokenType.CONTROL
        control_ids = set(np.flatnonzero(self.types == TokenType.CONTROL).tolist())
        return frozenset(ends | end_ids(ids, control_ids))

    def _end_list(self) -> list[int]:
        ids = self.metadata.get(_PREFIX + "eos_token_ids")
        if ids is None:
            return []
        numbers = np.asarray(ids).reshape(-1)
        in_range = numbers.dtype.kind in "iu" and all(0 <= n < len(self.tokens) for n in numbers)
        if not in_range:
            raise ModelFileError(
                f"tokenizer.ggml.eos_token_ids has ids outside the {len(self.tokens)} tokens; "
                "the file is damaged"
            )
        return [int(n) for n in numbers]

    def _absorbs_after(self, split_tokens: set[int]) -> frozenset[int]:
        """Phi-3's tokens absorb the whitespace after them. Only the model's name shows this."""
        name = str(self.metadata.get("general.name", "")).lower()
        if "phi-3" not in name and "phi3" not in name:
            return frozenset()
        excluded = {self.ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
        return frozenset(split_tokens - excluded)

    def _absorbs_before(self) -> frozenset[int]:
        """ModernBERT's mask token absorbs the whitespace before it. Only the name shows this."""
        is_modern = "modern-bert" in str(self.metadata.get("general.name", "")).lower()
        return frozenset({self.ids["[MASK]"]} if is_modern and "[MASK]" in self.ids else ())

    def _texts(self, table: GgufTokens, *types: TokenType) -> dict[str, int]:
        return {self.tokens[n]: n for n in table.of_types(*types)}

    def _chat_template(self) -> str | None:
        template = self.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) and template else None


def _text(metadata: Mapping[str, Any], name: str) -> str | None:
    value = metadata.get(_PREFIX + name)
    if value is None or isinstance(value, str):
        return value
    raise ModelFileError(f"tokenizer.ggml.{name} must be a string, got a {type(value).__name__}")


def _strings(values: Any, name: str) -> Sequence[str] | None:
    if values is None:
        return None
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise ModelFileError(f"tokenizer.ggml.{name} is not a list of strings; the file is damaged")
    if not set(map(type, values)) <= {str}:
        raise ModelFileError(f"tokenizer.ggml.{name} contains a value that is not a string")
    return values
