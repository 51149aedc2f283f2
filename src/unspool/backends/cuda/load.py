"""A checkpoint's weights from the file straight to the device, many pieces at a time.

    weights = load_weights(checkpoint, dtype=torch.bfloat16, device=torch.device("cuda"))

What multiplies the same vector gets one piece of memory, allocated once. Threads copy pieces of the
file into pinned memory, and from there they go to the device, where they are converted or repacked:
the disk is what is waited for. Quantized weights (GGUF, FP8) stay packed if `keep` says so.
"""

from __future__ import annotations

import math
import queue
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unspool.backends.cuda.packed import PackedMatrix, StackedMatrix
from unspool.backends.cuda.packing import (
    PACKINGS,
    Packing,
    Parts,
    float8_packing,
    float8_parts,
    packed_parts,
    quantized,
)
from unspool.backends.cuda.products import NormWeights
from unspool.backends.cuda.weights import (
    ExpertWeights,
    LayerWeights,
    Matrix,
    PlainMatrix,
    Weights,
)
from unspool.errors import ModelFileError, UnspoolError
from unspool.model.checkpoint import Checkpoint
from unspool.model.download import progress_bar
from unspool.model.float8 import FLOAT8
from unspool.model.memory import in_words
from unspool.model.stored import Stored

_THREADS = 8
_PIECE = 1 << 25  # bytes of the file that one thread brings at a time
_WORTH_A_BAR = 1 << 30  # bytes
_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", FLOAT8: "FP8"}
_GROUP = 32  # columns that share a scale when weights are rounded here


def load_weights(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    keep: bool = True,
    bits: int | None = None,
    progress: bool = False,
) -> Weights:
    """`dtype` is that of activations and plain weights; `keep`: packed weights stay so; `bits`: 4
    or 8, to round plain ones to."""
    loader = _Loader(checkpoint, dtype, device, keep, bits)
    try:
        weights = loader.weights()
        loader.run(progress)
    except torch.OutOfMemoryError as error:
        raise UnspoolError(
            f"{checkpoint.path}: its weights take about {in_words(loader.size)} and do not fit "
            f"into the memory of {device}{_free(device)}; use a smaller model, or fewer bits "
            "a weight (quantize 4, or a GGUF file)"
        ) from error
    return weights


def _free(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return f", of which {in_words(torch.cuda.mem_get_info(device)[0])} are free"


class _Lane:
    """Where one thread's pieces pass: pinned memory on the host, a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pinned = device.type == "cuda"
        self._rooms = [torch.empty(_PIECE, dtype=torch.uint8, pin_memory=self._pinned)] * 2
        if self._pinned:
            self._rooms[1] = torch.empty_like(self._rooms[0], pin_memory=True)
            self._stream = torch.cuda.Stream(device)
            self._left = [torch.cuda.Event() for _ in self._rooms]
        self._turn = 0

    def bring(self, data: npt.NDArray[np.uint8]) -> Tensor:
        """Bytes, on their way to the device."""
        if not self._pinned:
            return torch.from_numpy(np.array(data))
        room, left = self._rooms[self._turn], self._left[self._turn]
        self._turn = 1 - self._turn
        left.synchronize()  # what was here before is on the device
        np.copyto(room.numpy()[: len(data)], data)
        there = torch.empty(len(data), dtype=torch.uint8, device=self.device)
        there.copy_(room[: len(data)], non_blocking=True)
        left.record()
        return there

    def here(self) -> Any:
        return torch.cuda.stream(self._stream) if self._pinned else nullcontext()


Job = Callable[[_Lane], None]


class _Loader:
    """Allocates what the weights will be, and knows what has to be brought for it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        keep: bool,
        bits: int | None,
    ) -> None:
        self.path, self.config = checkpoint.path, checkpoint.config
        self.dtype, self.device, self.keep, self.bits = dtype, device, keep, bits
        self.stored = dict(checkpoint.weights())
        self.size = sum(stored.data.nbytes for stored in self.stored.values())
        self.kinds: Counter[str] = Counter()
        self._jobs: list[tuple[int, Job]] = []  # with the bytes that each reads
        self._finite: list[tuple[str, Tensor]] = []
        self._one_at_a_time = threading.Lock()  # compiling a kernel

    # -- what there will be -----------------------------------------------------------------------

    def weights(self) -> Weights:
        config = self.config
        embed = self._matrix(("embed",), bits=8)
        assert isinstance(embed, PlainMatrix | PackedMatrix)
        norm = self._norm("norm")
        assert norm is not None
        position = None
        if "position_embed.weight" in self.stored:
            position = self._plain(("position_embed.weight",))
        layers = [self._layer(f"layers.{number}") for number in range(config.layers)]
        head = embed if config.tied else self._matrix(("head",), bits=8)
        kind = self.kinds.most_common(1)[0][0]
        plain = str(self.dtype).removeprefix("torch.")
        return Weights(
            config, embed, position, layers, norm, head,
            precision=plain if kind in _TYPES else _NAMES.get(kind, kind),
        )  # fmt: skip

    def _layer(self, at: str) -> LayerWeights:
        attention, feed = f"{at}.attention", f"{at}.feed"
        has_experts = f"{feed}.router.weight" in self.stored
        inner = (f"{feed}.gate", f"{feed}.up") if self.config.gated else (f"{feed}.up",)
        return LayerWeights(
            attention_norm=self._norm(f"{at}.attention_norm"),
            qkv=self._matrix((f"{attention}.q", f"{attention}.k", f"{attention}.v")),
            q_norm=self._norm(f"{attention}.q_norm"),
            k_norm=self._norm(f"{attention}.k_norm"),
            out=self._matrix((f"{attention}.out",)),
            attention_post_norm=self._norm(f"{at}.attention_post_norm"),
            feed_norm=self._norm(f"{at}.feed_norm"),
            gate_up=None if has_experts else self._matrix(inner, gated=self.config.gated),
            down=None if has_experts else self._matrix((f"{feed}.down",)),
            experts=self._experts(feed) if has_experts else None,
            feed_post_norm=self._norm(f"{at}.feed_post_norm"),
        )

    def _norm(self, name: str) -> NormWeights | None:
        if f"{name}.weight" not in self.stored:
            return None
        gain = self._vector((f"{name}.weight",), torch.float32)
        assert gain is not None
        bias = self._vector((f"{name}.bias",), torch.float32)
        return NormWeights(1 + gain if self.config.norm_plus_one else gain, bias)

    def _vector(self, names: tuple[str, ...], dtype: torch.dtype) -> Tensor | None:
        if names[0] not in self.stored:
            return None
        values = np.concatenate([self.stored[name].float32() for name in names])
        found = torch.from_numpy(values).to(self.device, dtype)
        self._finite.append((names[0], found.isfinite().all()))
        return found

    def _experts(self, feed: str) -> ExpertWeights:
        config = self.config
        count, inner, width = config.experts, config.expert_width, config.width
        gate_up = self._room(count, 2 * inner, width)
        down = self._room(count, width, inner)
        for name, room, first in (("gate", gate_up, 0), ("up", gate_up, inner), ("down", down, 0)):
            whole = f"{feed}.{name}.weight"
            for expert, stored in enumerate(self.stored[whole].slices()):
                self._fill(whole, stored, room[expert, first : first + stored.shape[0]])
        return ExpertWeights(self._plain((f"{feed}.router.weight",)), gate_up, down)

    def _matrix(self, names: tuple[str, ...], *, gated: bool = False, bits: int = 4) -> Matrix:
        """The matrices of these names, one above the other. `bits`: the least to be rounded to."""
        weights = tuple(f"{name}.weight" for name in names)
        bias = self._vector(tuple(f"{name}.bias" for name in names), self.dtype)
        types = [_kept_as(self.stored[name]) for name in weights]
        columns = self.stored[weights[0]].shape[1]
        if self.bits and all(self.stored[name].type in _TYPES for name in weights):
            if columns % _GROUP == 0:
                return self._packed(weights, bias, max(bits, self.bits))
        elif self.keep and all(types) and len(set(types)) == 1:
            return self._packed(weights, bias)
        elif self.keep and all(types) and not gated and bias is None:
            together = groupby(zip(types, weights, strict=True), key=lambda pair: pair[0])
            return StackedMatrix(
                tuple(self._packed(tuple(name for _, name in group)) for _, group in together)
            )
        return PlainMatrix(self._plain(weights), bias)

    def _plain(self, names: tuple[str, ...]) -> Tensor:
        shapes = [self.stored[name].shape for name in names]
        room = self._room(sum(shape[0] for shape in shapes), *shapes[0][1:])
        first = 0
        for name, shape in zip(names, shapes, strict=True):
            self._fill(name, self.stored[name], room[first : first + shape[0]])
            first += shape[0]
        return room

    def _packed(
        self, names: tuple[str, ...], bias: Tensor | None = None, bits: int | None = None
    ) -> PackedMatrix:
        """All of one type: as they are in the file, or rounded to `bits`."""
        every = [self.stored[name] for name in names]
        rows, columns = sum(stored.shape[0] for stored in every), every[0].shape[1]
        packing, like = _moved(every[0].rows(0, 1), self._nothing, self.device, bits)
        parts, first = like.like(rows), 0
        for name, stored in zip(names, every, strict=True):
            self._pack(name, stored, parts, first, packing, bits)
            first += stored.shape[0]
        return PackedMatrix(packing, parts, rows, columns, self.dtype, bias)

    def _nothing(self, data: npt.NDArray[np.uint8]) -> Tensor:
        """Instead of bringing it, where only shapes matter."""
        return torch.zeros(len(data), dtype=torch.uint8, device=self.device)

    def _room(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    # -- what has to be brought -------------------------------------------------------------------

    def _fill(self, name: str, stored: Stored, room: Tensor) -> None:
        """Plain numbers into a room of the same shape."""
        self.kinds["BF16"] += math.prod(stored.shape)
        if stored.packed and not _kept_as(stored):
            stored = Stored.of(stored.float32())

        def job(piece: Stored, first: int) -> Job:
            def run(lane: _Lane) -> None:
                ours = room[first : first + piece.shape[0]]
                if piece.packed:
                    packing, parts = _moved(piece, lane.bring, self.device)
                    rows, columns = piece.shape
                    with self._one_at_a_time:
                        PackedMatrix(packing, parts, rows, columns, self.dtype).unpack(0, ours)
                else:
                    ours.copy_(_brought(piece, lane.bring))
                self._finite.append((name, ours.isfinite().all()))

            return run

        self._add(stored, job)

    def _pack(
        self,
        name: str,
        stored: Stored,
        parts: Parts,
        start: int,
        packing: Packing,
        bits: int | None,
    ) -> None:
        kind = stored.type if bits is None else f"{self.bits} bits"
        self.kinds[kind] += math.prod(stored.shape)

        def job(piece: Stored, first: int) -> Job:
            def run(lane: _Lane) -> None:
                _, moved = _moved(piece, lane.bring, self.device, bits)
                parts.put(start + first, moved)
                self._finite.append((name, moved.finite(packing)))

            return run

        self._add(stored, job)

    def _add(self, stored: Stored, job: Callable[[Stored, int], Job]) -> None:
        """Jobs for a tensor's rows, a piece each."""
        rows = stored.shape[0]
        step = max(1, _PIECE * rows // max(1, stored.data.nbytes))
        for first in range(0, rows, step):
            piece = stored.rows(first, first + step)
            self._jobs.append((piece.data.nbytes, job(piece, first)))

    # -- bringing it ------------------------------------------------------------------------------

    def run(self, progress: bool) -> None:
        total, done = sum(size for size, _ in self._jobs), 0
        lanes: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        threads = _THREADS if self.device.type == "cuda" else 1
        for _ in range(threads):
            lanes.put(_Lane(self.device))

        def work(job: Job) -> None:
            lane = lanes.get()
            try:
                with torch.inference_mode(), lane.here():
                    job(lane)
            finally:
                lanes.put(lane)

        show = progress and total >= _WORTH_A_BAR and sys.stderr.isatty()
        with (
            progress_bar(f"loading {self.path.name}", show=show) as advance,
            ThreadPoolExecutor(threads, "unspool-load") as pool,
            _all_or_none(pool),
        ):
            futures = [pool.submit(work, job) for _, job in self._jobs]
            for (size, _), future in zip(self._jobs, futures, strict=True):
                future.result()
                done += size
                advance(done, total)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()  # what the pieces took on the way
        self._check()

    def _check(self) -> None:
        found = torch.stack([finite for _, finite in self._finite]).tolist()
        for (name, _), finite in zip(self._finite, found, strict=True):
            if not finite:
                raise ModelFileError(
                    f"{self.path}: {name} holds NaN or infinite numbers; the file is damaged or "
                    f"{str(self.dtype).removeprefix('torch.')} is too narrow for it"
                )


@contextmanager
def _all_or_none(pool: ThreadPoolExecutor) -> Iterator[None]:
    """After an error nothing more is begun."""
    try:
        yield
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise


Bring = Callable[[npt.NDArray[np.uint8]], Tensor]


def _kept_as(stored: Stored) -> Any:
    """What must be the same for two matrices to be packed as one; None if it cannot be packed."""
    if stored.type == FLOAT8 and stored.scales is not None and stored.shape[-1] % 16 == 0:
        return stored.type, stored.scales.shape[-1]
    return stored.type if stored.type in PACKINGS else None


def _brought(piece: Stored, bring: Bring) -> Tensor:
    data = np.ascontiguousarray(piece.data).reshape(-1)
    return bring(data.view(np.uint8)).view(_TYPES[piece.type]).view(piece.shape)


def _moved(
    piece: Stored, bring: Bring, device: torch.device, bits: int | None = None
) -> tuple[Packing, Parts]:
    """A piece of a packed matrix, or of one that is to be rounded, on the device."""
    if bits is not None:
        return quantized(_brought(piece, bring), bits)
    raw = bring(np.ascontiguousarray(piece.data).reshape(-1)).view(len(piece.data), -1)
    if piece.scales is not None:
        scales = torch.from_numpy(np.array(piece.scales)).to(device)
        return float8_packing(piece.shape[1], scales.shape[1]), float8_parts(raw, scales)
    return PACKINGS[piece.type], packed_parts(piece.type, raw)
