"""DPO: learn from pairs of answers which of two is liked better (arXiv 2305.18290).

The loss of a pair is

    -log sigmoid(beta * (gain(chosen) - gain(rejected)))       gain = log p - log p_ref

where log p is the sum over the answer's tokens, and p_ref is the model as it was before: the same
model with LoRA switched off, or a frozen copy. Rows of data are {"prompt", "chosen", "rejected"},
texts or lists of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from unspool.errors import DataError, SettingsError
from unspool.model.transformer import Transformer
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.encoding import DocumentEncoder, Encoded
from unspool.train.data.shapes import document_of
from unspool.train.data.shuffle import permuted
from unspool.train.learning.cross_entropy import token_losses
from unspool.train.learning.forward import Sight, hidden
from unspool.train.learning.lora import lora_modules, switch_lora
from unspool.train.learning.objectives import Loss


def log_probabilities(model: Transformer, ids: Tensor, counted: Tensor) -> Tensor:
    """Of each row [B, T + 1] the log-probability of every target [B, T]; 0 where none counts.

    Only the targets that count get logits."""
    tokens, targets = ids[:, :-1], ids[:, 1:]
    x = hidden(model, tokens, Sight.of(model.config, tokens))
    found = torch.zeros(targets.shape, device=ids.device)
    return found.masked_scatter(counted, -token_losses(model, x[counted], targets[counted]).float())


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    chosen_before: Tensor,
    rejected_before: Tensor,
    *,
    beta: float = 0.1,
    smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """The loss of each pair, and by how much more the chosen one is liked now (its margin).

    All four are sums of log-probabilities. `smoothing` is the share of pairs that are taken to be
    the wrong way round (arXiv 2305.18290, conservative DPO).
    """
    margin = beta * ((chosen - chosen_before) - (rejected - rejected_before))
    right, wrong = functional.logsigmoid(margin), functional.logsigmoid(-margin)
    return -(right * (1 - smoothing) + wrong * smoothing), margin


@dataclass
class PairBatch:
    """Pairs of answers: rows 0, 2, ... are chosen, rows 1, 3, ... rejected."""

    ids: Tensor  # [2 B, T + 1]
    counted: Tensor  # [2 B, T]


@dataclass(frozen=True)
class Dpo:
    """DPO as an objective of the trainer."""

    beta: float = 0.1
    smoothing: float = 0.0
    before: Transformer | None = field(default=None, repr=False)  # None: LoRA switched off

    def __call__(self, model: Transformer, batch: PairBatch, rng: torch.Generator) -> Loss:
        now = log_probabilities(model, batch.ids, batch.counted).sum(1)
        with torch.no_grad(), as_before(model, self.before) as reference:
            then = log_probabilities(reference, batch.ids, batch.counted).sum(1)
        losses, margin = dpo_loss(
            now[::2], now[1::2], then[::2], then[1::2], beta=self.beta, smoothing=self.smoothing
        )
        told = {
            "accuracy": float((margin > 0).float().mean()),
            "margin": float(margin.detach().mean()),
        }
        return Loss(losses.mean(), len(losses), told)


@contextmanager
def as_before(model: Transformer, copy: Transformer | None) -> Iterator[Transformer]:
    """The model as it was before training."""
    if copy is not None:
        yield copy
        return
    if not any(True for _ in lora_modules(model)):
        raise SettingsError("without LoRA a frozen copy of the model must be kept to compare with")
    switch_lora(model, False)
    try:
        yield model
    finally:
        switch_lora(model, True)


class PairBatches:
    """Rows of {"prompt", "chosen", "rejected"} as batches; batch n is a function of n."""

    def __init__(
        self, rows: Sequence[dict[str, Any]], tokenizer: Tokenizer, batch_size: int, length: int,
        *, seed: int = 0, rank: int = 0, world: int = 1,
    ) -> None:  # fmt: skip
        self.batch_size, self.length, self.seed = batch_size, length, seed
        self.rank, self.world = rank, world
        self._pairs = [_pair(row, n, DocumentEncoder(tokenizer)) for n, row in enumerate(rows)]
        self._pairs = [pair for pair in self._pairs if max(len(e.ids) for e in pair) <= length + 1]
        if not self._pairs:
            raise DataError(f"no pair of answers is short enough for {length} tokens")

    def __len__(self) -> int:
        return len(self._pairs)

    def batch(self, step: int) -> PairBatch:
        first = (step * self.world + self.rank) * self.batch_size
        numbers = np.arange(first, first + self.batch_size)
        epochs, places = np.divmod(numbers, len(self._pairs))
        rows = [
            encoded
            for epoch, place in zip(epochs, places, strict=True)
            for encoded in self._pairs[
                int(permuted(np.array([place]), len(self._pairs), f"{self.seed} {epoch}")[0])
            ]
        ]
        return PairBatch(*padded(rows))


def padded(rows: Sequence[Encoded]) -> tuple[Tensor, Tensor]:
    """Rows of different lengths, filled up behind their ends: ids, and which targets count."""
    longest = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    counted = torch.zeros(len(rows), longest, dtype=torch.bool)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.from_numpy(row.ids.astype(np.int64))
        counted[number, : len(row.ids)] = (
            True if row.counted is None else torch.from_numpy(row.counted)
        )
    return ids, counted[:, 1:]


def _pair(row: dict[str, Any], number: int, encoder: DocumentEncoder) -> tuple[Encoded, Encoded]:
    where = f"row {number + 1}"
    if not {"prompt", "chosen", "rejected"} <= row.keys():
        raise DataError(f"{where} needs the fields prompt, chosen and rejected")
    documents = [
        document_of({"prompt": row["prompt"], "completion": row[side]}, where)
        for side in ("chosen", "rejected")
    ]
    chosen, rejected = (encoded for encoded, _ in encoder.encode([(d, 0) for d in documents]))
    return chosen, rejected


Judge = Callable[[str, str, dict[str, Any]], float]
"""What an answer is worth: of the prompt, the answer, and the row of data."""
