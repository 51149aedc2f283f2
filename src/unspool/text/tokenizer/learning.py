"""How byte-pair encoding learns its merges, written plainly.

Every word of the text begins as single bytes. The pair of neighbours that occurs most often in all
words becomes one piece, a new token; then the next, until there are as many as wanted. The library
does the same much faster; this is here to learn from, to show, and to check the library against.

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
    """Two neighbours that are one token from now on."""

    number: int  # the how manieth merge, from 0
    pair: tuple[bytes, bytes]
    count: int  # how often the two stood beside each other

    @property
    def piece(self) -> bytes:
        return self.pair[0] + self.pair[1]


def learn_merges(words: Mapping[bytes, int], most: int) -> Iterator[LearnedMerge]:
    """The merges that these words (each with how often it occurs) give, at most `most` of them.

    Of pairs that are equally frequent the one of older tokens comes first. The single bytes are as
    old as the characters that stand for them in a vocabulary: that is the library's order.
    """
    corpus = _Corpus(words)
    for number in range(most):
        found = corpus.most_frequent()
        if found is None:
            return
        pair, count = found
        yield LearnedMerge(number, (corpus.pieces[pair[0]], corpus.pieces[pair[1]]), count)
        corpus.merge(pair)


class _Corpus:
    """All words as pieces, and how often each pair of neighbours occurs in them."""

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
        # Counts change while the heap stands; each is looked at again when it comes to the top.
        self.heap = [(-count, pair) for pair, count in self.counts.items()]
        heapq.heapify(self.heap)

    def most_frequent(self) -> tuple[Ids, int] | None:
        while self.heap:
            count, pair = heapq.heappop(self.heap)
            now = self.counts[pair]
            if now == -count:
                return (pair, now) if now > 0 else None
            if now > 0:
                heapq.heappush(self.heap, (-now, pair))
        return None

    def merge(self, pair: Ids) -> None:
        """Join the pair wherever it occurs, from the left."""
        piece = self.pieces[pair[0]] + self.pieces[pair[1]]
        if piece not in self.ids:  # two ways may lead to one piece
            self.ids[piece] = len(self.pieces)
            self.pieces.append(piece)
        joined = self.ids[piece]
        changed: set[Ids] = set()
        for number in sorted(self.where.pop(pair)):
            self._count(number, -1)
            self.words[number] = list(_joined(self.words[number], pair, joined))
            changed |= self._count(number, +1)
        for each in changed:
            if joined in each:
                heapq.heappush(self.heap, (-self.counts[each], each))

    def _count(self, number: int, sign: int) -> set[Ids]:
        """Count the pairs of a word, or take them back."""
        pairs = list(pairwise(self.words[number]))
        for pair in pairs:
            self.counts[pair] += sign * self.weights[number]
            if sign > 0:
                self.where.setdefault(pair, set()).add(number)
            elif pair in self.where:
                self.where[pair].discard(number)
        return set(pairs)


def _joined(word: list[int], pair: Ids, joined: int) -> Iterator[int]:
    place = 0
    while place < len(word):
        if tuple(word[place : place + 2]) == pair:
            yield joined
            place += 2
        else:
            yield word[place]
            place += 1
