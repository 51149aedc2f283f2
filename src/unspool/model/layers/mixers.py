"""Recurrent layers in plain torch: the specification for the backends.

    parts = mixer.project(x)                       # projections of all tokens
    mixed, state = mixer.recur(parts, state)       # recurrence, token by token
    x = x + mixer.finish(mixed, parts)

`recur` runs token by token in float32, so the result is bit-identical for any split of the text.
Training runs full rows (`forward_documents`) in chunks of tokens, with gradients.
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
# Observer called after each token: its index, then gate, decay and state norm [batch, heads].
StateObserver = Callable[[int, Tensor, Tensor, Tensor], None]


class Taps(nn.Module):
    """Causal depthwise convolution over the last tokens."""

    def __init__(self, kernel: int, channels: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(kernel, channels) * kernel**-0.5)
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None

    def forward(
        self, inputs: Tensor, conv_state: Tensor, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Convolve [batch, tokens, channels] after the past inputs `conv_state`; also return the
        new past inputs."""
        count, taps = inputs.shape[1], self.weight.float()
        padded = torch.cat((conv_state, inputs), 1)
        total = torch.zeros_like(inputs)
        for tap, weight in enumerate(taps):
            shifted = padded[:, tap : tap + count]
            if documents is not None:
                shifted = shifted * _same_document(documents, len(taps) - 1 - tap)
            total = total + shifted * weight
        if self.bias is not None:
            total = total + self.bias.float()
        return total, padded[:, count:]


def _same_document(documents: Tensor, back: int) -> Tensor:
    """Whether the token `back` positions earlier is in the same document: [batch, tokens, 1]."""
    earlier = functional.pad(documents, (back, 0), value=-1)[:, : documents.shape[1]]
    return (earlier == documents)[..., None]


class Mixer(nn.Module, ABC):
    """Base class of recurrent layers."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.recurrence is not None
        self.recurrence: Recurrence = config.recurrence
        self.channels = self.recurrence.channels(config.mixer(layer), config.width)
        self.floats = config.state_floats(layer)
        bias = self.recurrence.conv_bias
        self.conv = Taps(self.recurrence.conv_kernel, self.channels, bias)

    def forward(self, x: Tensor, mix: Callable[[Mixer, Tensor], Tensor]) -> Tensor:
        """The vector to add to `x`; `mix` supplies the state."""
        return mix(self, x)

    @abstractmethod
    def project(self, x: Tensor) -> Parts:
        """Projections of each token."""

    @abstractmethod
    def recur(
        self, parts: Parts, state: Tensor, observe: StateObserver | None = None
    ) -> tuple[Tensor, Tensor]:
        """Outputs of the tokens, and the state [batch, floats] after the last one."""

    @abstractmethod
    def finish(self, mixed: Tensor, parts: Parts) -> Tensor:
        """Normalize, gate and project the recurrence's output."""

    @abstractmethod
    def forward_documents(self, x: Tensor, documents: Tensor | None) -> Tensor:
        """Forward pass over full rows from the zero state; documents do not affect each other."""

    def zero_state(self, batch: int, device: torch.device) -> Tensor:
        return torch.zeros(batch, self.floats, device=device)

    def _convolved(
        self, inputs: Tensor, state: Tensor, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        conv_state = state[:, : (self.recurrence.conv_kernel - 1) * self.channels]
        result: tuple[Tensor, Tensor] = self.conv(
            inputs.float(), conv_state.unflatten(1, (-1, self.channels)), documents
        )
        return result


class ShortConv(Mixer):
    """A gated convolution over the last few tokens (LFM2): c * conv(b * x)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        width = config.width
        self.b, self.c, self.x, self.out = (nn.Linear(width, width, bias=False) for _ in "bcxo")

    def project(self, x: Tensor) -> Parts:
        return self.b(x) * self.x(x), self.c(x)

    def recur(
        self, parts: Parts, state: Tensor, observe: StateObserver | None = None
    ) -> tuple[Tensor, Tensor]:
        inputs, gate = parts
        convolved, conv_state = self._convolved(inputs, state)
        if observe is not None:
            self._show(inputs, state, gate, observe)
        return gate * convolved.to(gate.dtype), conv_state.flatten(1)

    def _show(self, inputs: Tensor, state: Tensor, gate: Tensor, observe: StateObserver) -> None:
        num_past = self.recurrence.conv_kernel - 1
        padded = torch.cat((state.unflatten(1, (num_past, -1)), inputs.float()), 1)
        for token in range(inputs.shape[1]):
            norm = padded[:, token + 1 : token + 1 + num_past].flatten(1).norm(dim=1, keepdim=True)
            gate_rms = gate[:, token].float().pow(2).mean(1, keepdim=True).sqrt()
            observe(token, gate_rms, torch.zeros_like(gate_rms), norm)

    def finish(self, mixed: Tensor, parts: Parts) -> Tensor:
        output: Tensor = self.out(mixed)
        return output

    def forward_documents(self, x: Tensor, documents: Tensor | None) -> Tensor:
        inputs, gate = self.project(x)
        convolved, _ = self._convolved(inputs, self.zero_state(len(x), x.device), documents)
        return self.finish(gate * convolved.to(gate.dtype), ())
