"""Drafting heads in Unspool's format on a GPU: `head.py` as captured CUDA graphs.

The hidden states are on the device already (backends/cuda/observe.py). Reading a few positions is
one graph launch, and so is drafting a whole chain: tokens are chosen and embedded on the device,
and copied to the host once at the end. Trees need the host to choose between nodes and run
kernel by kernel.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from unspool.backends.cuda import attention
from unspool.backends.cuda.backend import GraphCache, padded_batch_size
from unspool.backends.cuda.kernels import elementwise as row_kernels
from unspool.backends.cuda.kernels.common import ACTIVATIONS
from unspool.backends.cuda.kernels.elementwise import greedy_token
from unspool.backends.cuda.matmul import Epilogue, NormWeights, next_power_of_two
from unspool.backends.cuda.model import CudaModel
from unspool.backends.cuda.runner import supports_pdl
from unspool.backends.cuda.step_io import to_device
from unspool.backends.cuda.weights import PlainMatrix
from unspool.backends.step import Floats, Ints
from unspool.decoding.speculative.arrays import apply_rope
from unspool.decoding.speculative.head import (
    DraftNode,
    HeadConfig,
    HeadFiles,
    UnspoolHead,
    expand_nodes,
)

MAX_CHAIN = 16  # tokens
_GRAPH_ROWS = 8  # positions read by a graph: as many as a verified draft brings
_CHUNK = 64  # positions of a prompt
_FIRST_CAPACITY = 2048  # positions


class CudaHead(UnspoolHead):
    """A head for a model of the CUDA backend; it uses the model's embedding."""

    def __init__(self, files: HeadFiles, model: CudaModel, context: int) -> None:
        super().__init__(files, model, model.device)
        weights = model.weights
        dtype, device = weights.dtype, weights.device
        self._embed, self._pdl = weights.embed, supports_pdl(device)
        self._matrices = {n: PlainMatrix(w.to(dtype)) for n, w in self._weights.items()}
        self._matrices["head"] = PlainMatrix(self._head.to(dtype))
        word_mixing = (self._weights["mix.last_word"], self._weights["mix.earlier_words"])
        self._matrices["mix.words"] = PlainMatrix(torch.cat(word_mixing, 1).to(dtype))
        self._gains = {name: NormWeights(gain) for name, gain in self._norms.items()}
        names = [f"features.norm.{number}" for number in range(len(self.layers))]
        self._feature_gains = torch.stack([self._norms[name] for name in names])[:, None]
        angles = self._rotary.tables(np.arange(context + _CHUNK), 0)
        self._cosine, self._sine = (self.to_device(table) for table in angles)
        self._device_ids = torch.from_numpy(self.ids).to(device)
        self._buffer = _KvBuffer(self.config, context, dtype, device)
        self._buffers = _Buffers(self.config, len(self.ids), dtype, device)
        self._read_input = PinnedInput(_GRAPH_ROWS * 2, device)
        self._chain_input = PinnedInput(self.config.words + MAX_CHAIN + 3, device)
        self._graphs = GraphCache(device)
        self._layer = attention.AttentionLayer(
            heads=self.config.heads, kv_heads=self.config.kv_heads,
            head_width=self.config.head_width, scale=self.config.head_width**-0.5, softcap=0.0,
            window=0, norm_eps=0.0, q_norm=None, k_norm=None, cosine=self._cosine, sine=self._sine,
        )  # fmt: skip
        self._scratch = attention.AttentionScratch.for_rows(1, [self._layer], device)

    def context(self) -> CudaHeadContext:  # type: ignore[override]
        return CudaHeadContext(self)

    def buffer_of(self, context: CudaHeadContext, num_new: int = 0) -> _KvBuffer:
        """The KV buffer, loaded with this text."""
        if self._buffer.reserve(len(context) + num_new):
            self._graphs.clear()
        self._buffer.load(context)
        return self._buffer

    def read(self, context: CudaHeadContext, positions: Ints, vectors: Tensor | Floats) -> None:
        """Read further positions of a text."""
        count, first = len(positions), len(context)
        self.buffer_of(context, count)
        # Hidden states of a prompt come from the host.
        features: Tensor = vectors if isinstance(vectors, Tensor) else self.to_device(vectors)
        if count > _GRAPH_ROWS:
            indices = np.stack((positions, np.arange(first, first + count)))
            device_indices = to_device(indices, features.device)
            with torch.inference_mode():
                self._read(features, device_indices[0], device_indices[1])
            return
        size, buffers, reading = padded_batch_size(count), self._buffers, self._read_input
        buffers.features[:, :count].copy_(features)
        host = reading.writable()
        host[:size] = positions[-1]  # padding rows are overwritten later
        host[:count] = positions
        host[_GRAPH_ROWS : _GRAPH_ROWS + size] = np.arange(first, first + size)
        reading.send()
        at, places = (
            reading.device_tensor[:size],
            reading.device_tensor[_GRAPH_ROWS : _GRAPH_ROWS + size],
        )
        self._graphs.run(("read", size), lambda: self._read(buffers.features[:, :size], at, places))

    def _read(self, vectors: Tensor, positions: Tensor, places: Tensor) -> None:
        """Compute keys and values of hidden states [layers, n, width] into the buffer."""
        config, buffer, dtype = self.config, self._buffer, self._buffer.keys.dtype
        features = vectors.float()
        root = torch.rsqrt(features.pow(2).mean(-1, keepdim=True) + config.norm_eps)
        parts = (features * root * self._feature_gains).to(dtype)
        joined = parts.transpose(0, 1).reshape(len(positions), -1)
        fused = joined @ self._matrices["features.fuse"].weight.t()
        normed = self.norm(fused.float(), "context.norm").to(dtype)
        kv = normed @ self._matrices["context.keys_values"].weight.t()
        kv = kv.view(len(positions), 2, config.kv_heads, config.head_width)
        keys = apply_rope(kv[:, 0].float(), self._cosine[positions], self._sine[positions])
        buffer.fused.index_copy_(0, places, fused)
        buffer.keys.index_copy_(0, places + 1, keys.to(dtype))
        buffer.values.index_copy_(0, places + 1, kv[:, 1].contiguous())

    def chain(
        self, context: CudaHeadContext, tokens: Sequence[int], levels: int, temperature: float
    ) -> Iterator[tuple[int, float]]:
        """Draft a chain of tokens with log-probabilities."""
        words, host = self.config.words, self._chain_input.writable()
        self.buffer_of(context)
        recent = [int(tokens[max(-back, -len(tokens))]) for back in range(words, 0, -1)]
        host[:words] = recent
        host[words : words + levels] = np.arange(len(tokens) - 1, len(tokens) - 1 + levels)
        host[-3:-1] = len(context) - 1, len(context) + 1
        host[-1:].view(np.float64)[0] = temperature
        self._chain_input.send()
        self._graphs.run(("chain", levels), lambda: self._chain(levels))
        tokens_out, logprobs = self._buffers.read_back(words)
        return zip(tokens_out[:levels], logprobs[:levels], strict=True)

    def _chain(self, levels: int) -> None:
        config, b, buffer, inputs = (
            self.config,
            self._buffers,
            self._buffer,
            self._chain_input.device_tensor,
        )
        words, width = config.words, config.word_width
        b.tokens[:words].copy_(inputs[:words])
        torch.index_select(buffer.fused, 0, inputs[-3:-2], out=b.states[1:])
        temperature, ends = inputs[-1:].view(torch.float64), inputs[-2:-1]
        for at in range(words - 1):
            self._project(at)
        for level in range(levels):
            at, x, before = words - 1 + level, b.states[level % 2], b.states[1 - level % 2]
            self._project(at)
            parts = [b.words[at - n, n * width : (n + 1) * width] for n in range(words)]
            torch.cat(parts, out=b.recent)
            self._linear("mix.words", b.recent, b.mix)
            self._linear("join.state", before, x, norm="join.state.norm")
            self._linear("join.word", b.word[at], x, norm="join.word.norm", residual=x)
            inner = config.heads * config.head_width
            self._linear("attention.query", x, b.qkv[0, :inner], norm="attention.norm")
            self._attend(inputs[words + level : words + level + 1], ends)
            self._linear("attention.out", b.mixed[0], x, residual=x)
            self._linear("feed.gate_up", x, b.inner, norm="feed.norm", gated=True)
            self._linear("feed.down", b.inner, x, residual=x)
            self._linear("mix.state", x, b.mix, norm="mix.norm", residual=b.mix)
            row_kernels.glu[(1, 1)](
                b.mix, b.mixed_words, F=config.mix_width, BF=next_power_of_two(config.mix_width),
                GATED=True, ACTIVATION=ACTIVATIONS["silu"], PDL=self._pdl, num_warps=4,
                launch_pdl=self._pdl,
            )  # fmt: skip
            self._linear("mix.out", b.mixed_words, b.output, residual=x)
            self._linear("head", b.output, b.logits, norm="final.norm")
            count = len(b.logits)
            greedy_token[(1,)](
                b.logits, self._device_ids, temperature, b.tokens[at + 1 :], b.logprobs[level:],
                count, NP=next_power_of_two(count), num_warps=16,
            )  # fmt: skip

    def _project(self, at: int) -> None:
        """Projection of a token for the mixture, for each position it may have in it."""
        b, token = self._buffers, self._buffers.tokens[at : at + 1]
        word = b.word[at : at + 1]
        if isinstance(self._embed, PlainMatrix):
            torch.index_select(self._embed.weight, 0, token, out=word)
        else:
            self._embed.embed_tokens(token, token, word)
        self._linear("words.project", word[0], b.words[at], norm="words.norm")

    def _attend(self, position: Tensor, ends: Tensor) -> None:
        """Attention of the query. RoPE is part of the kernel that stores a key and value; these go
        to a scratch page, since drafted tokens have none."""
        b, buffer, layer = self._buffers, self._buffer, self._layer
        scratch = attention.DecodeRows(buffer.table, buffer.scratch_row, position, ends)
        attention.store_keys(b.qkv, buffer.keys, buffer.values, layer, scratch, pdl=self._pdl)
        lines = attention.DecodeRows(buffer.table, buffer.own_row, position, ends)
        attention.decode_attention(
            b.qkv, b.mixed, buffer.keys, buffer.values, layer, lines, self._scratch, new=False,
            pdl=self._pdl, pieces=attention.num_pieces(layer, buffer.capacity + 1),
        )  # fmt: skip

    def _linear(
        self, name: str, x: Tensor, out: Tensor, *, norm: str = "", gated: bool = False,
        residual: Tensor | None = None,
    ) -> None:  # fmt: skip
        by = Epilogue(
            self.config.norm_eps, self._gains[norm] if norm else None,
            "silu" if gated else "none", gated, residual, pdl=self._pdl,
        )  # fmt: skip
        self._matrices[name].gemv(x, out, by)


class CudaHeadContext:
    """The state of the head for one text; in the head's KV buffer, or saved elsewhere."""

    def __init__(self, head: CudaHead) -> None:
        self._head, self._length = head, 0
        self.saved: tuple[Tensor, ...] | None = None  # while another text is in the buffer

    def __len__(self) -> int:
        return self._length

    def truncate(self, count: int) -> None:
        self._length = min(self._length, count)

    def fork(self, count: int) -> CudaHeadContext:
        other = CudaHeadContext(self._head)
        other.saved = tuple(part.clone() for part in self._head.buffer_of(self).rows(count))
        other._length = count
        return other

    def read(self, positions: Ints, vectors: Floats, following: Sequence[int]) -> None:
        for first, last in pairwise([*range(0, len(positions), _CHUNK), len(positions)]):
            self._head.read(self, positions[first:last], vectors[:, first:last])
            self._length += last - first

    def chain(
        self, tokens: Sequence[int], levels: int, temperature: float
    ) -> Iterator[tuple[int, float]]:
        return self._head.chain(self, tokens, min(levels, MAX_CHAIN), temperature)

    def expand(self, nodes: list[DraftNode], tokens: Sequence[int]) -> Floats:
        fused, keys, values = (part.float() for part in self._head.buffer_of(self).rows(len(self)))
        return expand_nodes(self._head, nodes, tokens, fused, keys, values)


class PinnedInput:
    """Integers that the host sends to a graph, at a fixed device address."""

    def __init__(self, count: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.device_tensor = torch.zeros(count, dtype=torch.int64, device=device)
        self._memory = torch.zeros(count, dtype=torch.int64, pin_memory=pinned)
        self._copy_done = torch.cuda.Event() if pinned else None

    def writable(self) -> Ints:
        """Return the host array once the device has read the previous contents."""
        if self._copy_done is not None:
            self._copy_done.synchronize()
        host: Ints = self._memory.numpy()
        return host

    def send(self) -> None:
        """Queue a copy of the host array to the device."""
        self.device_tensor.copy_(self._memory, non_blocking=True)
        if self._copy_done is not None:
            self._copy_done.record()


class _Buffers:
    """Intermediate results of the kernels."""

    def __init__(
        self, config: HeadConfig, count: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def new(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        num_tokens = config.words + MAX_CHAIN
        self.features = new(len(config.layers), _GRAPH_ROWS, config.width)
        self.states, self.output = new(2, config.width), new(config.width)
        projected_width = config.words * config.word_width  # of one token
        self.word, self.words = new(num_tokens, config.width), new(num_tokens, projected_width)
        self.recent, self.mix = new(projected_width), new(2 * config.mix_width)
        self.mixed_words, self.inner = new(config.mix_width), new(config.ff_width)
        self.qkv = new(1, (config.heads + 2 * config.kv_heads) * config.head_width)
        self.mixed, self.logits = new(1, config.heads * config.head_width), new(count)
        # Tokens and log-probabilities are contiguous: one copy to the host.
        self._results = torch.zeros(num_tokens + 1 + MAX_CHAIN, dtype=torch.int64, device=device)
        self.tokens = self._results[: num_tokens + 1]
        self.logprobs = self._results[num_tokens + 1 :].view(torch.float64)
        pinned = device.type == "cuda"
        self._host = torch.zeros(len(self._results), dtype=torch.int64, pin_memory=pinned)
        self._done = torch.cuda.Event() if pinned else None

    def read_back(self, first: int) -> tuple[list[int], list[float]]:
        """Wait for and return the drafted tokens and their log-probabilities."""
        self._host.copy_(self._results, non_blocking=True)
        if self._done is not None:
            self._done.record()
            self._done.synchronize()
        numbers = self._host.numpy()
        cut = len(self.tokens)
        return numbers[first:cut].tolist(), numbers[cut:].view(np.float64).tolist()


class _KvBuffer:
    """Keys, values and fused vectors of the current text, at fixed addresses.

    Other texts save theirs while they wait. The first key and value are zeros (attention sink).
    """

    def __init__(
        self, config: HeadConfig, context: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config, self._most, self._dtype, self._device = config, context, dtype, device
        self._owner: weakref.ref[CudaHeadContext] | None = None
        self.own_row = torch.zeros(1, dtype=torch.int32, device=device)
        self.scratch_row = torch.ones(1, dtype=torch.int32, device=device)
        self._allocate(min(_FIRST_CAPACITY, context))

    def _allocate(self, capacity: int) -> None:
        config, page = self._config, attention.PAGE_SIZE
        pages = -(-(capacity + 1 + _CHUNK) // page)
        shape = ((pages + 1) * page, config.kv_heads, config.head_width)

        def new(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=self._dtype, device=self._device)

        with torch.inference_mode(False):
            keys, values, fused = new(*shape), new(*shape), new(pages * page, config.width)
            columns = max(pages, -(-(self._most + _CHUNK) // page))
            own_pages = torch.arange(columns, dtype=torch.int32, device=self._device).clamp_max(
                pages
            )
            table = torch.stack((own_pages, torch.full_like(own_pages, pages)))
        # Assigned last: if allocation fails, `capacity` is still correct.
        self.keys, self.values, self.fused = keys, values, fused
        self.table, self.capacity = table, capacity

    def reserve(self, length: int) -> bool:
        """Grow if needed; True if the buffer moved and captured graphs are invalid."""
        if length <= self.capacity:
            return False
        self._save_owner()
        self._allocate(max(length, min(2 * self.capacity, self._most)))
        return True

    def rows(self, count: int) -> tuple[Tensor, ...]:
        """Views of the first `count` positions."""
        return self.fused[:count], self.keys[: count + 1], self.values[: count + 1]

    def load(self, context: CudaHeadContext) -> None:
        """Load this text into the buffer."""
        if self._owner is not None and self._owner() is context:
            return
        self._save_owner()
        self._owner = weakref.ref(context)
        if context.saved is not None:
            for target, saved in zip(
                (self.fused, self.keys, self.values), context.saved, strict=True
            ):
                target[: len(saved)].copy_(saved)
            context.saved = None

    def _save_owner(self) -> None:
        owner = self._owner() if self._owner is not None else None
        if owner is not None:
            owner.saved = tuple(part.clone() for part in self.rows(len(owner)))
        self._owner = None
