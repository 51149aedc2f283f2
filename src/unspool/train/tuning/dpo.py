"""Direct preference optimization (DPO, arXiv 2305.18290): learn from chosen and rejected answers.

The loss of a pair is

    -log sigmoid(beta * (gain(chosen) - gain(rejected)))       gain = log p - log p_ref

where log p is the sum over the answer's tokens and p_ref the reference model: the same model with
LoRA disabled, or a frozen copy. Data rows are {"prompt", "chosen", "rejected"}, texts or lists of
messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from unspool.errors import DataError, SettingsError
from unspool.model.layers.transformer import Transformer
from unspool.text.tokenizer.tokenizer import Tokenizer
from unspool.train.data.prepared import DocumentEncoder, EncodedDocument
from unspool.train.data.selection import permuted
from unspool.train.data.sources import parse_row
from unspool.train.learning.forward import AttentionMask, hidden_states
from unspool.train.learning.lora import lora_modules, switch_lora
from unspool.train.learning.objectives import Loss, token_losses


def log_probabilities(model: Transformer, ids: Tensor, loss_mask: Tensor) -> Tensor:
    """Log-probabilities of the targets [B, T] of rows [B, T + 1]; 0 outside of the loss mask.

    Logits are computed only for targets in the loss mask.
    """
    tokens, targets = ids[:, :-1], ids[:, 1:]
    x = hidden_states(model, tokens, AttentionMask.build(model.config, tokens))
    logprobs = -token_losses(model, x[loss_mask], targets[loss_mask]).float()
    return torch.zeros(targets.shape, device=ids.device).masked_scatter(loss_mask, logprobs)


def dpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    chosen_before: Tensor,
    rejected_before: Tensor,
    *,
    beta: float = 0.1,
    smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Loss and reward margin of each pair; the arguments are sums of log-probabilities.

    `smoothing` is the assumed share of wrongly labelled pairs (conservative DPO).
    """
    margin = beta * ((chosen - chosen_before) - (rejected - rejected_before))
    right, wrong = functional.logsigmoid(margin), functional.logsigmoid(-margin)
    return -(right * (1 - smoothing) + wrong * smoothing), margin


@dataclass
class PairBatch:
    """Pairs of answers: rows 0, 2, ... are chosen, rows 1, 3, ... rejected."""

    ids: Tensor  # [2 B, T + 1]
    loss_mask: Tensor  # [2 B, T]


@dataclass(frozen=True)
class Dpo:
    """The DPO objective."""

    beta: float = 0.1
    smoothing: float = 0.0
    reference: Transformer | None = field(default=None, repr=False)  # None: LoRA disabled

    def __call__(self, model: Transformer, batch: PairBatch, rng: torch.Generator) -> Loss:
        now = log_probabilities(model, batch.ids, batch.loss_mask).sum(1)
        with torch.no_grad(), reference_model(model, self.reference) as reference:
            ref = log_probabilities(reference, batch.ids, batch.loss_mask).sum(1)
        losses, margin = dpo_loss(
            now[::2], now[1::2], ref[::2], ref[1::2], beta=self.beta, smoothing=self.smoothing
        )
        statistics = {
            "accuracy": float((margin > 0).float().mean()),
            "margin": float(margin.detach().mean()),
        }
        return Loss(losses.mean(), len(losses), statistics)


@contextmanager
def reference_model(model: Transformer, copy: Transformer | None) -> Iterator[Transformer]:
    """The model before training: a frozen copy, or the model itself with LoRA disabled."""
    if copy is not None:
        yield copy
        return
    if not any(True for _ in lora_modules(model)):
        raise SettingsError("without LoRA a frozen copy of the model is needed as the reference")
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
            raise DataError(f"all pairs are longer than {length} tokens; give a larger --length")

    def __len__(self) -> int:
        return len(self._pairs)

    def batch(self, step: int) -> PairBatch:
        first = (step * self.world + self.rank) * self.batch_size
        numbers = np.arange(first, first + self.batch_size)
        epochs, positions = np.divmod(numbers, len(self._pairs))
        rows = [
            encoded
            for epoch, position in zip(epochs, positions, strict=True)
            for encoded in self._pairs[
                int(permuted(np.array([position]), len(self._pairs), f"{self.seed} {epoch}")[0])
            ]
        ]
        return PairBatch(*padded(rows))


def padded(rows: Sequence[EncodedDocument]) -> tuple[Tensor, Tensor]:
    """Pad rows to one length: ids [B, T + 1] and loss mask [B, T]."""
    longest = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    loss_mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for number, row in enumerate(rows):
        ids[number, : len(row.ids)] = torch.from_numpy(row.ids.astype(np.int64))
        loss_mask[number, : len(row.ids)] = (
            True if row.loss_mask is None else torch.from_numpy(row.loss_mask)
        )
    return ids, loss_mask[:, 1:]


def _pair(
    row: dict[str, Any], number: int, encoder: DocumentEncoder
) -> tuple[EncodedDocument, EncodedDocument]:
    where = f"row {number + 1}"
    if not {"prompt", "chosen", "rejected"} <= row.keys():
        raise DataError(f"{where} needs the fields prompt, chosen and rejected; it has {list(row)}")
    documents = [
        parse_row({"prompt": row["prompt"], "completion": row[side]}, where)
        for side in ("chosen", "rejected")
    ]
    chosen, rejected = (encoded for encoded, _ in encoder.encode([(d, 0) for d in documents]))
    return chosen, rejected
