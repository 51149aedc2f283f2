"""Chunked cross-entropy: the logits of a batch never exist as one tensor.

With a vocabulary of 50,000 the logits of one batch take more memory than everything else. Here a
few hundred tokens at a time (on a GPU, a few thousand) get their logits, loss and gradients; only
the loss and the gradients are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from unspool.model.transformer import Transformer

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
