"""Vocabularies in GGUF files: read, build a tokenizer for each type, write."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from unspool.errors import ModelFileError
from unspool.text.tokenizer import pieces
from unspool.text.tokenizer.pieces import SPACE_MARK
from unspool.text.tokenizer.pretokenizers import (
    PRETOKENIZERS,
    Pretokenizer,
    byte_level_splits,
    pretokenizer_named,
)
from unspool.text.tokenizer.vocabulary import (
    UNAMBIGUOUS_END_TEXTS,
    AddedTokenEncoder,
    FirstTextEncoder,
    SplittingEncoder,
    Vocabulary,
    end_ids,
    merges_by_rank,
)

# -- Build the library's tokenizer for each type of GGUF vocabulary
#
# These tokenizers encode plain text only: control and unknown tokens are left out, so that no text
# can become one. Ids are those of the file.


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class GgufTokens:
    """The tokens of a GGUF vocabulary: piece, type and score by id."""

    tokens: Sequence[str]
    ids: dict[str, int]  # of two equal pieces the later, as in llama.cpp
    types: np.ndarray[Any, np.dtype[np.int64]]
    scores: np.ndarray[Any, np.dtype[np.float64]]
    unk_id: int | None

    def of_types(self, *types: TokenType) -> list[int]:
        ids: list[int] = np.flatnonzero(np.isin(self.types, types)).tolist()
        return ids

    def pieces_in_text(self) -> dict[str, int]:
        """Return the pieces that text can become."""
        vocab = self.ids.copy()
        for hidden in self.of_types(TokenType.UNKNOWN, TokenType.CONTROL):
            if vocab.get(self.tokens[hidden]) == hidden:
                del vocab[self.tokens[hidden]]
        return vocab


@dataclass(frozen=True)
class BuiltTokenizer:
    """A library tokenizer and the conversions between its pieces and their text."""

    kind: str
    library: Callable[[], Library]
    piece_bytes: pieces.PieceToBytes
    text_piece: Callable[[str], str]
    first_texts: FirstTextEncoder | None = None


def build_bpe(
    table: GgufTokens, merges: Sequence[str], pretokenizer: Pretokenizer
) -> BuiltTokenizer:
    """Build BPE from a list of merges, over bytes or (gemma4) over characters."""
    vocab = table.pieces_in_text()
    _check_merges(merges)
    if pretokenizer.byte_level:
        pre_tokenizer = byte_level_splits(pretokenizer.patterns)
    else:
        pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pretokenizer.patterns]
        )

    def build() -> Library:
        settings = {
            "byte_fallback": not pretokenizer.byte_level,
            "ignore_merges": pretokenizer.whole_words,
        }
        library = Library(_bpe_model(vocab, merges, **settings))
        library.pre_tokenizer = pre_tokenizer
        if not pretokenizer.byte_level:
            library.normalizer = normalizers.Replace(" ", pieces.SPACE_MARK)
        return library

    if not pretokenizer.byte_level:
        return BuiltTokenizer(
            "SentencePiece BPE", build, pieces.byte_fallback_bytes, pieces.space_marked_text_piece
        )
    first_texts = FirstTextEncoder(vocab, merges, pre_tokenizer, pretokenizer.whole_words)
    return BuiltTokenizer(
        "byte-level BPE", build, pieces.byte_level_bytes, pieces.byte_level_text_piece, first_texts
    )


def _check_merges(merges: Sequence[str]) -> None:
    for merge in merges:
        if not 0 < merge.find(" ", 1) < len(merge) - 1:
            raise ModelFileError(
                f"a merge of the vocabulary is not two pieces: {merge!r}; the file is damaged"
            )


def _bpe_model(vocab: dict[str, int], merges: Sequence[str], **settings: Any) -> models.BPE:
    """Build the BPE model from merges, each written as two pieces with a space between them."""
    try:
        # Fast path for nearly every file: one space in each merge. The library checks the pieces.
        flat = " ".join(merges).split(" ")
        return models.BPE(vocab, list(zip(flat[::2], flat[1::2], strict=True)), **settings)
    except Exception:  # a piece that is not a token; the library raises bare exceptions
        return models.BPE(vocab, list(_checked_pairs(vocab, merges)), **settings)


def _checked_pairs(vocab: dict[str, int], merges: Sequence[str]) -> Iterator[tuple[str, str]]:
    for merge in merges:
        # The first piece may itself begin with a space, so the search starts after it.
        space = merge.find(" ", 1)
        left_piece, right_piece = merge[:space], merge[space + 1 :]
        # llama.cpp ignores merges that lead to no token.
        if left_piece in vocab and right_piece in vocab and left_piece + right_piece in vocab:
            yield left_piece, right_piece


def build_sentencepiece(table: GgufTokens, *, space_prefix: bool) -> BuiltTokenizer:
    """Build SentencePiece BPE: merges ordered by score, byte fallback for missing characters."""
    vocab = table.pieces_in_text()
    usable_ids = table.of_types(
        TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED, TokenType.UNDEFINED
    )
    usable = {table.tokens[n] for n in usable_ids}
    ids = np.asarray(usable_ids, dtype=np.int64)
    order = ids[np.argsort(-table.scores[ids], kind="stable")].tolist()
    pairs = merges_by_rank((table.tokens[n] for n in order), usable)
    unknown = None
    if table.unk_id is not None:
        unknown = table.tokens[table.unk_id]
        vocab[unknown] = table.unk_id
    library = Library(
        models.BPE(vocab, pairs, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    )
    spaces = normalizers.Replace(" ", pieces.SPACE_MARK)
    library.normalizer = (
        normalizers.Sequence([normalizers.Prepend(pieces.SPACE_MARK), spaces])
        if space_prefix
        else spaces
    )
    return BuiltTokenizer(
        "SentencePiece BPE",
        lambda: library,
        pieces.byte_fallback_bytes,
        pieces.space_marked_text_piece,
    )


def build_wordpiece(table: GgufTokens, *, lowercase: bool, strip_accents: bool) -> BuiltTokenizer:
    """Build BERT's WordPiece. GGUF marks pieces that begin a word; the library marks the others."""
    vocab: dict[str, int] = {}
    for piece, n in table.pieces_in_text().items():
        begins = piece.startswith(pieces.SPACE_MARK)
        vocab[piece.removeprefix(pieces.SPACE_MARK) if begins else "##" + piece] = n
    if table.unk_id is None:
        raise ModelFileError("a WordPiece vocabulary needs tokenizer.ggml.unknown_token_id")
    unknown = table.tokens[table.unk_id]
    vocab[unknown] = table.unk_id
    library = Library(models.WordPiece(vocab, unk_token=unknown))
    library.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=True, strip_accents=strip_accents, lowercase=lowercase
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return BuiltTokenizer(
        "WordPiece", lambda: library, pieces.space_marked_bytes, pieces.space_marked_text_piece
    )


# -- Read the vocabulary from a GGUF file's metadata

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
        table = GgufTokens(self.tokens, self.ids, self.types, self._scores(), self.unk_id)
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
                first_texts=built.first_texts,
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


# -- Write a vocabulary as GGUF metadata, with the keys of llama.cpp's converter


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
