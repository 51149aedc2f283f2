"""Next-token training with scheduled sampling and unlikelihood, as one objective.

Scheduled sampling (Bengio et al. 2015) reduces exposure bias: in training a token is predicted from
the text, in generation from the model's own tokens. A share of the input tokens is replaced by
samples of the model; the targets stay. The share grows linearly from 0 to `scheduled_sampling`. As
in Mihaylova and Martins (2019), all replacements are sampled from one forward pass, and a second
pass trains: two passes instead of one per token.

Unlikelihood (Welleck et al. 2019, token level) reduces repetition: besides raising the target's
probability it lowers that of tokens that occurred earlier in the text:

    loss = -log p(x_t) - alpha * sum over c of log(1 - p(c)),   c in {x_1 ... x_t-1} without x_t
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from unspool.errors import SettingsError
from unspool.model.transformer import Transformer
from unspool.train.learning.cross_entropy import summed_loss
from unspool.train.learning.forward import AttentionMask, causal_within_documents, hidden_states
from unspool.train.learning.objectives import Loss

if TYPE_CHECKING:
    from unspool.train.data.batches import TrainingBatch

_MAX_PROBABILITY = 1 - 1e-5  # of a wrong token, to keep its loss finite
_SAMPLED_LOGITS_PER_CHUNK = 1 << 24


@dataclass(slots=True)
class MitigatedNextToken:
    """`next_token` with scheduled sampling, unlikelihood, or both."""

    scheduled_sampling: float = 0.0  # share of replaced inputs at the end of the training
    unlikelihood: float = 0.0  # alpha
    progress: float = field(default=1.0, compare=False)  # share of the training that is done

    def __post_init__(self) -> None:
        if not 0 <= self.scheduled_sampling <= 1:
            raise SettingsError(
                f"scheduled_sampling must be from 0 to 1, got {self.scheduled_sampling!r}"
            )
        if not 0 <= self.unlikelihood < math.inf:
            raise SettingsError(
                f"unlikelihood must be a finite number >= 0, got {self.unlikelihood!r}"
            )

    def __call__(self, model: Transformer, batch: TrainingBatch, rng: torch.Generator) -> Loss:
        tokens, targets = batch.ids[:, :-1], batch.ids[:, 1:]
        allowed = (
            None if batch.document_ids is None else causal_within_documents(batch.document_ids)
        )
        attention = AttentionMask.build(model.config, tokens, allowed, batch.document_ids)
        rate = self.scheduled_sampling * self.progress
        inputs = _replace_tokens(model, batch, attention, rate, rng) if rate else tokens
        x = hidden_states(model, inputs, attention)
        summed = summed_loss(model, x, targets, batch.loss_mask)
        count = targets.numel() if batch.loss_mask is None else batch.loss_mask.sum().clamp(min=1)
        extra: dict[str, float] = {}
        if self.unlikelihood:
            rows = [_unlikelihood(model, x[row], batch, row) for row in range(len(x))]
            penalty = torch.stack(rows).sum()
            extra["unlikelihood"] = float(penalty.detach() / count)
            summed = summed + self.unlikelihood * penalty
        return Loss(summed / count, count, extra)


# -- scheduled sampling ---------------------------------------------------------------------


def _replace_tokens(
    model: Transformer, batch: TrainingBatch, attention: Any, rate: float, rng: torch.Generator
) -> Tensor:
    """The inputs, each replaced with probability `rate` by a sample of the model."""
    tokens = batch.ids[:, :-1]
    replaced = (torch.rand(tokens.shape, generator=rng) < rate).to(tokens.device)
    replaced[:, 0] = False  # has no context to sample from
    if batch.loss_mask is not None:  # only tokens that the model would generate itself
        replaced[:, 1:] &= batch.loss_mask[:, :-1]
    if batch.document_ids is not None:
        replaced[:, 1:] &= batch.document_ids[:, 1:] == batch.document_ids[:, :-1]
    with torch.no_grad():
        x = hidden_states(model, tokens, attention)
        context = x[:, :-1][replaced[:, 1:]]  # the state before each replaced token
        uniforms = torch.rand(len(context), generator=rng).to(tokens.device)
        inputs = tokens.clone()
        inputs[replaced] = _sample_tokens(model, context, uniforms)
    return inputs


def _sample_tokens(model: Transformer, x: Tensor, uniforms: Tensor) -> Tensor:
    """Sample one token per hidden state, by inverting the cumulative distribution."""
    size = max(64, _SAMPLED_LOGITS_PER_CHUNK // model.config.vocab_size)
    samples = [uniforms.new_empty(0, dtype=torch.long)]
    for part, uniform in zip(x.split(size), uniforms.split(size), strict=True):
        cumulative = model.logits(part).float().softmax(-1).cumsum(-1)
        threshold = uniform * cumulative[:, -1:].squeeze(-1)
        tokens = torch.searchsorted(cumulative, threshold[:, None])
        samples.append(tokens.squeeze(-1).clamp(max=model.config.vocab_size - 1))
    return torch.cat(samples)


# -- unlikelihood ---------------------------------------------------------------------------


def _unlikelihood(model: Transformer, x: Tensor, batch: TrainingBatch, row: int) -> Tensor:
    """Sum of -log(1 - p) over a row's targets and the distinct tokens before each of them."""
    tokens, targets = batch.ids[row, :-1], batch.ids[row, 1:]
    positions = torch.arange(len(tokens), device=tokens.device)
    earlier = positions[:, None] >= positions[None, :]  # [target, token before it]
    repeated = (tokens[:, None] == tokens[None, :]) & ~earlier.T  # [token, same token before it]
    if batch.document_ids is not None:
        same_document = batch.document_ids[row][:, None] == batch.document_ids[row][None, :]
        earlier, repeated = earlier & same_document, repeated & same_document
    candidates = earlier & ~repeated.any(1) & (tokens[None, :] != targets[:, None])
    if batch.loss_mask is not None:
        candidates = candidates & batch.loss_mask[row][:, None]
    summed: Tensor = checkpoint(
        _unlikelihood_of_candidates, model, x, tokens, candidates, use_reentrant=False
    )
    return summed


def _unlikelihood_of_candidates(
    model: Transformer, x: Tensor, tokens: Tensor, candidates: Tensor
) -> Tensor:
    probabilities = model.logits(x).float().softmax(-1)[:, tokens]  # [target, token before it]
    return -(torch.log1p(-probabilities.clamp(max=_MAX_PROBABILITY)) * candidates).sum()
