"""Build the library's tokenizer for each type of GGUF vocabulary.

These tokenizers encode plain text only: control and unknown tokens are left out, so that no text
can become one. Ids are those of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from unspool.errors import ModelFileError
from unspool.text.tokenizer import pieces
from unspool.text.tokenizer.pretokenizers import Pretokenizer, byte_level_splits
from unspool.text.tokenizer.score_merges import merges_by_rank


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
    types: np.ndarray[Any, np.dtype[np.int64]]
    scores: np.ndarray[Any, np.dtype[np.float64]]
    unk_id: int | None

    def of_types(self, *types: TokenType) -> list[int]:
        ids: list[int] = np.flatnonzero(np.isin(self.types, types)).tolist()
        return ids

    def pieces_in_text(self) -> dict[str, int]:
        """Return the pieces that text can become; of two equal ones the later, as in llama.cpp."""
        vocab = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        for hidden in self.of_types(TokenType.UNKNOWN, TokenType.CONTROL):
            if vocab.get(self.tokens[hidden]) == hidden:
                del vocab[self.tokens[hidden]]
        return vocab


@dataclass(frozen=True)
class BuiltTokenizer:
    """A library tokenizer and the conversions between its pieces and their text."""

    kind: str
    library: Library
    piece_bytes: pieces.PieceToBytes
    text_piece: Callable[[str], str]


def build_bpe(
    table: GgufTokens, merges: Sequence[str], pretokenizer: Pretokenizer
) -> BuiltTokenizer:
    """Build BPE from a list of merges, over bytes or (gemma4) over characters."""
    library = Library(
        _bpe_model(
            table.pieces_in_text(),
            merges,
            byte_fallback=not pretokenizer.byte_level,
            ignore_merges=pretokenizer.whole_words,
        )
    )
    if pretokenizer.byte_level:
        library.pre_tokenizer = byte_level_splits(pretokenizer.patterns)
        return BuiltTokenizer(
            "byte-level BPE", library, pieces.byte_level_bytes, pieces.byte_level_text_piece
        )
    library.normalizer = normalizers.Replace(" ", pieces.SPACE_MARK)
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pretokenizer.patterns]
    )
    return BuiltTokenizer(
        "SentencePiece BPE", library, pieces.byte_fallback_bytes, pieces.space_marked_text_piece
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
        if space < 0 or space == len(merge) - 1:
            raise ModelFileError(
                f"a merge of the vocabulary is not two pieces: {merge!r}; the file is damaged"
            )
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
        "SentencePiece BPE", library, pieces.byte_fallback_bytes, pieces.space_marked_text_piece
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
        clean_text=True,
        handle_chinese_chars=True,
        strip_accents=strip_accents,
        lowercase=lowercase,
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return BuiltTokenizer(
        "WordPiece", library, pieces.space_marked_bytes, pieces.space_marked_text_piece
    )
