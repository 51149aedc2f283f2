"""Merges for vocabularies without a merge list: SentencePiece scores and tiktoken ranks.

Both merge, at each step, the two neighbours whose merged piece ranks best; the library expects a
list of pairs, best first. So each piece is split at every position where both halves are pieces,
and the pairs are listed in the order of the pieces.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


def merges_by_rank(best_first: Iterable[str], usable: Collection[str]) -> list[tuple[str, str]]:
    """Return every pair of usable pieces that forms a piece, in the order of the formed pieces."""
    pairs: list[tuple[str, str]] = []
    for piece in best_first:
        for split in range(1, len(piece)):
            left_piece = piece[:split]
            if left_piece in usable:
                right_piece = piece[split:]
                if right_piece in usable:
                    pairs.append((left_piece, right_piece))
    return pairs
