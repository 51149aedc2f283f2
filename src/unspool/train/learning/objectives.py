"""Training objectives: functions of (model, batch, random generator) that return a loss.

    next_token        predict each token from those before it
    NextTokenAndMtp   ... and the token after it, with a multi-token prediction layer
    Masked            predict masked tokens from all around them (masked diffusion,
                      arXiv 2502.09992)
    BlockDiffusion    predict masked tokens of a block from the block and the text before it
                      (arXiv 2503.09573)

A `Loss` has the mean over the target tokens, their number, and statistics to log. Means of several
batches are combined by their number of tokens, so that neither gradient accumulation nor the number
of processes changes the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from unspool.errors import SettingsError
from unspool.model.layers.mtp import MtpLayer
from unspool.model.layers.transformer import RopeTables, Transformer
from unspool.train.learning.forward import (
    AttentionMask,
    causal_within_documents,
    full_mask,
    hidden_states,
)

if TYPE_CHECKING:
    from unspool.train.data.batches import TrainingBatch


_LOGITS_PER_CHUNK = 1 << 24  # elements
# A GPU takes larger chunks: each is launched from Python and adds a gradient of the size of the
# head, and with small chunks the GPU waits for both. One logit per this many bytes of its memory.
_GPU_BYTES_PER_LOGIT = 256


def summed_loss(model: Transformer, x: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Weighted sum of the cross-entropies, with gradients.

    Args:
        x: Hidden states from `hidden` [..., width].
        targets: Target tokens [...].
        weights: Weight of each target [...]; None: 1.
    """
    flat, targets = x.flatten(0, -2), targets.flatten()
    weights = torch.ones_like(targets) if weights is None else weights.flatten()
    if not torch.is_grad_enabled():
        chunks = _chunks(model, flat, targets, weights.float())
        return torch.stack([_chunk_loss(model, *chunk) for chunk in chunks]).sum()
    parameters = [p for p in _head_parameters(model) if p.requires_grad]
    apply: Any = _ChunkedCrossEntropy.apply
    summed: Tensor = apply(flat, targets, weights.float(), model, *parameters)
    return summed


def token_losses(model: Transformer, x: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each target, in the shape of `targets`.

    For losses that are not a weighted sum. Logits are recomputed for the gradients.
    """
    flat, flat_targets = x.flatten(0, -2), targets.flatten()
    losses = [
        checkpoint(_chunk_token_losses, model, part, target, use_reentrant=False)
        for part, target, _ in _chunks(model, flat, flat_targets, flat_targets)
    ]
    return torch.cat(losses).view(targets.shape)


def _chunks(
    model: Transformer, x: Tensor, targets: Tensor, weights: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    max_logits = _LOGITS_PER_CHUNK
    if x.is_cuda:
        max_logits = torch.cuda.get_device_properties(x.device).total_memory // _GPU_BYTES_PER_LOGIT
    size = max(64, max_logits // model.config.vocab_size)
    size = 1 << size.bit_length() - 1  # equal chunks share one compiled kernel
    return zip(x.split(size), targets.split(size), weights.split(size), strict=True)


def _chunk_token_losses(model: Transformer, x: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(model.logits(x).float(), targets, reduction="none")


def _chunk_loss(model: Transformer, x: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return (_chunk_token_losses(model, x, targets) * weights).sum()


@cache
def _compiled_chunk_loss() -> Any:
    return torch.compile(_chunk_loss)


def _head_parameters(model: Transformer) -> list[nn.Parameter]:
    """Parameters between the last layer and the logits."""
    head = list(model.head.parameters()) if model.head is not None else [model.embed.weight]
    if model.head_bias is not None:
        head.append(model.head_bias)
    before = [] if model.transform is None else list(model.transform.parameters())
    return [*before, *model.norm.parameters(), *head]


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Weighted cross-entropy sum whose gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        targets: Tensor,
        weights: Tensor,
        model: Transformer,
        *parameters: nn.Parameter,
    ) -> Tensor:
        chunk_loss = _compiled_chunk_loss() if x.is_cuda else _chunk_loss
        total = torch.zeros((), device=x.device)
        x_gradients: list[Tensor] = []
        gradients = [torch.zeros_like(parameter) for parameter in parameters]
        for part, target, weight in _chunks(model, x.detach(), targets, weights):
            with torch.enable_grad():
                part = part.detach().requires_grad_()
                loss = chunk_loss(model, part, target, weight)
                x_gradient, *chunk_gradients = torch.autograd.grad(loss, [part, *parameters])
            total += loss.detach()
            x_gradients.append(x_gradient)
            for gradient, chunk_gradient in zip(gradients, chunk_gradients, strict=True):
                gradient += chunk_gradient
        ctx.save_for_backward(torch.cat(x_gradients), *gradients)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x_gradient, *gradients = ctx.saved_tensors
        return (x_gradient * grad, None, None, None, *(gradient * grad for gradient in gradients))


@dataclass(frozen=True, slots=True)
class Loss:
    mean: Tensor  # mean over the target tokens, in nats
    tokens: int | Tensor  # number of target tokens
    extra: dict[str, float] = field(default_factory=dict)  # statistics for the log


# (model, batch, rng) -> Loss.
Objective = Callable[[Any, Any, torch.Generator], Loss]


def next_token(model: Transformer, batch: TrainingBatch, rng: torch.Generator) -> Loss:
    """Causal language modelling, within documents if the batch has document indices."""
    tokens, targets = batch.ids[:, :-1], batch.ids[:, 1:]
    allowed = None if batch.document_ids is None else causal_within_documents(batch.document_ids)
    attention = AttentionMask.build(model.config, tokens, allowed, batch.document_ids)
    mask = batch.loss_mask
    summed = summed_loss(model, hidden_states(model, tokens, attention), targets, mask)
    return _mean_loss(summed, targets.numel() if mask is None else mask.sum())


@dataclass(frozen=True, slots=True)
class NextTokenAndMtp:
    """`next_token`, plus the loss of the model's multi-token prediction layer (`model.mtp`).

    From the hidden state at position t and token t + 1 the layer predicts token t + 2 (DeepSeek-V3,
    arXiv 2412.19437). Gradients reach the model too, unless its weights are frozen.
    """

    weight: float = 0.3  # of the layer's loss

    def __call__(self, model: Transformer, batch: TrainingBatch, rng: torch.Generator) -> Loss:
        mtp, ids, documents, mask = model.mtp, batch.ids, batch.document_ids, batch.loss_mask
        assert isinstance(mtp, MtpLayer), "the model has no MTP layer"
        tokens, targets = ids[:, :-1], ids[:, 1:]
        allowed = None if documents is None else causal_within_documents(documents)
        attention = AttentionMask.build(model.config, tokens, allowed, documents)
        x = hidden_states(model, tokens, attention)
        count = targets.numel() if mask is None else mask.sum()
        loss = _mean_loss(summed_loss(model, x, targets, mask), count)
        following, mtp_targets = ids[:, 1:-1], ids[:, 2:]
        is_target = torch.ones_like(mtp_targets, dtype=torch.bool)
        if mask is not None:
            is_target &= mask[:, 1:]
        if documents is not None:  # the next token must belong to the same document
            is_target &= documents[:, :-1] == documents[:, 1:]
        positions = np.arange(following.shape[1])
        states = mtp(
            model.embed_tokens(following, positions),
            model.norm(x[:, :-1]),
            _mtp_rope(mtp, positions, x),
            AttentionMask.build(mtp.config, following, allowed),
        )
        losses = _head_losses(model, states, mtp_targets) * is_target
        mtp_mean = losses.sum() / is_target.sum().clamp(min=1)
        extra = {**loss.extra, "mtp_loss": float(mtp_mean.detach())}
        return Loss(loss.mean + self.weight * mtp_mean, loss.tokens, extra)


def _mtp_rope(mtp: MtpLayer, positions: Any, x: Tensor) -> RopeTables | None:
    rotary = mtp.config.layer_rope(0)
    if rotary is None:
        return None
    cosine, sine = (torch.from_numpy(t).to(x) for t in rotary.tables(positions, len(positions)))
    return RopeTables(cosine, sine)


def _head_losses(model: Transformer, states: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each target from hidden states after a norm; logits are recomputed for the
    gradients."""

    def compute(part: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(model.head_logits(part).float(), target, reduction="none")

    flat, flat_targets = states.flatten(0, -2), targets.flatten()
    losses = [
        checkpoint(compute, part, target, use_reentrant=False)
        for part, target, _ in _chunks(model, flat, flat_targets, flat_targets)
    ]
    return torch.cat(losses).view(targets.shape)


@dataclass(frozen=True, slots=True)
class Masked:
    """Masked diffusion: predict masked tokens from all visible ones.

    In each row a share t of the tokens, uniform from 0 to 1, is replaced by `mask_id`. With
    `shifted` a hidden state predicts the next token, as in models that were causal before.

    `weighting`: "bound" weights a prediction by 1/t, which makes the loss a bound on the
    log-likelihood of the text; "plain" weights all alike, which has less variance.
    """

    mask_id: int
    shifted: bool = False
    weighting: Literal["bound", "plain"] = "bound"

    def __call__(self, model: Transformer, batch: TrainingBatch, rng: torch.Generator) -> Loss:
        tokens = batch.ids[:, :-1]
        share = _mask_ratios(tokens.shape[0], 1, rng, tokens.device)
        hide = _draw_mask(tokens, share, rng) & _maskable(batch)
        weights = hide / share if self.weighting == "bound" else hide.float()
        noisy = tokens.masked_fill(hide, self.mask_id)
        allowed = full_mask if batch.document_ids is None else _same_document(batch.document_ids)
        attention = AttentionMask.build(model.config, tokens, allowed)
        x = hidden_states(model, noisy, attention)
        if self.shifted:  # nothing precedes the first token, so it is not predicted
            x, tokens, weights = x[:, :-1], tokens[:, 1:], weights[:, 1:]
        summed = summed_loss(model, x, tokens, weights)
        bound = self.weighting == "bound"
        return _mean_loss(summed, _maskable(batch).sum() if bound else weights.sum().clamp(min=1))


@dataclass(frozen=True, slots=True)
class BlockDiffusion:
    """Block diffusion: blocks from left to right, the tokens of a block in any order.

    A row is concatenated with a noisy copy of itself. The clean half has causal attention; each
    noisy block attends to itself, bidirectionally, and to the clean tokens before it. A finished
    block therefore has the same keys and values as in a causal model.

    `weighting`: "bound" weights a prediction by 1/t, t being the masked share of its block, which
    bounds the log-likelihood; "plain" weights all alike.
    """

    mask_id: int
    block: int = 8
    shifted: bool = False
    weighting: Literal["bound", "plain"] = "bound"

    def __call__(self, model: Transformer, batch: TrainingBatch, rng: torch.Generator) -> Loss:
        clean = batch.ids[:, :-1]
        rows, length = clean.shape
        blocks = -(-length // self.block)
        share = _mask_ratios(rows, blocks, rng, clean.device)
        share = share.repeat_interleave(self.block, 1)[:, :length]
        hide = _draw_mask(clean, share, rng) & _maskable(batch)
        clean_and_noisy = torch.cat((clean, clean.masked_fill(hide, self.mask_id)), 1)
        positions = np.tile(np.arange(length), 2)
        allowed = block_diffusion_mask(length, self.block, batch.document_ids)
        attention = AttentionMask.build(model.config, clean_and_noisy, allowed)
        x = hidden_states(model, clean_and_noisy, attention, positions)
        is_bound = self.weighting == "bound"
        weights = hide / share if is_bound else hide.float()
        num_targets = _maskable(batch).sum() if is_bound else hide.sum().clamp(min=1)
        summed = summed_loss(model, self._predicting_states(x, length), clean, weights)
        return _mean_loss(summed, num_targets)

    def _predicting_states(self, x: Tensor, length: int) -> Tensor:
        """The hidden state that predicts each token: its own, or with `shifted` the one before."""
        noisy = x[:, length:]
        if not self.shifted:
            return noisy
        # The first token of a block is predicted by the clean token before it, which attends to all
        # text before the block; the very first token by its own position.
        before = torch.cat((noisy[:, :1], noisy[:, :-1]), 1)
        clean_before = torch.cat((noisy[:, :1], x[:, : length - 1]), 1)
        first = (torch.arange(length, device=x.device) % self.block == 0)[None, :, None]
        return torch.where(first, clean_before, before)


def block_diffusion_mask(length: int, block: int, documents: Tensor | None) -> Any:
    """Mask function over `length` clean tokens followed by their noisy copies."""

    def allowed(row: Any, head: Any, query: Any, key: Any) -> Any:
        noisy_query, noisy_key = query >= length, key >= length
        at, there = query % length, key % length
        own_block = at // block == there // block
        clean = ~noisy_query & ~noisy_key & (at >= there)
        before = noisy_query & ~noisy_key & (there // block < at // block)
        visible = clean | before | (noisy_query & noisy_key & own_block)
        if documents is not None:
            visible = visible & (documents[row, at] == documents[row, there])
        return visible

    return allowed


def _same_document(documents: Tensor) -> Any:
    def allowed(row: Any, head: Any, query: Any, key: Any) -> Any:
        return documents[row, query] == documents[row, key]

    return allowed


def _mask_ratios(rows: int, count: int, rng: torch.Generator, device: torch.device) -> Tensor:
    """Masked shares from 0.001 to 1, [rows, count].

    They are spread evenly over the batch, which lowers the variance of the loss, and never 0,
    because the loss is divided by them.
    """
    uniform = torch.rand(1, generator=rng) + torch.arange(rows * count) / (rows * count)
    shuffled = (uniform % 1)[torch.randperm(rows * count, generator=rng)]
    return (shuffled * 0.999 + 0.001).view(rows, count).to(device)


def _draw_mask(tokens: Tensor, share: Tensor, rng: torch.Generator) -> Tensor:
    return torch.rand(tokens.shape, generator=rng).to(tokens.device) < share


def _maskable(batch: TrainingBatch) -> Tensor:
    """Inputs that are targets of the loss; `loss_mask` is about the token after each input."""
    if batch.loss_mask is None:
        return torch.ones_like(batch.ids[:, :-1], dtype=torch.bool)
    first = torch.zeros_like(batch.loss_mask[:, :1])
    return torch.cat((first, batch.loss_mask[:, :-1]), 1)


def _mean_loss(summed: Tensor, tokens: int | Tensor) -> Loss:
    num_tokens = tokens.clamp(min=1) if isinstance(tokens, Tensor) else max(1, tokens)
    return Loss(summed / num_tokens, tokens)


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
