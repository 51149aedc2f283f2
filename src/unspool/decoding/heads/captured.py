"""A head of our own format beside a model on a GPU: `own.py` step by step, as graphs.

The model's vectors are on the device already (backends/cuda/taps.py). Reading a few positions is
one launch, and so is a whole chain of guesses: each is chosen on the device and looked up for the
next one there, and the host hears of them once, at the end. Trees, which need the host to choose
between branches, run launch by launch.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from unspool.backends.cuda import attention
from unspool.backends.cuda.graphs import Graphs, padded
from unspool.backends.cuda.inputs import to_device
from unspool.backends.cuda.kernels import rows as row_kernels
from unspool.backends.cuda.kernels.common import ACTIVATIONS
from unspool.backends.cuda.kernels.guess import guess
from unspool.backends.cuda.loaded import CudaModel
from unspool.backends.cuda.products import Around, NormWeights, power_of_two
from unspool.backends.cuda.program import supports_pdl
from unspool.backends.cuda.weights import PlainMatrix
from unspool.backends.step import Floats, Ints
from unspool.decoding.heads.arrays import turned
from unspool.decoding.heads.files import HeadConfig, HeadFiles
from unspool.decoding.heads.growing import Node
from unspool.decoding.heads.own import OwnHead, expanded

MOST_GUESSES = 16  # of one chain
_FEW = 8  # positions that are read by a graph: what a checked draft brings
_AT_ONCE = 64  # of a prompt
_FIRST_ROOM = 2048  # positions


class CapturedHead(OwnHead):
    """A head beside a model of the CUDA backend, whose embedding it uses."""

    def __init__(self, files: HeadFiles, model: CudaModel, context: int) -> None:
        super().__init__(files, model, model.device)
        weights = model.weights
        dtype, device = weights.dtype, weights.device
        self._embed, self._pdl = weights.embed, supports_pdl(device)
        self._matrices = {n: PlainMatrix(w.to(dtype)) for n, w in self._weights.items()}
        self._matrices["head"] = PlainMatrix(self._head.to(dtype))
        both = (self._weights["mix.last_word"], self._weights["mix.earlier_words"])
        self._matrices["mix.words"] = PlainMatrix(torch.cat(both, 1).to(dtype))
        self._gains = {name: NormWeights(gain) for name, gain in self._norms.items()}
        names = [f"features.norm.{number}" for number in range(len(self.layers))]
        self._feature_gains = torch.stack([self._norms[name] for name in names])[:, None]
        angles = self._rotary.tables(np.arange(context + _AT_ONCE), 0)
        self._cosine, self._sine = (self.put(table) for table in angles)
        self._ids_there = torch.from_numpy(self.ids).to(device)
        self._room = _Room(self.config, context, dtype, device)
        self._buffers = _Buffers(self.config, len(self.ids), dtype, device)
        self._reading = PinnedInput(_FEW * 2, device)
        self._guessing = PinnedInput(self.config.words + MOST_GUESSES + 3, device)
        self._graphs = Graphs(device)
        self._layer = attention.AttentionLayer(
            heads=self.config.heads, kv_heads=self.config.kv_heads,
            head_width=self.config.head_width, scale=self.config.head_width**-0.5, softcap=0.0,
            window=0, norm_eps=0.0, q_norm=None, k_norm=None, cosine=self._cosine, sine=self._sine,
        )  # fmt: skip
        self._scratch = attention.Scratch.for_lines(1, self._layer, device)

    def context(self) -> CapturedContext:  # type: ignore[override]
        return CapturedContext(self)

    def room_of(self, context: CapturedContext, more: int = 0) -> _Room:
        """Where keys and values are, with this text's in it."""
        if self._room.make_room(len(context) + more):
            self._graphs.clear()
        self._room.take(context)
        return self._room

    # -- reading -------------------------------------------------------------------------------

    def read(self, context: CapturedContext, positions: Ints, vectors: Tensor | Floats) -> None:
        """Take in positions behind those that the text has."""
        count, first = len(positions), len(context)
        self.room_of(context, count)
        # Those of a prompt, which runs launch by launch, come from the host.
        seen: Tensor = vectors if isinstance(vectors, Tensor) else self.put(vectors)
        if count > _FEW:
            both = np.stack((positions, np.arange(first, first + count)))
            there = to_device(both, seen.device)
            with torch.inference_mode():
                self._read(seen, there[0], there[1])
            return
        size, buffers, reading = padded(count), self._buffers, self._reading
        buffers.features[:, :count].copy_(seen)
        host = reading.writable()
        host[:size] = positions[-1]  # those that only fill it up are overwritten later
        host[:count] = positions
        host[_FEW : _FEW + size] = np.arange(first, first + size)
        reading.send()
        at, places = reading.there[:size], reading.there[_FEW : _FEW + size]
        self._graphs.run(("read", size), lambda: self._read(buffers.features[:, :size], at, places))

    def _read(self, vectors: Tensor, positions: Tensor, places: Tensor) -> None:
        """Vectors [layers, n, width] into places of the room."""
        config, room, dtype = self.config, self._room, self._room.keys.dtype
        wide = vectors.float()
        root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + config.norm_eps)
        parts = (wide * root * self._feature_gains).to(dtype)
        joined = parts.transpose(0, 1).reshape(len(positions), -1)
        fused = joined @ self._matrices["features.fuse"].weight.t()
        normed = self.norm(fused.float(), "context.norm").to(dtype)
        both = normed @ self._matrices["context.keys_values"].weight.t()
        both = both.view(len(positions), 2, config.kv_heads, config.head_width)
        keys = turned(both[:, 0].float(), self._cosine[positions], self._sine[positions])
        room.fused.index_copy_(0, places, fused)
        room.keys.index_copy_(0, places + 1, keys.to(dtype))
        room.values.index_copy_(0, places + 1, both[:, 1].contiguous())

    # -- guessing ------------------------------------------------------------------------------

    def chain(
        self, context: CapturedContext, tokens: Sequence[int], levels: int, temperature: float
    ) -> Iterator[tuple[int, float]]:
        """Tokens that may follow, each behind the one before, with log-probabilities."""
        words, host = self.config.words, self._guessing.writable()
        self.room_of(context)
        recent = [int(tokens[max(-back, -len(tokens))]) for back in range(words, 0, -1)]
        host[:words] = recent
        host[words : words + levels] = np.arange(len(tokens) - 1, len(tokens) - 1 + levels)
        host[-3:-1] = len(context) - 1, len(context) + 1
        host[-1:].view(np.float64)[0] = temperature
        self._guessing.send()
        self._graphs.run(("chain", levels), lambda: self._chain(levels))
        found, chances = self._buffers.brought(words)
        return zip(found[:levels], chances[:levels], strict=True)

    def _chain(self, levels: int) -> None:
        config, b, room, told = self.config, self._buffers, self._room, self._guessing.there
        words, width = config.words, config.word_width
        b.tokens[:words].copy_(told[:words])
        torch.index_select(room.fused, 0, told[-3:-2], out=b.states[1:])
        temperature, ends = told[-1:].view(torch.float64), told[-2:-1]
        for at in range(words - 1):
            self._project(at)
        for level in range(levels):
            at, x, before = words - 1 + level, b.states[level % 2], b.states[1 - level % 2]
            self._project(at)
            parts = [b.words[at - n, n * width : (n + 1) * width] for n in range(words)]
            torch.cat(parts, out=b.recent)
            self._times("mix.words", b.recent, b.mix)
            self._times("join.state", before, x, norm="join.state.norm")
            self._times("join.word", b.word[at], x, norm="join.word.norm", residual=x)
            inner = config.heads * config.head_width
            self._times("attention.query", x, b.qkv[0, :inner], norm="attention.norm")
            self._attend(told[words + level : words + level + 1], ends)
            self._times("attention.out", b.mixed[0], x, residual=x)
            self._times("feed.gate_up", x, b.inner, norm="feed.norm", gated=True)
            self._times("feed.down", b.inner, x, residual=x)
            self._times("mix.state", x, b.mix, norm="mix.norm", residual=b.mix)
            row_kernels.glu[(1, 1)](
                b.mix, b.mixed_words, F=config.mix_width, BF=power_of_two(config.mix_width),
                GATED=True, ACTIVATION=ACTIVATIONS["silu"], PDL=self._pdl, num_warps=4,
                launch_pdl=self._pdl,
            )  # fmt: skip
            self._times("mix.out", b.mixed_words, b.said, residual=x)
            self._times("head", b.said, b.logits, norm="final.norm")
            count = len(b.logits)
            guess[(1,)](
                b.logits, self._ids_there, temperature, b.tokens[at + 1 :], b.chances[level:],
                count, NP=power_of_two(count), num_warps=16,
            )  # fmt: skip

    def _project(self, at: int) -> None:
        """What a token says to the mixture, for each place it may stand in."""
        b, token = self._buffers, self._buffers.tokens[at : at + 1]
        word = b.word[at : at + 1]
        if isinstance(self._embed, PlainMatrix):
            torch.index_select(self._embed.weight, 0, token, out=word)
        else:
            self._embed.gather(token, token, word)
        self._times("words.project", word[0], b.words[at], norm="words.norm")

    def _attend(self, position: Tensor, ends: Tensor) -> None:
        """What the query gathers. Its turning comes with storing a key and a value: those go to a
        page that nobody reads, since tokens that are drafted get none."""
        b, room, layer = self._buffers, self._room, self._layer
        aside = attention.Lines(room.table, room.aside, position, ends)
        attention.store_keys(b.qkv, room.keys, room.values, layer, aside, pdl=self._pdl)
        lines = attention.Lines(room.table, room.own, position, ends)
        attention.attend(
            b.qkv, b.mixed, room.keys, room.values, layer, lines, self._scratch, new=False,
            pdl=self._pdl, pieces=attention.pieces_for(layer, room.capacity + 1),
        )  # fmt: skip

    def _times(
        self, name: str, x: Tensor, out: Tensor, *, norm: str = "", gated: bool = False,
        residual: Tensor | None = None,
    ) -> None:  # fmt: skip
        by = Around(
            self.config.norm_eps, self._gains[norm] if norm else None,
            "silu" if gated else "none", gated, residual, pdl=self._pdl,
        )  # fmt: skip
        self._matrices[name].times_each(x, out, by)


class CapturedContext:
    """One text as the head sees it; its keys and values are in the head's room, or put by."""

    def __init__(self, head: CapturedHead) -> None:
        self._head, self._length = head, 0
        self.kept: tuple[Tensor, ...] | None = None  # while another text is in the room

    def __len__(self) -> int:
        return self._length

    def cut(self, count: int) -> None:
        self._length = min(self._length, count)

    def fork(self, count: int) -> CapturedContext:
        other = CapturedContext(self._head)
        other.kept = tuple(part.clone() for part in self._head.room_of(self).rows(count))
        other._length = count
        return other

    def read(self, positions: Ints, vectors: Floats, following: Sequence[int]) -> None:
        for first, last in pairwise([*range(0, len(positions), _AT_ONCE), len(positions)]):
            self._head.read(self, positions[first:last], vectors[:, first:last])
            self._length += last - first

    def chain(
        self, tokens: Sequence[int], levels: int, temperature: float
    ) -> Iterator[tuple[int, float]]:
        return self._head.chain(self, tokens, min(levels, MOST_GUESSES), temperature)

    def expand(self, nodes: list[Node], tokens: Sequence[int]) -> Floats:
        fused, keys, values = (part.float() for part in self._head.room_of(self).rows(len(self)))
        return expanded(self._head, nodes, tokens, fused, keys, values)


class PinnedInput:
    """Integers that the host sends to a graph, at an address that never changes."""

    def __init__(self, count: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.there = torch.zeros(count, dtype=torch.int64, device=device)
        self._memory = torch.zeros(count, dtype=torch.int64, pin_memory=pinned)
        self._sent = torch.cuda.Event() if pinned else None

    def writable(self) -> Ints:
        """Return the host's side, once the device has read what was sent before."""
        if self._sent is not None:
            self._sent.synchronize()
        host: Ints = self._memory.numpy()
        return host

    def send(self) -> None:
        """Queue a copy of the host's side to the device."""
        self.there.copy_(self._memory, non_blocking=True)
        if self._sent is not None:
            self._sent.record()


class _Buffers:
    """What passes between the kernels of one token."""

    def __init__(
        self, config: HeadConfig, count: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def new(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        every = config.words + MOST_GUESSES
        self.features = new(len(config.layers), _FEW, config.width)
        self.states, self.said = new(2, config.width), new(config.width)
        said = config.words * config.word_width  # by one token to the mixture
        self.word, self.words = new(every, config.width), new(every, said)
        self.recent, self.mix = new(said), new(2 * config.mix_width)
        self.mixed_words, self.inner = new(config.mix_width), new(config.ff_width)
        self.qkv = new(1, (config.heads + 2 * config.kv_heads) * config.head_width)
        self.mixed, self.logits = new(1, config.heads * config.head_width), new(count)
        # Tokens and log-probabilities lie together: one copy brings them to the host.
        self._said = torch.zeros(every + 1 + MOST_GUESSES, dtype=torch.int64, device=device)
        self.tokens = self._said[: every + 1]
        self.chances = self._said[every + 1 :].view(torch.float64)
        pinned = device.type == "cuda"
        self._host = torch.zeros(len(self._said), dtype=torch.int64, pin_memory=pinned)
        self._done = torch.cuda.Event() if pinned else None

    def brought(self, first: int) -> tuple[list[int], list[float]]:
        """The tokens from the first guess on and their log-probabilities, waited for."""
        self._host.copy_(self._said, non_blocking=True)
        if self._done is not None:
            self._done.record()
            self._done.synchronize()
        numbers = self._host.numpy()
        cut = len(self.tokens)
        return numbers[first:cut].tolist(), numbers[cut:].view(np.float64).tolist()


class _Room:
    """Keys, values and fused vectors of the text that is drafted for, at fixed addresses.

    Other texts put theirs by while they wait. The first key and value are zeros: what a query looks
    at that finds nothing.
    """

    def __init__(
        self, config: HeadConfig, context: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._config, self._most, self._dtype, self._device = config, context, dtype, device
        self._owner: weakref.ref[CapturedContext] | None = None
        self.own = torch.zeros(1, dtype=torch.int32, device=device)
        self.aside = torch.ones(1, dtype=torch.int32, device=device)
        self._make(min(_FIRST_ROOM, context))

    def _make(self, capacity: int) -> None:
        config, page = self._config, attention.PAGE_SIZE
        pages = -(-(capacity + 1 + _AT_ONCE) // page)
        shape = ((pages + 1) * page, config.kv_heads, config.head_width)

        def new(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=self._dtype, device=self._device)

        with torch.inference_mode(False):
            keys, values, fused = new(*shape), new(*shape), new(pages * page, config.width)
            columns = max(pages, -(-(self._most + _AT_ONCE) // page))
            own = torch.arange(columns, dtype=torch.int32, device=self._device).clamp_max(pages)
            table = torch.stack((own, torch.full_like(own, pages)))
        # Only now: where memory was refused, the room is still as large as it says.
        self.keys, self.values, self.fused = keys, values, fused
        self.table, self.capacity = table, capacity

    def make_room(self, length: int) -> bool:
        """Whether it had to grow, which moves it: what was captured is void then."""
        if length <= self.capacity:
            return False
        self._put_by()
        self._make(max(length, min(2 * self.capacity, self._most)))
        return True

    def rows(self, count: int) -> tuple[Tensor, ...]:
        """What so many positions have."""
        return self.fused[:count], self.keys[: count + 1], self.values[: count + 1]

    def take(self, context: CapturedContext) -> None:
        """Have this text's in here."""
        if self._owner is not None and self._owner() is context:
            return
        self._put_by()
        self._owner = weakref.ref(context)
        if context.kept is not None:
            for room, kept in zip((self.fused, self.keys, self.values), context.kept, strict=True):
                room[: len(kept)].copy_(kept)
            context.kept = None

    def _put_by(self) -> None:
        owner = self._owner() if self._owner is not None else None
        if owner is not None:
            owner.kept = tuple(part.clone() for part in self.rows(len(owner)))
        self._owner = None
