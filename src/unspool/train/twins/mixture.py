"""Batches of one shape from a weighted mixture of sources.

    batches = Mixture({"chat": (packed, 0.6), "books": (other, 0.4)}, rows=48, length=640)
    batches.batch(7)              # a function of the step number

Text is cut into windows. Conversations are packed, several per row, long ones in pieces; padding
has document index -1. The source of each row is drawn by its share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from unspool.errors import DataError
from unspool.train.data.batches import TrainingBatch
from unspool.train.data.shards import PackedDocuments
from unspool.train.data.shuffle import permuted

Indices = np.ndarray[Any, np.dtype[np.int64]]


class SourceRows(Protocol):
    """Rows of one source, as indices into its ids; -1 is padding."""

    def __len__(self) -> int: ...

    def row(self, number: int) -> Indices: ...


class WindowRows:
    """Consecutive windows over text."""

    def __init__(self, packed: PackedDocuments, width: int) -> None:
        self.count, self.width = len(packed.ids) // width, width

    def __len__(self) -> int:
        return self.count

    def row(self, number: int) -> Indices:
        return np.arange(number * self.width, (number + 1) * self.width)


class PackedRows:
    """As many documents per row as fit, in an order given by the seed."""

    def __init__(self, packed: PackedDocuments, width: int, seed: int) -> None:
        self.width = width
        starts, ends = packed.offsets[:-1].tolist(), packed.offsets[1:].tolist()
        self._rows: list[list[tuple[int, int]]] = []
        room = 0
        for document in permuted(np.arange(len(starts)), len(starts), str(seed)).tolist():
            for start in range(starts[document], ends[document], width):
                end = min(start + width, ends[document])
                if end - start > room:
                    self._rows.append([])
                    room = width
                self._rows[-1].append((start, end))
                room -= end - start

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> Indices:
        indices = np.full(self.width, -1)
        at = 0
        for start, end in self._rows[number]:
            indices[at : at + end - start] = np.arange(start, end)
            at += end - start
        return indices


class Mixture:
    """The batches of one rank from several sources, given with their shares."""

    def __init__(
        self,
        sources: Mapping[str, tuple[PackedDocuments, float]],
        rows: int,
        length: int,
        seed: int = 0,
        rank: int = 0,
    ) -> None:
        self.batch_size, self.length, self.seed, self.rank = rows, length, seed, rank
        self._packed = [packed for packed, _ in sources.values()]
        self._rows: list[SourceRows] = [
            WindowRows(packed, length + 1)
            if packed.loss_mask is None
            else PackedRows(packed, length + 1, seed)
            for packed in self._packed
        ]
        short = [name for name, rows in zip(sources, self._rows, strict=True) if not len(rows)]
        if short or not sources:
            subject = f"{short[0]} has" if short else "there are"
            raise DataError(f"{subject} too few tokens for one row of {length}; use more text")
        shares = np.array([share for _, share in sources.values()], float)
        if not (shares >= 0).all() or not shares.sum() > 0:
            raise DataError("the shares of the sources must be >= 0, at least one > 0")
        self._shares = shares / shares.sum()

    def batch(self, step: int) -> TrainingBatch:
        rng = np.random.default_rng([self.seed, self.rank, step])
        sources = rng.choice(len(self._rows), size=self.batch_size, p=self._shares)
        rows = [self._row(source, rng) for source in sources]
        ids, loss_mask, documents = (np.stack(part) for part in zip(*rows, strict=True))
        return TrainingBatch(
            torch.from_numpy(ids), torch.from_numpy(loss_mask[:, 1:]),
            torch.from_numpy(documents[:, :-1]),
        )  # fmt: skip

    def _row(self, source: int, rng: np.random.Generator) -> tuple[Any, Any, Any]:
        packed, rows = self._packed[source], self._rows[source]
        indices = rows.row(int(rng.integers(len(rows))))
        is_text = indices >= 0
        indices = np.maximum(indices, 0)
        ids = np.where(is_text, packed.ids[indices], 0).astype(np.int64)
        mask = packed.loss_mask
        loss_mask = is_text.copy() if mask is None else is_text & mask[indices]
        numbers = np.searchsorted(packed.offsets, indices, side="right")
        return ids, loss_mask, np.where(is_text, numbers - numbers[0], -1).astype(np.int32)
