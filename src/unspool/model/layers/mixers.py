"""Recurrent layers in plain torch: the specification of what they compute.

    parts = mixer.project(x)                       # all tokens through the matrices at once
    mixed, state = mixer.recur(parts, state)       # token by token, from state to state
    x = x + mixer.finish(mixed, parts)

`recur` goes token by token in 32 bits, so that it gives the same bits wherever a text is cut into
pieces. Training reads whole rows at once (`whole`), where the same sums run in chunks of tokens,
with gradients through them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from unspool.model.config import ModelConfig
from unspool.model.recurrence import Recurrence

Parts = tuple[Tensor, ...]  # [batch, tokens, ...] each
# What a look sees behind a token: its number, then gate, decay and norm of the state [batch, heads]
Seen = Callable[[int, Tensor, Tensor, Tensor], None]


class Taps(nn.Module):
    """The weights of a convolution over the last tokens, each channel by itself."""

    def __init__(self, kernel: int, channels: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(kernel, channels) * kernel**-0.5)
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(
        self, inputs: Tensor, last: Tensor, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Of [batch, tokens, channels] behind the `last` ones; gives those that come last now."""
        count, taps = inputs.shape[1], self.weight.float()
        whole = torch.cat((last, inputs), 1)
        total = torch.zeros_like(inputs)
        for tap, weight in enumerate(taps):
            near = whole[:, tap : tap + count]
            if documents is not None:
                near = near * _same_document(documents, len(taps) - 1 - tap)
            total = total + near * weight
        if self.bias is not None:
            total = total + self.bias.float()
        return total, whole[:, count:]


def _same_document(documents: Tensor, back: int) -> Tensor:
    """Whether the token so many places back belongs to the same document: [batch, tokens, 1]."""
    earlier = functional.pad(documents, (back, 0), value=-1)[:, : documents.shape[1]]
    return (earlier == documents)[..., None]


class Mixer(nn.Module, ABC):
    """What recurrent layers have in common."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.recurrence is not None
        self.recurrence: Recurrence = config.recurrence
        self.channels = self.recurrence.channels(config.mixer(layer), config.width)
        self.floats = config.state_floats(layer)
        bias = self.recurrence.conv_bias
        self.conv = Taps(self.recurrence.conv_kernel, self.channels, bias)

    def forward(self, x: Tensor, mix: Callable[[Mixer, Tensor], Tensor]) -> Tensor:
        """What the layer adds to `x`; `mix` knows whether there is a past, and where it is."""
        return mix(self, x)

    @abstractmethod
    def project(self, x: Tensor) -> Parts:
        """What the matrices make of each token by itself."""

    @abstractmethod
    def recur(self, parts: Parts, state: Tensor, seen: Seen | None = None) -> tuple[Tensor, Tensor]:
        """The tokens' outcome, and the state [batch, floats] behind the last of them."""

    @abstractmethod
    def finish(self, mixed: Tensor, parts: Parts) -> Tensor:
        """What the layer adds to each token's vector."""

    @abstractmethod
    def whole(self, x: Tensor, documents: Tensor | None) -> Tensor:
        """Whole rows of text, none of which has a past; no document knows of another."""

    def fresh(self, batch: int, device: torch.device) -> Tensor:
        return torch.zeros(batch, self.floats, device=device)

    def _convolved(
        self, inputs: Tensor, state: Tensor, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        last = state[:, : (self.recurrence.conv_kernel - 1) * self.channels]
        found: tuple[Tensor, Tensor] = self.conv(
            inputs.float(), last.unflatten(1, (-1, self.channels)), documents
        )
        return found


class ShortConv(Mixer):
    """A gated convolution over the last few tokens (LFM2): c * conv(b * x)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        width = config.width
        self.b, self.c, self.x, self.out = (nn.Linear(width, width, bias=False) for _ in "bcxo")

    def project(self, x: Tensor) -> Parts:
        return self.b(x) * self.x(x), self.c(x)

    def recur(self, parts: Parts, state: Tensor, seen: Seen | None = None) -> tuple[Tensor, Tensor]:
        inputs, gate = parts
        found, last = self._convolved(inputs, state)
        if seen is not None:
            self._show(inputs, state, gate, seen)
        return gate * found.to(gate.dtype), last.flatten(1)

    def _show(self, inputs: Tensor, state: Tensor, gate: Tensor, seen: Seen) -> None:
        kept = self.recurrence.conv_kernel - 1
        whole = torch.cat((state.unflatten(1, (kept, -1)), inputs.float()), 1)
        for token in range(inputs.shape[1]):
            norm = whole[:, token + 1 : token + 1 + kept].flatten(1).norm(dim=1, keepdim=True)
            size = gate[:, token].float().pow(2).mean(1, keepdim=True).sqrt()
            seen(token, size, torch.zeros_like(size), norm)

    def finish(self, mixed: Tensor, parts: Parts) -> Tensor:
        found: Tensor = self.out(mixed)
        return found

    def whole(self, x: Tensor, documents: Tensor | None) -> Tensor:
        inputs, gate = self.project(x)
        found, _ = self._convolved(inputs, self.fresh(len(x), x.device), documents)
        return self.finish(gate * found.to(gate.dtype), ())
