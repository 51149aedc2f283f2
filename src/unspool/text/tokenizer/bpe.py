"""BPE in plain Python: encoding that shows each merge, and learning merges."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer as Library
from tokenizers import pre_tokenizers

from unspool.errors import UnspoolError
from unspool.text.tokenizer.pieces import (
    byte_characters,
    byte_level_bytes,
    byte_of,
    space_marked_bytes,
)
from unspool.text.tokenizer.tokenizer import Tokenizer

# -- BPE encoding, a plain implementation that shows each merge
#
# The text is split into words, each word into its smallest pieces. Then the pair of neighbours
# with the best rank becomes one piece, until no pair can be merged. The pieces are the tokens. The
# library does the same much faster; this version is for learning, for display, and to check the
# library against.
#
#     for word in merge_steps(tokenizer, "unspooling"):
#         for merge in word.merges:
#             print(merge.rank, merge.pair, merge.pieces)

Pair = tuple[bytes, bytes]


@dataclass(frozen=True)
class Merge:
    """One merge step."""

    pair: Pair
    rank: int  # lower ranks merge first
    position: int  # index of the left piece in the word
    pieces: tuple[bytes, ...]  # the word after the merge


@dataclass(frozen=True)
class WordMerges:
    """The merges that turn one word into tokens."""

    start: tuple[bytes, ...]
    merges: tuple[Merge, ...]
    ids: tuple[int, ...]

    @property
    def pieces(self) -> tuple[bytes, ...]:
        """The word after the last merge."""
        return self.merges[-1].pieces if self.merges else self.start


def merge_word(pieces: Sequence[bytes], ranks: Mapping[Pair, int]) -> Iterator[Merge]:
    """Merge the pair with the best rank, leftmost first, until no pair can be merged."""
    current = list(pieces)
    while True:
        best: tuple[int, int] | None = None
        for position, pair in enumerate(pairwise(current)):
            rank = ranks.get(pair)
            if rank is not None and (best is None or rank < best[0]):
                best = (rank, position)
        if best is None:
            return
        rank, position = best
        left_piece, right_piece = current[position : position + 2]
        current[position : position + 2] = [left_piece + right_piece]
        yield Merge((left_piece, right_piece), rank, position, tuple(current))


def merge_steps(tokenizer: Tokenizer, text: str) -> list[WordMerges]:
    """Return the merges by which the tokenizer encodes a text, word by word."""
    if "BPE" not in tokenizer.kind:
        raise UnspoolError(
            f"this vocabulary is {tokenizer.kind} and has no merges; only BPE vocabularies do"
        )
    tokenizer.encode(text)  # raises if the text cannot be encoded
    words: list[WordMerges] = []
    rules = _rules(tokenizer.encoder.plain)
    at_start = True
    for part in tokenizer.encoder.parts(text):
        if isinstance(part, int):
            words.append(WordMerges((tokenizer.token_bytes(part),), (), (part,)))
        else:
            words += [rules.word(word) for word in rules.words(part, at_start=at_start)]
        at_start = False
    return words


@lru_cache(maxsize=2)
def _rules(library: Library) -> _MergeTables:
    return _MergeTables(library)


class _MergeTables:
    """The tables of one vocabulary, as bytes: merge ranks of pairs and ids of pieces."""

    def __init__(self, library: Library) -> None:
        config: dict[str, Any] = json.loads(library.to_str())
        model = config["model"]
        self.library = library
        self.byte_level = "ByteLevel" in json.dumps(config["pre_tokenizer"])
        self.ignore_merges: bool = bool(model.get("ignore_merges"))
        self.fuse_unknown: bool = bool(model.get("fuse_unk"))
        vocab: dict[str, int] = model["vocab"]
        self.unknown: int | None = vocab.get(model.get("unk_token") or "")
        self.suffix: str = model.get("end_of_word_suffix") or ""
        self.prefix: str = model.get("continuing_subword_prefix") or ""
        if self.suffix or self.prefix:
            raise UnspoolError(
                "merges of vocabularies with word prefixes or suffixes are not shown"
            )
        self.bytes_of = byte_level_bytes if self.byte_level else space_marked_bytes
        self.ids: dict[bytes, int] = {}
        single_bytes: dict[bytes, int] = {}
        for piece, number in vocab.items():
            byte = byte_of(piece) if model.get("byte_fallback") else None
            if byte is not None:
                single_bytes[bytes([byte])] = number
            elif number != self.unknown:
                self.ids[self.bytes_of(piece)] = number
        self.pieces = dict(self.ids)  # without byte tokens
        # A byte token such as <0x0A> is used only where no ordinary piece is that byte.
        self.ids = single_bytes | self.ids
        self.ranks: dict[Pair, int] = {}
        for rank, (left_piece, right_piece) in enumerate(model["merges"]):
            self.ranks[self.bytes_of(left_piece), self.bytes_of(right_piece)] = rank

    def words(self, text: str, *, at_start: bool) -> list[str]:
        """Split a text into words, as the vocabulary writes them."""
        library = self.library
        if library.normalizer is not None:
            text = library.normalizer.normalize_str(text)
        pre_tokenizer = library.pre_tokenizer
        if pre_tokenizer is None:
            return [text]
        if (
            not at_start
            and isinstance(pre_tokenizer, pre_tokenizers.Metaspace)
            and pre_tokenizer.prepend_scheme == "first"
        ):
            pre_tokenizer = pre_tokenizers.Metaspace(
                pre_tokenizer.replacement, "never", split=pre_tokenizer.split
            )
        return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]

    def word(self, word: str) -> WordMerges:
        word_bytes = self.bytes_of(word)
        if self.ignore_merges and word_bytes in self.pieces:
            return WordMerges((word_bytes,), (), (self.pieces[word_bytes],))
        start: list[bytes] = []
        for character in word:
            piece = self.bytes_of(character)
            single_bytes = [bytes([byte]) for byte in piece]
            # A character without a piece is written byte by byte, if all its bytes are tokens.
            is_piece = piece in self.ids or not all(byte in self.ids for byte in single_bytes)
            start += [piece] if is_piece else single_bytes
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


Ids = tuple[int, int]


@dataclass(frozen=True)
class LearnedMerge:
    """A pair of neighbours that becomes one token."""

    number: int  # from 0
    pair: tuple[bytes, bytes]
    count: int  # occurrences of the pair when it was merged

    @property
    def piece(self) -> bytes:
        return self.pair[0] + self.pair[1]


def learn_merges(words: Mapping[bytes, int], max_merges: int) -> Iterator[LearnedMerge]:
    """Yield up to `max_merges` merges learned from words and their counts.

    Ties go to the pair of older tokens. The single bytes are ordered by the characters that
    represent them in a vocabulary, which is the library's order.
    """
    corpus = _Corpus(words)
    for number in range(max_merges):
        best = corpus.most_frequent()
        if best is None:
            return
        pair, count = best
        yield LearnedMerge(number, (corpus.pieces[pair[0]], corpus.pieces[pair[1]]), count)
        corpus.merge(pair)


class _Corpus:
    """All words as pieces, with counts of neighbouring pairs."""

    def __init__(self, words: Mapping[bytes, int]) -> None:
        order = sorted(range(256), key=lambda byte: byte_characters()[byte])
        self.pieces = [bytes([byte]) for byte in order]
        self.ids = {piece: number for number, piece in enumerate(self.pieces)}
        self.words = [[self.ids[bytes([byte])] for byte in word] for word in words]
        self.weights = list(words.values())
        self.counts: Counter[Ids] = Counter()
        self.where: dict[Ids, set[int]] = {}  # the words that a pair occurs in
        for number in range(len(self.words)):
            self._count(number, +1)
        # Counts in the heap may be outdated; each is checked again when it reaches the top.
        self.heap = [(-count, pair) for pair, count in self.counts.items()]
        heapq.heapify(self.heap)

    def most_frequent(self) -> tuple[Ids, int] | None:
        while self.heap:
            count, pair = heapq.heappop(self.heap)
            current = self.counts[pair]
            if current == -count:
                return (pair, current) if current > 0 else None
            if current > 0:
                heapq.heappush(self.heap, (-current, pair))
        return None

    def merge(self, pair: Ids) -> None:
        """Merge the pair in all words, from left to right."""
        piece = self.pieces[pair[0]] + self.pieces[pair[1]]
        if piece not in self.ids:  # different pairs may form the same piece
            self.ids[piece] = len(self.pieces)
            self.pieces.append(piece)
        merged = self.ids[piece]
        changed: set[Ids] = set()
        for number in sorted(self.where.pop(pair)):
            self._count(number, -1)
            self.words[number] = list(_merge_pair(self.words[number], pair, merged))
            changed |= self._count(number, +1)
        for changed_pair in changed:
            if merged in changed_pair:
                heapq.heappush(self.heap, (-self.counts[changed_pair], changed_pair))

    def _count(self, number: int, sign: int) -> set[Ids]:
        """Add (+1) or subtract (-1) the pairs of a word; return the pairs."""
        pairs = list(pairwise(self.words[number]))
        for pair in pairs:
            self.counts[pair] += sign * self.weights[number]
            if sign > 0:
                self.where.setdefault(pair, set()).add(number)
            elif pair in self.where:
                self.where[pair].discard(number)
        return set(pairs)


def _merge_pair(word: list[int], pair: Ids, merged: int) -> Iterator[int]:
    position = 0
    while position < len(word):
        if tuple(word[position : position + 2]) == pair:
            yield merged
            position += 2
        else:
            yield word[position]
            position += 1
