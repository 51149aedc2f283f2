"""Cross-entropy in pieces: the logits of all tokens together never exist.

With a vocabulary of 50,000 the logits of one batch take more memory than everything else in the
model. Here a few hundred tokens at a time (on a GPU, a few thousand) get their logits, their loss
and at once the gradients of both, which are all that is kept.
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

_LOGITS_AT_ONCE = 1 << 24  # numbers
# A GPU takes more: every piece is launched from Python and adds a gradient as large as the head,
# and with small ones it waits for both most of the time. One for so many bytes of its memory.
_BYTES_A_LOGIT = 256


def summed_loss(model: Transformer, x: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """The sum over tokens of weight times surprise: one number, with its gradients.

    `x` [..., width] comes from `hidden`; `targets` and `weights` [...] say which token was right
    and how much it counts (None: one each).
    """
    flat, wanted = x.flatten(0, -2), targets.flatten()
    counts = torch.ones_like(wanted, dtype=torch.float32) if weights is None else weights.flatten()
    if not torch.is_grad_enabled():
        pieces = _pieces(model, flat, wanted, counts.float())
        return torch.stack([_piece_loss(model, *piece) for piece in pieces]).sum()
    parameters = [p for p in _head_parameters(model) if p.requires_grad]
    apply: Any = _Summed.apply
    summed: Tensor = apply(flat, wanted, counts.float(), model, *parameters)
    return summed


def token_losses(model: Transformer, x: Tensor, targets: Tensor) -> Tensor:
    """The surprise of each target: minus its log-probability, in the shape of `targets`.

    For losses that are no weighted sum. Logits are computed once more for the gradients.
    """
    flat, wanted = x.flatten(0, -2), targets.flatten()
    pieces = [
        checkpoint(_piece_losses, model, part, aim, use_reentrant=False)
        for part, aim, _ in _pieces(model, flat, wanted, wanted)
    ]
    return torch.cat(pieces).view(targets.shape)


def _pieces(
    model: Transformer, x: Tensor, targets: Tensor, weights: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    most = _LOGITS_AT_ONCE
    if x.is_cuda:
        most = torch.cuda.get_device_properties(x.device).total_memory // _BYTES_A_LOGIT
    size = max(64, most // model.config.vocab_size)
    size = 1 << size.bit_length() - 1  # so that pieces are alike, and one kernel serves them all
    return zip(x.split(size), targets.split(size), weights.split(size), strict=True)


def _piece_losses(model: Transformer, x: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(model.logits(x).float(), targets, reduction="none")


def _piece_loss(model: Transformer, x: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return (_piece_losses(model, x, targets) * weights).sum()


@cache
def _compiled_piece_loss() -> Any:
    return torch.compile(_piece_loss)


def _head_parameters(model: Transformer) -> list[nn.Parameter]:
    """What lies between the last layer and the logits."""
    head = list(model.head.parameters()) if model.head is not None else [model.embed.weight]
    if model.head_bias is not None:
        head.append(model.head_bias)
    before = [] if model.transform is None else list(model.transform.parameters())
    return [*before, *model.norm.parameters(), *head]


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        targets: Tensor,
        weights: Tensor,
        model: Transformer,
        *parameters: nn.Parameter,
    ) -> Tensor:
        piece_loss = _compiled_piece_loss() if x.is_cuda else _piece_loss
        total = torch.zeros((), device=x.device)
        x_gradients: list[Tensor] = []
        gradients = [torch.zeros_like(parameter) for parameter in parameters]
        for part, aim, weight in _pieces(model, x.detach(), targets, weights):
            with torch.enable_grad():
                part = part.detach().requires_grad_()
                loss = piece_loss(model, part, aim, weight)
                found = torch.autograd.grad(loss, [part, *parameters])
            total += loss.detach()
            x_gradients.append(found[0])
            for gradient, more in zip(gradients, found[1:], strict=True):
                gradient += more
        ctx.save_for_backward(torch.cat(x_gradients), *gradients)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x_gradient, *gradients = ctx.saved_tensors
        return (x_gradient * grad, None, None, None, *(each * grad for each in gradients))
