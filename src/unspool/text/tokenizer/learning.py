"""BPE training, a plain implementation.

Each word starts as single bytes. The most frequent pair of neighbours becomes one piece, a new
token; then the next, until the requested number is reached. The library does the same much faster;
this version is for learning, for display, and to check the library against.

    for merge in learn_merges({b"hug": 10, b"pug": 5, b"hugs": 5}, 1000):
        print(merge.number, merge.pair, merge.count)
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from unspool.text.tokenizer.pieces import byte_characters

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
