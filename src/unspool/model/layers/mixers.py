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

CHUNK = 64  # tokens whose sums training makes together
_KEY_EPS = 1e-6

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


class DeltaNet(Mixer):
    """Gated DeltaNet (Qwen3-Next, Qwen3.5): each head keeps a matrix S in which values are found by
    keys. A token lets S fade, corrects what its key finds towards its value, and reads with its
    query: S *= e^g, S += k (beta (v - k S)), o = q S."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        shape, width = self.recurrence, config.width
        self.eps = config.norm_eps
        self.qkv = nn.Linear(width, self.channels, bias=False)
        self.z = nn.Linear(width, shape.values, bias=False)
        self.b = nn.Linear(width, shape.value_heads, bias=False)
        self.a = nn.Linear(width, shape.value_heads, bias=False)
        self.a_log = nn.Parameter(torch.zeros(shape.value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(shape.value_heads))
        self.norm_weight = nn.Parameter(torch.ones(shape.value_width))
        self.out = nn.Linear(shape.values, width, bias=False)
        heads = [shape.key_head(head) for head in range(shape.value_heads)]
        self._key_heads = heads if heads != list(range(shape.value_heads)) else None

    def project(self, x: Tensor) -> Parts:
        return self.qkv(x), self.z(x), self.b(x), self.a(x)

    def recur(self, parts: Parts, state: Tensor, seen: Seen | None = None) -> tuple[Tensor, Tensor]:
        shape = self.recurrence
        query, key, value, last = self._ready(parts, state)
        beta, decay = exact(torch.sigmoid, parts[2]), exact(torch.exp, self._log_decay(parts[3]))
        kept = state[:, last.flatten(1).shape[1] :]
        matrix = kept.unflatten(1, (shape.value_heads, shape.key_width, shape.value_width))
        found = []
        for token in range(query.shape[1]):
            k = key[:, token, :, :, None]
            matrix = matrix * decay[:, token, :, None, None]
            wrong = value[:, token] - (matrix * k).sum(-2)
            matrix = matrix + k * (wrong * beta[:, token, :, None])[:, :, None]
            found.append((matrix * query[:, token, :, :, None]).sum(-2))
            if seen is not None:
                seen(token, beta[:, token], decay[:, token], matrix.flatten(2).norm(dim=2))
        return torch.stack(found, 1).flatten(2), torch.cat((last.flatten(1), matrix.flatten(1)), 1)

    def finish(self, mixed: Tensor, parts: Parts) -> Tensor:
        z = parts[1]
        heads = mixed.float().unflatten(-1, (self.recurrence.value_heads, -1))
        normed = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + self.eps)
        gate = functional.silu(z.float()).unflatten(-1, (self.recurrence.value_heads, -1))
        found: Tensor = self.out((normed * self.norm_weight.float() * gate).flatten(-2).to(z.dtype))
        return found

    def whole(self, x: Tensor, documents: Tensor | None) -> Tensor:
        parts = self.project(x)
        with torch.autocast(x.device.type, enabled=False):
            return self._in_chunks(parts, documents)

    def _in_chunks(self, parts: Parts, documents: Tensor | None) -> Tensor:
        batch, count, _ = parts[0].shape
        shape = self.recurrence
        fresh = self.fresh(batch, parts[0].device)
        query, key, value, _ = (
            part.transpose(1, 2) for part in self._ready(parts, fresh, documents)
        )
        beta = parts[2].float().sigmoid().transpose(1, 2)
        g = self._log_decay(parts[3]).transpose(1, 2)
        matrix = fresh.new_zeros(batch, shape.value_heads, shape.key_width, shape.value_width)
        found = []
        for start in range(0, count, CHUNK):
            at = slice(start, start + CHUNK)
            mixed, matrix = _chunk(
                query[:, :, at], key[:, :, at], value[:, :, at], beta[:, :, at], g[:, :, at],
                matrix, alive(documents, start),
            )  # fmt: skip
            found.append(mixed)
        return self.finish(torch.cat(found, 2).transpose(1, 2).flatten(2), parts)

    def _ready(
        self, parts: Parts, state: Tensor, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values [batch, tokens, heads, width] behind the convolution, and the
        convolution's last inputs."""
        shape = self.recurrence
        convolved, last = self._convolved(parts[0], state, documents)
        query, key, value = exact(functional.silu, convolved).split(
            (shape.keys, shape.keys, shape.values), -1
        )
        query = _unit(query.unflatten(-1, (shape.key_heads, -1))) * shape.key_width**-0.5
        key = _unit(key.unflatten(-1, (shape.key_heads, -1)))
        if self._key_heads is not None:
            query, key = query[:, :, self._key_heads], key[:, :, self._key_heads]
        return query, key, value.unflatten(-1, (shape.value_heads, -1)), last

    def _log_decay(self, a: Tensor) -> Tensor:
        shifted = a.float() + self.dt_bias.float()
        return -exact(torch.exp, self.a_log) * exact(functional.softplus, shifted)


def exact(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """In 32 bits by way of 64: torch computes such a function in other ways at the end of an array,
    and a token must get the same bits wherever it stands. Gradients need not be so exact."""
    if x.requires_grad or x.device.type == "mps":  # which has no 64 bits
        return function(x.float())
    return function(x.double()).float()


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + _KEY_EPS)


def alive(documents: Tensor | None, start: int) -> tuple[Tensor, Tensor] | None:
    """Of a chunk: which token knows which [batch, 1, tokens, tokens], and which of them the state
    before the chunk [batch, 1, tokens]."""
    if documents is None:
        return None
    here = documents[:, start : start + CHUNK]
    before = documents[:, start - 1 : start] if start else torch.full_like(here[:, :1], -1)
    return (here[:, :, None] == here[:, None, :])[:, None], (here == before)[:, None]


def _chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    g: Tensor,
    matrix: Tensor,
    alive: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Tokens [batch, heads, tokens, ...] of a chunk at once. What token t writes is
    u_t = beta_t (v_t - what k_t finds), and it finds what was there before the chunk and the u of
    those before it: a triangular system for all u."""
    total = g.cumsum(-1)
    fades = total.exp()  # of what was there before the chunk
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    last = between[..., -1, :]
    if alive is not None:
        between, fades = between * alive[0], fades * alive[1]
        last = last * alive[0][..., -1, :]
    known = (key @ key.transpose(-1, -2) * between).tril(-1) * beta[..., None]
    wrong = (value - fades[..., None] * (key @ matrix)) * beta[..., None]
    one = torch.eye(known.shape[-1], device=known.device)
    written = torch.linalg.solve_triangular(one + known, wrong, upper=False, unitriangular=True)
    mixed = fades[..., None] * (query @ matrix)
    mixed = mixed + (query @ key.transpose(-1, -2) * between) @ written
    kept = fades[..., -1, None, None] * matrix
    return mixed, kept + (key * last[..., None]).transpose(-1, -2) @ written
