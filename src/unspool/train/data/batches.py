"""Training batches as a pure function of the step number.

A resumed run needs only the step number, no data loader state. Each epoch visits all rows once, in
an order given by the seed and the epoch; the ranks of a parallel run share the rows of a step
without overlap.

Text is packed: a row is a window over concatenated documents. A row of chat data holds one
conversation (a long one is split over several rows) and is padded at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from unspool.errors import DataError, SettingsError
from unspool.train.data.prepared import PackedDocuments
from unspool.train.data.selection import permuted

if TYPE_CHECKING:
    from torch import Tensor

Indices = np.ndarray[Any, np.dtype[np.int64]]

_PAD_MULTIPLE = 32  # rows of chat data are padded to a multiple of this: fewer shapes


@dataclass
class TrainingBatch:
    """`B` rows of `T` inputs and `T` targets, each the token after its input."""

    ids: Tensor  # [B, T + 1] int64; inputs are ids[:, :-1], targets ids[:, 1:]
    loss_mask: Tensor | None = None  # [B, T] bool: which targets are in the loss; None: all
    document_ids: Tensor | None = None  # [B, T] int32: index of the document of each input

    @property
    def inputs(self) -> Tensor:
        return self.ids[:, :-1]

    @property
    def targets(self) -> Tensor:
        return self.ids[:, 1:]


class PackedBatches:
    """The batches of one rank: `batch_size` rows of `length` inputs per step.

    With `inside_documents` a batch carries document indices, so that attention stays inside them.
    """

    def __init__(
        self,
        packed: PackedDocuments,
        batch_size: int,
        length: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        inside_documents: bool = False,
    ) -> None:
        if batch_size < 1 or length < 1 or not 0 <= rank < world:
            raise SettingsError(
                "batch_size and length must be >= 1 and 0 <= rank < world, got "
                f"batch_size {batch_size}, length {length}, rank {rank}, world {world}"
            )
        self.packed = packed
        self.batch_size, self.length = batch_size, length
        self.seed, self.rank, self.world = seed, rank, world
        self.inside_documents = inside_documents
        rows_of = _TextWindows if packed.loss_mask is None else _ConversationRows
        self._rows: _TextWindows | _ConversationRows = rows_of(packed, length)
        if not len(self._rows):
            raise DataError(
                f"the data has {len(packed.ids):,} tokens, too few for one row of {length}: use"
                " more text or a smaller --length"
            )

    @property
    def rows(self) -> int:
        """Number of rows in an epoch."""
        return len(self._rows)

    def batch(self, step: int) -> TrainingBatch:
        """The batch of step `step`, starting at 0."""
        first = (step * self.world + self.rank) * self.batch_size
        return self._batch(self._shuffled(np.arange(first, first + self.batch_size)))

    def _shuffled(self, numbers: Indices) -> Indices:
        """Map running row numbers to rows, with another order in each epoch."""
        epochs, positions = np.divmod(numbers, self.rows)
        rows = np.empty_like(numbers)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            rows[in_epoch] = permuted(positions[in_epoch], self.rows, f"{self.seed} {epoch}")
        return rows

    def _batch(self, rows: Indices) -> TrainingBatch:
        import torch

        starts, ends = self._rows.spans(rows)
        length = self._rows.padded_length(int((ends - starts).max()))
        index = starts[:, None] + np.arange(length + 1)
        inside = index < ends[:, None]
        index = np.minimum(index, ends[:, None] - 1)
        ids = np.where(inside, self.packed.ids[index], 0).astype(np.int64)
        batch = TrainingBatch(torch.from_numpy(ids))
        if self.packed.loss_mask is not None:
            batch.loss_mask = torch.from_numpy((self.packed.loss_mask[index] & inside)[:, 1:])
        if self.inside_documents:
            numbers = np.searchsorted(self.packed.offsets, index[:, :-1], side="right") - 1
            numbers = np.where(inside[:, :-1], numbers - numbers[:, :1], -1)
            batch.document_ids = torch.from_numpy(numbers.astype(np.int32))
        return batch


class _TextWindows:
    """Consecutive windows over packed text.

    A window's last token is the next one's first, so that every token is a target once.
    """

    def __init__(self, packed: PackedDocuments, length: int) -> None:
        self.count = max(0, len(packed.ids) - 1) // length
        self.length = length

    def __len__(self) -> int:
        return self.count

    def spans(self, rows: Indices) -> tuple[Indices, Indices]:
        """Start and end index of each row."""
        starts = rows * self.length
        return starts, starts + self.length + 1

    def padded_length(self, longest: int) -> int:
        return longest - 1


class _ConversationRows:
    """One conversation per row; a long one takes several. Rows without a target are dropped."""

    def __init__(self, packed: PackedDocuments, length: int) -> None:
        assert packed.loss_mask is not None
        starts, ends = packed.offsets[:-1], packed.offsets[1:]
        pieces = np.maximum(1, -(-(ends - starts - 1) // length))
        within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        self.starts = np.repeat(starts, pieces) + within * length
        self.ends = np.minimum(self.starts + length + 1, np.repeat(ends, pieces))
        longer = self.ends - self.starts > 1
        edges = np.stack([self.starts + 1, self.ends], axis=1)[longer].ravel()
        edges = edges[edges < len(packed.ids)]  # the last segment ends with the array
        has_target = np.zeros(len(self.starts), bool)
        if len(edges):  # every second segment is the gap between two rows
            has_target[longer] = np.logical_or.reduceat(packed.loss_mask, edges)[::2]
        self.starts, self.ends = self.starts[has_target], self.ends[has_target]
        self.length = length

    def __len__(self) -> int:
        return len(self.starts)

    def spans(self, rows: Indices) -> tuple[Indices, Indices]:
        """Start and end index of each row."""
        return self.starts[rows], self.ends[rows]

    def padded_length(self, longest: int) -> int:
        return min(self.length, -(-(longest - 1) // _PAD_MULTIPLE) * _PAD_MULTIPLE)
