"""Batches from several sources at once, all of one shape.

    batches = Mixture({"chat": (packed, 0.6), "books": (other, 0.4)}, rows=48, length=640)
    batches.batch(7)              # always the same one

Text gives windows. Conversations are packed, several into a row, one that is too long in pieces;
what is left of a row belongs to no document (its number is -1). Each row of a batch comes from a
source drawn by its share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from unspool.errors import DataError
from unspool.train.data.batches import Batch
from unspool.train.data.shards import Packed
from unspool.train.data.shuffle import permuted

Indices = np.ndarray[Any, np.dtype[np.int64]]


class Rows(Protocol):
    """Rows of one source: of each place the index into its ids, -1 where there is none."""

    def __len__(self) -> int: ...

    def row(self, number: int) -> Indices: ...


class Windows:
    """Windows over text that follow each other."""

    def __init__(self, packed: Packed, width: int) -> None:
        self.count, self.width = len(packed.ids) // width, width

    def __len__(self) -> int:
        return self.count

    def row(self, number: int) -> Indices:
        return np.arange(number * self.width, (number + 1) * self.width)


class Packs:
    """Whole documents, as many as fit a row, in an order that the seed gives."""

    def __init__(self, packed: Packed, width: int, seed: int) -> None:
        self.width = width
        begins, ends = packed.borders[:-1].tolist(), packed.borders[1:].tolist()
        self._rows: list[list[tuple[int, int]]] = []
        room = 0
        for document in permuted(np.arange(len(begins)), len(begins), str(seed)).tolist():
            for begin in range(begins[document], ends[document], width):
                end = min(begin + width, ends[document])
                if end - begin > room:
                    self._rows.append([])
                    room = width
                self._rows[-1].append((begin, end))
                room -= end - begin

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> Indices:
        found = np.full(self.width, -1)
        at = 0
        for begin, end in self._rows[number]:
            found[at : at + end - begin] = np.arange(begin, end)
            at += end - begin
        return found


class Mixture:
    """The batches of one rank."""

    def __init__(
        self,
        sources: Mapping[str, tuple[Packed, float]],
        rows: int,
        length: int,
        seed: int = 0,
        rank: int = 0,
    ) -> None:
        self.batch_size, self.length, self.seed, self.rank = rows, length, seed, rank
        self._packed = [packed for packed, _ in sources.values()]
        self._rows: list[Rows] = [
            Windows(packed, length + 1)
            if packed.counted is None
            else Packs(packed, length + 1, seed)
            for packed in self._packed
        ]
        short = [name for name, each in zip(sources, self._rows, strict=True) if not len(each)]
        if short or not sources:
            what = f"{short[0]} has" if short else "there are"
            raise DataError(f"{what} too few tokens for one row of {length}; use more text")
        shares = np.array([share for _, share in sources.values()], float)
        if not (shares >= 0).all() or not shares.sum() > 0:
            raise DataError("the shares of the sources must be numbers of at least 0, one above")
        self._shares = shares / shares.sum()

    def batch(self, step: int) -> Batch:
        rng = np.random.default_rng([self.seed, self.rank, step])
        chosen = rng.choice(len(self._rows), size=self.batch_size, p=self._shares)
        rows = [self._row(source, rng) for source in chosen]
        ids, counted, documents = (np.stack(part) for part in zip(*rows, strict=True))
        return Batch(
            torch.from_numpy(ids), torch.from_numpy(counted[:, 1:]),
            torch.from_numpy(documents[:, :-1]),
        )  # fmt: skip

    def _row(self, source: int, rng: np.random.Generator) -> tuple[Any, Any, Any]:
        packed, rows = self._packed[source], self._rows[source]
        places = rows.row(int(rng.integers(len(rows))))
        there = places >= 0
        at = np.maximum(places, 0)
        ids = np.where(there, packed.ids[at], 0).astype(np.int64)
        counted = there.copy() if packed.counted is None else there & packed.counted[at]
        numbers = np.searchsorted(packed.borders, at, side="right")
        return ids, counted, np.where(there, numbers - numbers[0], -1).astype(np.int32)
