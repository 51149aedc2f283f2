"""Batches for training: which part of the data comes at which step.

A batch is a pure function of its step, so a run that was stopped goes on from a number, without any
state. All rows of the data are seen once in an epoch, in an order that the seed and the epoch's
number give; the ranks of a parallel run share each step's rows without overlap.

Text is packed: a row is a window over documents one behind the other. Of conversations, each row
holds one (a long one takes several), filled up behind its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from unspool.errors import DataError, SettingsError
from unspool.train.data.shards import Packed
from unspool.train.data.shuffle import permuted

if TYPE_CHECKING:
    from torch import Tensor

Indices = np.ndarray[Any, np.dtype[np.int64]]

_FILL_TO = 32  # the length of rows with conversations is a multiple of this: fewer shapes


@dataclass
class Batch:
    """`B` rows of `T` inputs and as many targets, each the token behind its input."""

    ids: Tensor  # [B, T + 1] int64; inputs are ids[:, :-1], targets ids[:, 1:]
    counted: Tensor | None = None  # [B, T] bool: which targets count for the loss; None: all
    documents: Tensor | None = None  # [B, T] int32: the document that each input belongs to

    @property
    def inputs(self) -> Tensor:
        return self.ids[:, :-1]

    @property
    def targets(self) -> Tensor:
        return self.ids[:, 1:]


class Batches:
    """The batches of one rank: `batch_size` rows of `length` inputs a step."""

    def __init__(
        self,
        packed: Packed,
        batch_size: int,
        length: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        inside_documents: bool = False,
    ) -> None:
        if batch_size < 1 or length < 1 or not 0 <= rank < world:
            raise SettingsError(
                f"a batch needs at least one row and one token, and a rank below {world}"
            )
        self.packed = packed
        self.batch_size, self.length = batch_size, length
        self.seed, self.rank, self.world = seed, rank, world
        self.inside_documents = inside_documents
        self._rows = _Windows(packed, length) if packed.counted is None else _Rows(packed, length)
        if not len(self._rows):
            raise DataError(
                f"the data has {len(packed.ids):,} tokens, too few for one row of {length}: use"
                " more text or a smaller length"
            )

    @property
    def rows(self) -> int:
        """How many rows there are: an epoch."""
        return len(self._rows)

    @property
    def steps_per_epoch(self) -> float:
        return self.rows / (self.batch_size * self.world)

    def batch(self, step: int) -> Batch:
        """The batch of this step, counted from 0."""
        first = (step * self.world + self.rank) * self.batch_size
        return self._batch(self._shuffled(np.arange(first, first + self.batch_size)))

    def _shuffled(self, numbers: Indices) -> Indices:
        """Row numbers in the order in which they are seen, epoch after epoch."""
        epochs, places = np.divmod(numbers, self.rows)
        found = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            found[here] = permuted(places[here], self.rows, f"{self.seed} {epoch}")
        return found

    def _batch(self, rows: Indices) -> Batch:
        import torch

        begins, ends = self._rows.places(rows)
        length = self._rows.fitted(int((ends - begins).max()))
        at = begins[:, None] + np.arange(length + 1)
        inside = at < ends[:, None]
        at = np.minimum(at, ends[:, None] - 1)
        ids = np.where(inside, self.packed.ids[at], 0).astype(np.int64)
        batch = Batch(torch.from_numpy(ids))
        if self.packed.counted is not None:
            batch.counted = torch.from_numpy((self.packed.counted[at] & inside)[:, 1:])
        if self.inside_documents:
            numbers = np.searchsorted(self.packed.borders, at[:, :-1], side="right") - 1
            numbers = np.where(inside[:, :-1], numbers - numbers[:, :1], -1)
            batch.documents = torch.from_numpy(numbers.astype(np.int32))
        return batch


class _Windows:
    """Windows that follow each other; each shares its last token with the next one's first, so
    that every token is a target once."""

    def __init__(self, packed: Packed, length: int) -> None:
        self.count = max(0, len(packed.ids) - 1) // length
        self.length = length

    def __len__(self) -> int:
        return self.count

    def places(self, rows: Indices) -> tuple[Indices, Indices]:
        begins = rows * self.length
        return begins, begins + self.length + 1

    def fitted(self, longest: int) -> int:
        return longest - 1


class _Rows:
    """One document a row; one that is too long takes several. Rows without a target that counts
    are left out."""

    def __init__(self, packed: Packed, length: int) -> None:
        assert packed.counted is not None
        begins, ends = packed.borders[:-1], packed.borders[1:]
        pieces = np.maximum(1, -(-(ends - begins - 1) // length))
        within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self.begins = np.repeat(begins, pieces) + within * length
        self.ends = np.minimum(self.begins + length + 1, np.repeat(ends, pieces))
        longer = self.ends - self.begins > 1
        edges = np.stack([self.begins + 1, self.ends], axis=1)[longer].ravel()
        edges = edges[edges < len(packed.ids)]  # the last stretch ends with the array
        count = np.zeros(len(self.begins), bool)
        if len(edges):  # every second stretch lies between two rows
            count[longer] = np.logical_or.reduceat(packed.counted, edges)[::2]
        self.begins, self.ends = self.begins[count], self.ends[count]
        self.length = length

    def __len__(self) -> int:
        return len(self.begins)

    def places(self, rows: Indices) -> tuple[Indices, Indices]:
        return self.begins[rows], self.ends[rows]

    def fitted(self, longest: int) -> int:
        return min(self.length, -(-(longest - 1) // _FILL_TO) * _FILL_TO)
