"""Objective of a bidirectional twin, for infilling and error detection.

A quarter of the rows of a batch each has masked spans, masked answers, uniformly masked tokens, and
noise: up to a fifth of the visible tokens are replaced by samples of the causal model. In noisy
rows the visible tokens are predicted too: a low probability of the token in place marks a likely
error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from unspool.model.transformer import Transformer
from unspool.train.data.batches import TrainingBatch
from unspool.train.learning.cross_entropy import summed_loss
from unspool.train.learning.objectives import Loss
from unspool.train.tuning.preference import reference_model
from unspool.train.twins.block import (
    cached_halves,
    complementary_copies,
    document_ids,
    predicting_states,
)
from unspool.train.twins.halves import CleanNoisyPasses, document_starts
from unspool.train.twins.noise import mask_spans, mask_uniformly

_NOISE_LOGITS_PER_CHUNK = 1 << 25


@dataclass(eq=False)
class FillTwinObjective:
    """Predict masked tokens from both sides, and detect wrong visible tokens."""

    mask_id: int
    clean: Transformer | None = field(default=None, repr=False)  # None: the model without LoRA
    wrong: float = 0.2  # maximum share of visible tokens to replace
    shown_weight: float = 0.25
    _halves: dict[tuple[int, int], CleanNoisyPasses] = field(default_factory=dict, repr=False)
    _readers: dict[tuple[int, int], CleanNoisyPasses] = field(default_factory=dict, repr=False)

    def __call__(self, model: Transformer, batch: TrainingBatch, rng: torch.Generator) -> Loss:
        tokens, documents = batch.inputs, document_ids(batch)
        starts = document_starts(documents)
        places = torch.arange(tokens.shape[1], device=tokens.device)[None]
        maskable = (places != starts) & (documents >= 0)  # a first token has no state before it
        quarter = quarter_rows(len(tokens))
        if batch.loss_mask is not None:
            answers = _answer_inputs(batch.loss_mask)
            maskable[quarter[1]] &= answers[quarter[1]]
        hide = self._draw_masks(tokens, quarter, rng) & maskable
        noisy = tokens.clone()
        last = quarter[3]
        noise = mask_uniformly(len(tokens[last]), tokens.shape[1], rng, self.wrong)
        samples = self._sample_tokens(model, tokens[last], starts[last], rng)
        replaced = noise.to(tokens.device) & maskable[last]
        noisy[last] = torch.where(replaced, samples, tokens[last])
        halves = cached_halves(self._halves, model, tokens)
        halves.set_starts(starts)
        copies = complementary_copies(noisy, hide, maskable & ~hide, self.mask_id)
        x = halves.bidirectional_pass(model, copies)
        masked_loss, count = _mean_loss(model, predicting_states(x, hide), tokens, maskable)
        noisy_x = torch.cat(tuple(part[last] for part in x.chunk(2)))
        visible = predicting_states(noisy_x, ~hide[last])
        visible_loss, _ = _mean_loss(model, visible, tokens[last], maskable[last])
        statistics = {"hidden": float(masked_loss.detach()), "shown": float(visible_loss.detach())}
        return Loss(masked_loss + self.shown_weight * visible_loss, count, statistics)

    def _draw_masks(self, tokens: Tensor, quarter: list[slice], rng: torch.Generator) -> Tensor:
        length = tokens.shape[1]
        rows = [len(tokens[part]) for part in quarter]
        masks = (
            mask_spans(rows[0], length, rng),
            mask_uniformly(rows[1], length, rng),
            mask_uniformly(rows[2], length, rng),
            mask_uniformly(rows[3], length, rng, most=0.5),
        )
        return torch.cat(masks).to(tokens.device)

    def _sample_tokens(
        self, model: Transformer, tokens: Tensor, starts: Tensor, rng: torch.Generator
    ) -> Tensor:
        """A sample of the causal model at each position; the first token stays."""
        seed = int(torch.randint(1 << 62, (1,), generator=rng))
        device_rng = torch.Generator(tokens.device).manual_seed(seed)  # draws on the device
        with torch.no_grad(), reference_model(model, self.clean) as clean:
            halves = cached_halves(self._readers, clean, tokens)
            halves.set_starts(starts)
            flat = halves.clean_pass(clean, tokens)[:, :-1].flatten(0, 1)
            size = max(64, _NOISE_LOGITS_PER_CHUNK // clean.config.vocab_size)
            samples = [_sample(clean.logits(part).float(), device_rng) for part in flat.split(size)]
        return torch.cat((tokens[:, :1], torch.cat(samples).view(len(tokens), -1)), 1)


def _sample(logits: Tensor, rng: torch.Generator) -> Tensor:
    """Sample one token per row (Gumbel-max)."""
    noise = torch.empty_like(logits).exponential_(generator=rng).clamp(min=1e-20)
    return (logits - noise.log()).argmax(-1)


def _mean_loss(
    model: Transformer, x: Tensor, tokens: Tensor, loss_mask: Tensor
) -> tuple[Tensor, Tensor]:
    weights = loss_mask[:, 1:].float()
    count = weights.sum().clamp(min=1)
    return summed_loss(model, x, tokens[:, 1:], weights) / count, count


def quarter_rows(rows: int) -> list[slice]:
    """Split the rows of a batch into the four kinds of noise; the last has at least one row."""
    last = min(rows * 3 // 4, rows - 1)
    borders = [0, last // 3, last * 2 // 3, last, rows]
    return [slice(a, b) for a, b in pairwise(borders)]


def _answer_inputs(loss_mask: Tensor) -> Tensor:
    """Inputs that are targets; `loss_mask` is about the token after each input."""
    return torch.cat((torch.zeros_like(loss_mask[:, :1]), loss_mask[:, :-1]), 1)
