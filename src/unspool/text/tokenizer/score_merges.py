"""Merges for vocabularies that come without: SentencePiece scores and tiktoken ranks.

Both join, at each step, the two neighbours whose joined piece ranks best; the library wants a list
of pairs, best first. So each piece is cut in two at every place where both halves are pieces too,
and the pairs are listed in the order of the pieces. One pass over the characters of the
vocabulary, with look-ups only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


def merges_by_rank(best_first: Iterable[str], usable: Collection[str]) -> list[tuple[str, str]]:
    """Every pair of usable pieces that joins to a piece, in the order of the joined pieces."""
    pairs: list[tuple[str, str]] = []
    for piece in best_first:
        for cut in range(1, len(piece)):
            left = piece[:cut]
            if left in usable:
                right = piece[cut:]
                if right in usable:
                    pairs.append((left, right))
    return pairs
