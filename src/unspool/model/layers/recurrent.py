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
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from unspool.model.config import ModelConfig, Recurrence

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


# -- Recurrent layers with a matrix state S per head, in which values are looked up by keys

CHUNK = 64  # tokens of a chunk in training


class MatrixMixer(Mixer):
    """Base class of DeltaNet and Mamba-2: heads with decay, followed by a gated norm."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        shape = self.recurrence
        self.eps = config.norm_eps
        self.z = nn.Linear(config.width, shape.value_dim, bias=False)
        self.a_log = nn.Parameter(torch.zeros(shape.value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(shape.value_heads))
        self.out = nn.Linear(shape.value_dim, config.width, bias=False)
        heads = [shape.key_head(head) for head in range(shape.value_heads)]
        self._key_heads = heads if heads != list(range(shape.value_heads)) else None

    def forward_documents(self, x: Tensor, documents: Tensor | None) -> Tensor:
        parts = self.project(x)
        with torch.autocast(x.device.type, enabled=False):  # sums over many tokens
            mixed = self._in_chunks(parts, documents).flatten(2)
        return self.finish(mixed, parts)

    @abstractmethod
    def _in_chunks(self, parts: Parts, documents: Tensor | None) -> Tensor:
        """Outputs of `recur` from the zero state, [batch, tokens, heads, width], with gradients."""

    @abstractmethod
    def _split(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the convolution's output into queries and keys per head, and values."""

    def _ready(
        self, parts: Parts, state: Tensor, documents: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values [batch, tokens, value heads, width] after the convolution, and
        the convolution's past inputs."""
        convolved, conv_state = self._convolved(parts[0], state, documents)
        query, key, value = self._split(elementwise_exact(functional.silu, convolved))
        values = value.unflatten(-1, (self.recurrence.value_heads, -1))
        return self._for_values(query), self._for_values(key), values, conv_state

    def _chunks(
        self, tokens: tuple[Tensor, ...], documents: Tensor | None, chunk: Callable[..., Chunk]
    ) -> Tensor:
        """Apply `chunk` to one chunk after the other of `tokens`, [batch, tokens, heads, ...]
        each."""
        shape, first = self.recurrence, tokens[0]
        matrix = first.new_zeros(len(first), shape.value_heads, shape.key_width, shape.value_width)
        by_head, outputs = [part.transpose(1, 2) for part in tokens], []
        for start in range(0, first.shape[1], CHUNK):
            chunk_inputs = [part[:, :, start : start + CHUNK] for part in by_head]
            mixed, matrix = chunk(*chunk_inputs, matrix, document_masks(documents, start))
            outputs.append(mixed)
        return torch.cat(outputs, 2).transpose(1, 2)

    def _matrix(self, state: Tensor, conv_state: Tensor) -> Tensor:
        """The heads' matrices: they follow the convolution's inputs in the state."""
        shape, flat = self.recurrence, state[:, conv_state.flatten(1).shape[1] :]
        matrix: Tensor = flat.unflatten(1, (shape.value_heads, shape.key_width, shape.value_width))
        return matrix

    def _of_keys(self, part: Tensor) -> Tensor:
        """Split keys or queries into heads."""
        heads: Tensor = part.unflatten(-1, (self.recurrence.key_heads, -1))
        return heads

    def _for_values(self, part: Tensor) -> Tensor:
        """Repeat the key or query heads for the value heads that share them."""
        return part if self._key_heads is None else part[:, :, self._key_heads]

    def _rate(self) -> Tensor:
        """Logarithmic decay rate of each head."""
        return -elementwise_exact(torch.exp, self.a_log)


Chunk = tuple[Tensor, Tensor]  # outputs of the tokens, and the matrix after them
DocumentMasks = tuple[Tensor, Tensor]


class DecayFactors(NamedTuple):
    """Decay between the tokens of a chunk."""

    between: Tensor  # [tokens, tokens]: at each token, of what each earlier token wrote
    before: Tensor  # [tokens]: at each token, of the state before the chunk
    last: Tensor  # [tokens]: after the chunk, of what each token wrote


def decay_factors(g: Tensor, masks: DocumentMasks | None) -> DecayFactors:
    """Decay factors from log decays [batch, heads, tokens]."""
    total = g.cumsum(-1)
    before = total.exp()
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    last = between[..., -1, :]
    if masks is not None:
        between, before = between * masks[0], before * masks[1]
        last = last * masks[0][..., -1, :]
    return DecayFactors(between, before, last)


def read_and_update(
    query: Tensor, key: Tensor, written: Tensor, matrix: Tensor, decay: DecayFactors
) -> Chunk:
    """Outputs of the queries, which read the matrix and what the chunk has `written` at its keys;
    and the matrix after the chunk."""
    mixed = decay.before[..., None] * (query @ matrix)
    mixed = mixed + (query @ key.transpose(-1, -2) * decay.between) @ written
    carried = decay.before[..., -1, None, None] * matrix
    return mixed, carried + (key * decay.last[..., None]).transpose(-1, -2) @ written


def elementwise_exact(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function in float64 and round to float32. torch's vectorized float32 functions give
    other bits at the end of an array, and a token must get the same bits at any position. Not
    needed with gradients."""
    if x.requires_grad or x.device.type == "mps":  # MPS has no float64
        return function(x.float())
    return function(x.double()).float()


def document_masks(documents: Tensor | None, start: int) -> DocumentMasks | None:
    """Masks of a chunk: pairs of tokens in the same document [batch, 1, tokens, tokens], and tokens
    in the document before the chunk [batch, 1, tokens]."""
    if documents is None:
        return None
    chunk_documents = documents[:, start : start + CHUNK]
    before = (
        documents[:, start - 1 : start] if start else torch.full_like(chunk_documents[:, :1], -1)
    )
    return (chunk_documents[:, :, None] == chunk_documents[:, None, :])[:, None], (
        chunk_documents == before
    )[:, None]


# -- Gated DeltaNet in plain torch (Qwen3-Next, Qwen3.5)

_KEY_EPS = 1e-6


class DeltaNet(MatrixMixer):
    """Gated delta rule: S *= e^g, S += k (beta (v - k S)), o = q S."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        shape, width = self.recurrence, config.width
        self.qkv = nn.Linear(width, self.channels, bias=False)
        self.b = nn.Linear(width, shape.value_heads, bias=False)
        self.a = nn.Linear(width, shape.value_heads, bias=False)
        self.norm_weight = nn.Parameter(torch.ones(shape.value_width))

    def project(self, x: Tensor) -> Parts:
        return self.qkv(x), self.z(x), self.b(x), self.a(x)

    def recur(
        self, parts: Parts, state: Tensor, observe: StateObserver | None = None
    ) -> tuple[Tensor, Tensor]:
        query, key, value, conv_state = self._ready(parts, state)
        beta, decay = (
            elementwise_exact(torch.sigmoid, parts[2]),
            elementwise_exact(torch.exp, self._log_decay(parts[3])),
        )
        matrix, outputs = self._matrix(state, conv_state), []
        for token in range(query.shape[1]):
            k = key[:, token, :, :, None]
            matrix = matrix * decay[:, token, :, None, None]
            error = value[:, token] - (matrix * k).sum(-2)
            matrix = matrix + k * (error * beta[:, token, :, None])[:, :, None]
            outputs.append((matrix * query[:, token, :, :, None]).sum(-2))
            if observe is not None:
                observe(token, beta[:, token], decay[:, token], matrix.flatten(2).norm(dim=2))
        return torch.stack(outputs, 1).flatten(2), torch.cat(
            (conv_state.flatten(1), matrix.flatten(1)), 1
        )

    def finish(self, mixed: Tensor, parts: Parts) -> Tensor:
        z = parts[1]
        heads = mixed.float().unflatten(-1, (self.recurrence.value_heads, -1))
        normed = heads * torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + self.eps)
        gate = functional.silu(z.float()).unflatten(-1, (self.recurrence.value_heads, -1))
        output: Tensor = self.out(
            (normed * self.norm_weight.float() * gate).flatten(-2).to(z.dtype)
        )
        return output

    def _in_chunks(self, parts: Parts, documents: Tensor | None) -> Tensor:
        state = self.zero_state(len(parts[0]), parts[0].device)
        query, key, value, _ = self._ready(parts, state, documents)
        beta, g = parts[2].float().sigmoid(), self._log_decay(parts[3])
        return self._chunks((query, key, value, beta, g), documents, _delta_chunk)

    def _split(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.recurrence
        query, key, value = convolved.split((shape.key_dim, shape.key_dim, shape.value_dim), -1)
        query = _unit(self._of_keys(query)) * shape.key_width**-0.5
        return query, _unit(self._of_keys(key)), value

    def _log_decay(self, a: Tensor) -> Tensor:
        return self._rate() * elementwise_exact(
            functional.softplus, a.float() + self.dt_bias.float()
        )


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + _KEY_EPS)


def _delta_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    g: Tensor,
    matrix: Tensor,
    masks: DocumentMasks | None,
) -> Chunk:
    """Process a chunk of tokens [batch, heads, tokens, ...] in parallel. Token t writes
    u_t = beta_t (v_t - k_t S_t), where S_t includes the u of earlier tokens: a triangular system
    for all u."""
    decay = decay_factors(g, masks)
    key_overlap = (key @ key.transpose(-1, -2) * decay.between).tril(-1) * beta[..., None]
    residual = (value - decay.before[..., None] * (key @ matrix)) * beta[..., None]
    identity = torch.eye(key_overlap.shape[-1], device=key_overlap.device)
    written = torch.linalg.solve_triangular(
        identity + key_overlap, residual, upper=False, unitriangular=True
    )
    return read_and_update(query, key, written, matrix, decay)


# -- Mamba-2 in plain torch (Granite 4, Nemotron)


class Mamba2(MatrixMixer):
    """Mamba-2: S = e^(-a dt) S + k (dt v), o = q S + d v."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        shape, width = self.recurrence, config.width
        self.vkq = nn.Linear(width, self.channels, bias=False)
        self.dt = nn.Linear(width, shape.value_heads, bias=False)
        self.d = nn.Parameter(torch.ones(shape.value_heads))
        self.norm_weight = nn.Parameter(torch.ones(shape.value_dim))

    def project(self, x: Tensor) -> Parts:
        return self.vkq(x), self.z(x), self.dt(x)

    def recur(
        self, parts: Parts, state: Tensor, observe: StateObserver | None = None
    ) -> tuple[Tensor, Tensor]:
        query, key, value, conv_state = self._ready(parts, state)
        step = self._step(parts[2])
        decay, increment = (
            elementwise_exact(torch.exp, self._rate() * step),
            step[..., None] * value,
        )
        matrix, outputs = self._matrix(state, conv_state), []
        for token in range(value.shape[1]):
            matrix = matrix * decay[:, token, :, None, None]
            matrix = matrix + key[:, token, :, :, None] * increment[:, token, :, None]
            outputs.append((matrix * query[:, token, :, :, None]).sum(-2))
            if observe is not None:
                observe(token, step[:, token], decay[:, token], matrix.flatten(2).norm(dim=2))
        mixed = torch.stack(outputs, 1) + self.d.float()[:, None] * value
        return mixed.flatten(2), torch.cat((conv_state.flatten(1), matrix.flatten(1)), 1)

    def finish(self, mixed: Tensor, parts: Parts) -> Tensor:
        z = parts[1]
        gated = mixed.float() * functional.silu(z.float())
        groups = gated.unflatten(-1, (self.recurrence.norm_groups, -1))
        normed = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + self.eps)
        output: Tensor = self.out((normed.flatten(-2) * self.norm_weight.float()).to(z.dtype))
        return output

    def _in_chunks(self, parts: Parts, documents: Tensor | None) -> Tensor:
        state = self.zero_state(len(parts[0]), parts[0].device)
        query, key, value, _ = self._ready(parts, state, documents)
        step = self._step(parts[2])
        tokens = (query, key, step[..., None] * value, self._rate() * step)
        return self._chunks(tokens, documents, _mamba_chunk) + self.d.float()[:, None] * value

    def _split(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = self.recurrence
        value, key, query = convolved.split((shape.value_dim, shape.key_dim, shape.key_dim), -1)
        return self._of_keys(query), self._of_keys(key), value

    def _step(self, dt: Tensor) -> Tensor:
        return elementwise_exact(functional.softplus, dt.float() + self.dt_bias.float())


def _mamba_chunk(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    matrix: Tensor,
    masks: DocumentMasks | None,
) -> Chunk:
    """Process a chunk of tokens [batch, heads, tokens, ...] in parallel."""
    return read_and_update(query, key, value, matrix, decay_factors(g, masks))
