"""Byte-pair encoding written plainly, one merge at a time.

The text is cut into words, each word into its smallest pieces. Then, again and again, the two
neighbours that rank best become one piece, until no two neighbours can be joined. What is left are
the tokens. The library does the same much faster; this is here to learn from, to show, and to
check the library against.

    for word in merge_steps(tokenizer, "unspooling"):
        for merge in word.merges:
            print(merge.rank, merge.pair, merge.pieces)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer as Library
from tokenizers import pre_tokenizers

from unspool.errors import UnspoolError
from unspool.text.tokenizer.pieces import byte_level_bytes, byte_of, space_marked_bytes
from unspool.text.tokenizer.tokenizer import Tokenizer

Pair = tuple[bytes, bytes]


@dataclass(frozen=True)
class Merge:
    """Two neighbours become one."""

    pair: Pair
    rank: int  # the lower, the earlier it is joined
    position: int  # which piece of the word the left one was
    pieces: tuple[bytes, ...]  # the word after it


@dataclass(frozen=True)
class WordMerges:
    """One word on its way to tokens."""

    start: tuple[bytes, ...]
    merges: tuple[Merge, ...]
    ids: tuple[int, ...]

    @property
    def pieces(self) -> tuple[bytes, ...]:
        """What the word has become."""
        return self.merges[-1].pieces if self.merges else self.start


def merge_word(pieces: Sequence[bytes], ranks: Mapping[Pair, int]) -> Iterator[Merge]:
    """Join the neighbours that rank best, the leftmost of equals, until none are left to join."""
    now = list(pieces)
    while True:
        best: tuple[int, int] | None = None
        for position, pair in enumerate(pairwise(now)):
            rank = ranks.get(pair)
            if rank is not None and (best is None or rank < best[0]):
                best = (rank, position)
        if best is None:
            return
        rank, position = best
        left, right = now[position : position + 2]
        now[position : position + 2] = [left + right]
        yield Merge((left, right), rank, position, tuple(now))


def merge_steps(tokenizer: Tokenizer, text: str) -> list[WordMerges]:
    """How this tokenizer's merges turn a text into the ids that its `encode` gives."""
    if "BPE" not in tokenizer.kind:
        raise UnspoolError(
            f"this vocabulary is {tokenizer.kind} and has no merges; only byte-pair encoding does"
        )
    tokenizer.encode(text)  # refuses what cannot be encoded, in the same words
    words: list[WordMerges] = []
    rules = _rules_of(tokenizer.encoder.plain)
    first = True
    for part in tokenizer.encoder.parts(text):
        if isinstance(part, int):
            words.append(WordMerges((tokenizer.token_bytes(part),), (), (part,)))
        else:
            words += [rules.word(word) for word in rules.words(part, first=first)]
        first = False
    return words


@lru_cache(maxsize=2)
def _rules_of(library: Library) -> _Rules:
    return _Rules(library)


class _Rules:
    """The tables of one vocabulary, in bytes: which pairs join, which pieces are which token."""

    def __init__(self, library: Library) -> None:
        described: dict[str, Any] = json.loads(library.to_str())
        model = described["model"]
        self.library = library
        self.byte_level = "ByteLevel" in json.dumps(described["pre_tokenizer"])
        self.whole_words: bool = bool(model.get("ignore_merges"))
        self.fuse_unknown: bool = bool(model.get("fuse_unk"))
        vocab: dict[str, int] = model["vocab"]
        self.unknown: int | None = vocab.get(model.get("unk_token") or "")
        self.suffix: str = model.get("end_of_word_suffix") or ""
        self.prefix: str = model.get("continuing_subword_prefix") or ""
        if self.suffix or self.prefix:
            raise UnspoolError("this vocabulary marks the parts of words; its merges are not shown")
        self.bytes_of = byte_level_bytes if self.byte_level else space_marked_bytes
        self.ids: dict[bytes, int] = {}
        single_bytes: dict[bytes, int] = {}
        for piece, number in vocab.items():
            byte = byte_of(piece) if model.get("byte_fallback") else None
            if byte is not None:
                single_bytes[bytes([byte])] = number
            elif number != self.unknown:
                self.ids[self.bytes_of(piece)] = number
        self.whole = dict(self.ids)
        # A byte token such as <0x0A> stands in only where no ordinary piece has that byte.
        self.ids = single_bytes | self.ids
        self.ranks: dict[Pair, int] = {}
        for rank, (left, right) in enumerate(model["merges"]):
            self.ranks[self.bytes_of(left), self.bytes_of(right)] = rank

    def words(self, text: str, *, first: bool) -> list[str]:
        """The words of a text, as the vocabulary writes them."""
        library = self.library
        if library.normalizer is not None:
            text = library.normalizer.normalize_str(text)
        cut = library.pre_tokenizer
        if cut is None:
            return [text]
        if (
            not first
            and isinstance(cut, pre_tokenizers.Metaspace)
            and cut.prepend_scheme == "first"
        ):
            cut = pre_tokenizers.Metaspace(cut.replacement, "never", split=cut.split)
        return [word for word, _ in cut.pre_tokenize_str(text)]

    def word(self, word: str) -> WordMerges:
        whole = self.bytes_of(word)
        if self.whole_words and whole in self.whole:
            return WordMerges((whole,), (), (self.whole[whole],))
        start: list[bytes] = []
        for character in word:
            piece = self.bytes_of(character)
            alone = [bytes([byte]) for byte in piece]
            # A character without a piece is written byte by byte, if the vocabulary can.
            known = piece in self.ids or not all(byte in self.ids for byte in alone)
            start += [piece] if known else alone
        merges = tuple(merge_word(start, self.ranks))
        end = merges[-1].pieces if merges else tuple(start)
        return WordMerges(tuple(start), merges, tuple(self._ids(end)))

    def _ids(self, pieces: Sequence[bytes]) -> Iterator[int]:
        before: int | None = None
        for piece in pieces:
            number = self.ids.get(piece, self.unknown)
            fused = self.fuse_unknown and number == before == self.unknown
            if number is not None and not fused:
                yield number
            before = number
