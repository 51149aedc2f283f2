"""Weights of a model in the layout of the kernels: matrices with the same input are fused.

Query, key and value are one matrix, gate and up another. Norm gains are float32 and complete (a
stored w that means 1 + w is 1 + w here).
"""

from __future__ import annotations

import math
import queue
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unspool.backends.cuda.matmul import (
    PACKINGS,
    Epilogue,
    NormWeights,
    PackedLayout,
    PackedMatrix,
    PackedTensors,
    StackedMatrix,
    exact_gemm,
    float8_packing,
    gemm,
    gemv,
    pack_float8,
    quantize,
    repack,
)
from unspool.errors import ModelFileError, UnspoolError
from unspool.model.config import ModelConfig
from unspool.model.files.checkpoint import Checkpoint
from unspool.model.files.stored import FLOAT8, FileTensor
from unspool.model.hub.download import progress_bar
from unspool.model.hub.memory import format_bytes
from unspool.model.layers.parts import ExpertMatrices, Experts, FeedForward, Norm
from unspool.model.layers.transformer import Layer, Transformer


class WeightMatrix(Protocol):
    """A weight matrix in any format: out = x · Wᵀ + bias."""

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def bias(self) -> Tensor | None: ...

    def gemv(self, x: Tensor, out: Tensor, epilogue: Epilogue) -> None:
        """Multiply x [columns], or each row of x [n, columns], with fused operations.

        A row's result does not depend on n.
        """

    def gemm(self, x: Tensor, out: Tensor, exact: bool = False, pdl: bool = False) -> None:
        """out [M, rows] = x [M, columns] · Wᵀ + bias.

        `exact`: a row's result does not depend on M.
        """

    def float_rows(self, first: int, last: int) -> Tensor:
        """Rows `first` to `last` in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class PlainMatrix:
    """A matrix with weights in the dtype of the vectors."""

    weight: Tensor  # [rows, columns]
    bias: Tensor | None = None  # [rows]

    @property
    def rows(self) -> int:
        return int(self.weight.shape[0])

    @property
    def columns(self) -> int:
        return int(self.weight.shape[1])

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def gemv(self, x: Tensor, out: Tensor, epilogue: Epilogue) -> None:
        gemv(self.weight, self.bias, x, out, epilogue)

    def gemm(self, x: Tensor, out: Tensor, exact: bool = False, pdl: bool = False) -> None:
        if exact:
            exact_gemm(self.weight, self.bias, x, out, pdl=pdl)
        else:
            gemm(self.weight, self.bias, x, out)

    def float_rows(self, first: int, last: int) -> Tensor:
        return self.weight[first:last].float()


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """Weights of a mixture of experts. Matrices of all experts are stacked by rows."""

    router: Tensor  # [experts, width]
    # [experts * 2 * inner, width]: of each expert the rows of gate, then those of up; without a
    # gate [experts * inner, width].
    gate_up: PlainMatrix | PackedMatrix
    down: PlainMatrix | PackedMatrix  # [experts * width, inner]
    router_bias: Tensor | None = None  # [experts], float32, as the following
    selection_bias: Tensor | None = None  # added to the probabilities for the selection only
    scale: Tensor | None = None  # multiplies the gates of the selected experts


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Weights of one layer; None for parts that the model does not have."""

    attention_norm: NormWeights | None
    qkv: WeightMatrix  # rows: all query heads, then all key heads, then all value heads
    q_norm: NormWeights | None  # per head or over all heads (`config.qk_norm`)
    k_norm: NormWeights | None
    out: WeightMatrix
    attention_post_norm: NormWeights | None
    feed_norm: NormWeights | None
    gate_up: (
        WeightMatrix | None
    )  # rows of gate, then rows of up; of up alone if the family has no gate
    down: WeightMatrix | None
    experts: ExpertWeights | None  # instead of gate_up and down
    feed_post_norm: NormWeights | None


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Weights of a model."""

    config: ModelConfig
    embed: PlainMatrix | PackedMatrix  # [vocabulary, width]
    position_embed: Tensor | None  # [context, width]
    layers: list[LayerWeights]
    norm: NormWeights
    head: WeightMatrix  # the embedding itself where the two are tied
    precision: str = ""  # format of most weights; empty: dtype of the activations

    def matrices(self) -> Iterator[WeightMatrix]:
        """Yield all matrices in order of use; experts are stacked by rows."""
        yield self.embed
        for layer in self.layers:
            for matrix in (layer.qkv, layer.out, layer.gate_up, layer.down):
                if matrix is not None:
                    yield matrix
            if layer.experts is not None:
                yield PlainMatrix(layer.experts.router)
                yield layer.experts.gate_up
                yield layer.experts.down
        yield self.head

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.device


def fuse_weights(model: Transformer) -> Weights:
    """Fuse the weights of a plain transformer; it may be freed afterwards."""
    embed = PlainMatrix(model.embed.weight)
    position = model.position_embed
    norm = _norm_weights(model.norm)
    assert norm is not None
    return Weights(
        config=model.config,
        embed=embed,
        position_embed=None if position is None else position.weight,
        layers=[_fuse_layer(layer) for layer in model.layers if isinstance(layer, Layer)],
        norm=norm,
        head=embed if model.head is None else _concat(model.head),
    )


def _fuse_layer(layer: Layer) -> LayerWeights:
    attention, feed = layer.attention, layer.feed
    assert attention.v is not None, "availability.py rejects models whose keys are values"
    return LayerWeights(
        attention_norm=_norm_weights(layer.attention_norm),
        qkv=_concat(attention.q, attention.k, attention.v),
        q_norm=_norm_weights(attention.q_norm),
        k_norm=_norm_weights(attention.k_norm),
        out=_concat(attention.out),
        attention_post_norm=_norm_weights(layer.attention_post_norm),
        feed_norm=_norm_weights(layer.feed_norm),
        gate_up=_fuse_gate_up(feed) if isinstance(feed, FeedForward) else None,
        down=_concat(feed.down) if isinstance(feed, FeedForward) else None,
        experts=_fuse_experts(feed) if isinstance(feed, Experts) else None,
        feed_post_norm=_norm_weights(layer.feed_post_norm),
    )


def _fuse_gate_up(feed: FeedForward) -> WeightMatrix:
    return _concat(feed.up) if feed.gate is None else _concat(feed.gate, feed.up)


def _fuse_experts(feed: Experts, scale: Tensor | None = None) -> ExpertWeights:
    """Fuse the experts' matrices. `scale`: factor of each expert (`DenseAndExperts`)."""
    gate_up = (feed.up,) if feed.gate is None else (feed.gate, feed.up)

    def to_float32(vector: Tensor | None) -> Tensor | None:
        return None if vector is None else vector.float()

    return ExpertWeights(
        feed.router.weight,
        _stack_experts(*gate_up),
        _stack_experts(feed.down),
        router_bias=to_float32(feed.router.bias),
        selection_bias=to_float32(feed.selection_bias),
        scale=to_float32(scale),
    )


def _stack_experts(*parts: ExpertMatrices) -> PlainMatrix:
    weights: list[Tensor] = [part.weight for part in parts]
    biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
    return PlainMatrix(
        torch.cat(weights, 1).flatten(0, 1), torch.cat(biases, 1).flatten() if biases else None
    )


def _concat(*parts: torch.nn.Linear) -> PlainMatrix:
    if len(parts) == 1:  # may be a transposed view
        weight = parts[0].weight.contiguous()
    else:
        weight = torch.cat([part.weight for part in parts])
    if parts[0].bias is None:
        return PlainMatrix(weight)
    return PlainMatrix(weight, torch.cat([part.bias for part in parts]))


def _norm_weights(norm: torch.nn.Module | None) -> NormWeights | None:
    if not isinstance(norm, Norm):
        return None
    gain = norm.weight.float()
    return NormWeights(
        1 + gain if norm.plus_one else gain, None if norm.bias is None else norm.bias.float()
    )


# -- Load a checkpoint's weights from the file to the device, in parallel

_THREADS = 8
_CHUNK_BYTES = 1 << 25  # of the file per job
_MIN_PROGRESS_BYTES = 1 << 30  # smaller models load without a progress bar
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FORMAT_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", FLOAT8: "FP8"}
_QUANT_GROUP = 32  # columns per scale of weights that are quantized here


def load_weights(
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    keep_packed: bool = True,
    quantize_bits: int | None = None,
    progress: bool = False,
) -> Weights:
    """Load all weights.

    Args:
        dtype: of activations and unquantized weights.
        keep: whether quantized weights stay packed.
        bits: 4 or 8 to quantize unquantized weights; None: leave them.
    """
    loader = WeightLoader(checkpoint, dtype, device, keep_packed, quantize_bits)
    try:
        weights = loader.weights()
        loader.run(progress)
    except torch.OutOfMemoryError as error:
        raise UnspoolError(
            f"{checkpoint.path}: weights of about {format_bytes(loader.size)} do not fit into the "
            f"memory of {device}{_free_memory(device)}; use a smaller model or a quantized one "
            "(quantize 4, or a GGUF file)"
        ) from error
    return weights


def _free_memory(device: torch.device) -> str:
    if device.type != "cuda":
        return ""
    return f" ({format_bytes(torch.cuda.mem_get_info(device)[0])} free)"


class StagingLane:
    """Pinned staging buffers and a CUDA stream, used by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pinned = device.type == "cuda"
        self._buffers = [torch.empty(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=self._pinned)] * 2
        if self._pinned:
            self._buffers[1] = torch.empty_like(self._buffers[0], pin_memory=True)
            self._stream = torch.cuda.Stream(device)
            self._copy_done = [torch.cuda.Event() for _ in self._buffers]
        self._current = 0

    def copy_to_device(self, data: npt.NDArray[np.uint8]) -> Tensor:
        """Start copying bytes to the device."""
        if not self._pinned:
            return torch.from_numpy(np.array(data))
        buffer, copy_done = self._buffers[self._current], self._copy_done[self._current]
        self._current = 1 - self._current
        copy_done.synchronize()  # the last copy from this buffer has ended
        np.copyto(buffer.numpy()[: len(data)], data)
        copied = torch.empty(len(data), dtype=torch.uint8, device=self.device)
        copied.copy_(buffer[: len(data)], non_blocking=True)
        copy_done.record()
        return copied

    def on_stream(self) -> Any:
        return torch.cuda.stream(self._stream) if self._pinned else nullcontext()


Job = Callable[[StagingLane], None]


class WeightLoader:
    """Allocates the weights and collects the jobs that fill them."""

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
        self.size = sum(stored.nbytes for stored in self.stored.values())
        self.weights_by_format: Counter[str] = Counter()
        self._jobs: list[tuple[int, Job]] = []  # bytes to read, job
        self._finite: list[tuple[str, Tensor]] = []
        self._compile_lock = threading.Lock()  # Triton compiles one kernel at a time

    # -- allocation -------------------------------------------------------------------------------

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
        weight_format = self.weights_by_format.most_common(1)[0][0]
        plain = str(self.dtype).removeprefix("torch.")
        return Weights(
            config, embed, position, layers, norm, head,
            precision=plain if weight_format in _DTYPES else _FORMAT_NAMES.get(weight_format,
            weight_format),
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
        vector = torch.from_numpy(values).to(self.device, dtype)
        self._finite.append((names[0], vector.isfinite().all()))
        return vector

    def _experts(self, feed: str, scale: str | None = None) -> ExpertWeights:
        """Experts with names that start with `feed`. `scale`: name of the factors of experts."""
        inner = ("gate", "up") if f"{feed}.gate.weight" in self.stored else ("up",)
        router_bias = self._vector((f"{feed}.router.bias",), torch.float32)
        return ExpertWeights(
            self._plain((f"{feed}.router.weight",)),
            self._expert_matrix(tuple(f"{feed}.{name}" for name in inner)),
            self._expert_matrix((f"{feed}.down",)),
            router_bias=router_bias,
            selection_bias=self._vector((f"{feed}.selection_bias",), torch.float32),
            scale=None if scale is None else self._vector((scale,), torch.float32),
        )

    def _expert_matrix(self, names: tuple[str, ...]) -> PlainMatrix | PackedMatrix:
        """Stack the matrices of all experts by rows: of each expert one after the other."""
        stored = {f"{name}.weight": self.stored[f"{name}.weight"] for name in names}
        tensors = list(stored.values())
        count, columns = tensors[0].shape[0], tensors[0].shape[2]
        rows = sum(tensor.shape[1] for tensor in tensors)
        bias = None
        if f"{names[0]}.bias" in self.stored:
            biases = [self.stored[f"{name}.bias"].float32() for name in names]
            bias = torch.from_numpy(np.concatenate(biases, 1).reshape(-1))
            bias = bias.to(self.device, self.dtype)
            self._finite.append((f"{names[0]}.bias", bias.isfinite().all()))
        keys = {_packing_key(tensor) for tensor in tensors}
        bits = None
        if self.bits and columns % _QUANT_GROUP == 0:
            bits = self.bits if all(tensor.type in _DTYPES for tensor in tensors) else None
        if bits is None and not (self.keep and len(keys) == 1 and None not in keys):
            weight = self._empty(count * rows, columns)
            self._add_expert_jobs(stored, weight)
            return PlainMatrix(weight, bias)
        sample = _flatten_experts(tensors[0].rows(0, 1), slice(0, 1), slice(0, 1))
        packing, row = _repack_chunk(sample, self._zeros, self.device, bits)
        parts = row.empty_like(count * rows)
        matrix = PackedMatrix(packing, parts, count * rows, columns, self.dtype, bias)
        self._add_expert_jobs(stored, matrix, bits)
        return matrix

    def _add_expert_jobs(
        self,
        stored: Mapping[str, FileTensor],
        target: Tensor | PackedMatrix,
        bits: int | None = None,
    ) -> None:
        """Add jobs that convert or pack matrices of experts [experts, rows, columns] each.

        Args:
            target: [experts * rows of all these matrices, columns], or the packed matrix.
            bits: 4 or 8 to quantize.
        """
        first, total = 0, sum(tensor.shape[1] for tensor in stored.values())
        for name, tensor in stored.items():
            weight_format = "BF16"
            if isinstance(target, PackedMatrix):
                weight_format = tensor.type if bits is None else f"{self.bits} bits"
            self.weights_by_format[weight_format] += math.prod(tensor.shape)
            count, rows, _ = tensor.shape
            for experts, part in _expert_chunks(tensor):
                chunk = tensor.rows(experts.start, experts.stop)
                place = experts, slice(first + part.start, first + part.stop)

                def run(
                    lane: StagingLane,
                    name: str = name,
                    chunk: FileTensor = chunk,
                    experts: slice = experts,
                    part: slice = part,
                    place: tuple[slice, slice] = place,
                    count: int = count,
                ) -> None:
                    matrix = _flatten_experts(chunk, experts, part)
                    is_finite, sources = self._convert(matrix, lane, target, bits)
                    self._finite.append((name, is_finite))
                    buffers = [target] if isinstance(target, Tensor) else target.parts.tensors()
                    for source, buffer in zip(sources, buffers, strict=True):
                        places = buffer.view(count, total, *buffer.shape[1:])[place]
                        places.copy_(source.view(places.shape))

                size = chunk.nbytes * (part.stop - part.start) // rows
                self._jobs.append((size, run))
            first += rows

    def _convert(
        self, matrix: FileTensor, lane: StagingLane, target: Tensor | PackedMatrix, bits: int | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Convert or pack a matrix for `target`; return whether it is finite, and its tensors."""
        if isinstance(target, PackedMatrix):
            _, packed = _repack_chunk(matrix, lane.copy_to_device, self.device, bits)
            return packed.is_finite(target.packing), packed.tensors()
        if matrix.packed and not _packing_key(matrix):
            matrix = FileTensor.from_float32(matrix.float32())
        if matrix.packed:
            packing, parts = _repack_chunk(matrix, lane.copy_to_device, self.device)
            rows, columns = matrix.shape
            values = self._empty(rows, columns)
            with self._compile_lock:
                PackedMatrix(packing, parts, rows, columns, self.dtype).dequantize(0, values)
        else:
            values = _copy_plain(matrix, lane.copy_to_device).to(self.dtype)
        return values.isfinite().all(), [values]

    def _matrix(
        self, names: tuple[str, ...], *, gated: bool = False, bits: int = 4
    ) -> WeightMatrix:
        """Stack these matrices by rows. `bits`: lower bound of bits if they are quantized here."""
        weights = tuple(f"{name}.weight" for name in names)
        bias = self._vector(tuple(f"{name}.bias" for name in names), self.dtype)
        types = [_packing_key(self.stored[name]) for name in weights]
        columns = self.stored[weights[0]].shape[1]
        if self.bits and all(self.stored[name].type in _DTYPES for name in weights):
            if columns % _QUANT_GROUP == 0:
                return self._packed(weights, bias, max(bits, self.bits))
        elif self.keep and all(types) and len(set(types)) == 1:
            return self._packed(weights, bias)
        elif self.keep and all(types) and not gated and bias is None:
            groups = groupby(zip(types, weights, strict=True), key=lambda pair: pair[0])
            return StackedMatrix(
                tuple(self._packed(tuple(name for _, name in group)) for _, group in groups)
            )
        return PlainMatrix(self._plain(weights), bias)

    def _plain(self, names: tuple[str, ...]) -> Tensor:
        shapes = [self.stored[name].shape for name in names]
        buffer = self._empty(sum(shape[0] for shape in shapes), *shapes[0][1:])
        first = 0
        for name, shape in zip(names, shapes, strict=True):
            self._fill(name, self.stored[name], buffer[first : first + shape[0]])
            first += shape[0]
        return buffer

    def _packed(
        self, names: tuple[str, ...], bias: Tensor | None = None, bits: int | None = None
    ) -> PackedMatrix:
        """Stack matrices of one type, packed as in the file or quantized to `bits`."""
        tensors = [self.stored[name] for name in names]
        rows, columns = sum(stored.shape[0] for stored in tensors), tensors[0].shape[1]
        packing, row = _repack_chunk(tensors[0].rows(0, 1), self._zeros, self.device, bits)
        parts, first = row.empty_like(rows), 0
        for name, stored in zip(names, tensors, strict=True):
            self._pack(name, stored, parts, first, packing, bits)
            first += stored.shape[0]
        return PackedMatrix(packing, parts, rows, columns, self.dtype, bias)

    def _zeros(self, data: npt.NDArray[np.uint8]) -> Tensor:
        """Zeros instead of the data, where only shapes matter."""
        return torch.zeros(len(data), dtype=torch.uint8, device=self.device)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    # -- jobs -------------------------------------------------------------------------------------

    def _fill(self, name: str, stored: FileTensor, buffer: Tensor) -> None:
        """Add jobs that convert a tensor into `room`, of the same shape."""
        self.weights_by_format["BF16"] += math.prod(stored.shape)
        if stored.packed and not _packing_key(stored):
            stored = FileTensor.from_float32(stored.float32())

        def job(chunk: FileTensor, first: int) -> Job:
            def run(lane: StagingLane) -> None:
                target = buffer[first : first + chunk.shape[0]]
                if chunk.packed:
                    packing, parts = _repack_chunk(chunk, lane.copy_to_device, self.device)
                    rows, columns = chunk.shape
                    with self._compile_lock:
                        PackedMatrix(packing, parts, rows, columns, self.dtype).dequantize(
                            0, target
                        )
                else:
                    target.copy_(_copy_plain(chunk, lane.copy_to_device))
                self._finite.append((name, target.isfinite().all()))

            return run

        self._add_jobs(stored, job)

    def _pack(
        self,
        name: str,
        stored: FileTensor,
        parts: PackedTensors,
        start: int,
        packing: PackedLayout,
        bits: int | None,
    ) -> None:
        weight_format = stored.type if bits is None else f"{self.bits} bits"
        self.weights_by_format[weight_format] += math.prod(stored.shape)

        def job(chunk: FileTensor, first: int) -> Job:
            def run(lane: StagingLane) -> None:
                _, packed = _repack_chunk(chunk, lane.copy_to_device, self.device, bits)
                parts.copy_rows(start + first, packed)
                self._finite.append((name, packed.is_finite(packing)))

            return run

        self._add_jobs(stored, job)

    def _add_jobs(self, stored: FileTensor, job: Callable[[FileTensor, int], Job]) -> None:
        """Add one job per chunk of a tensor's rows."""
        rows = stored.shape[0]
        step = max(1, _CHUNK_BYTES * rows // max(1, stored.nbytes))
        for first in range(0, rows, step):
            chunk = stored.rows(first, first + step)
            self._jobs.append((chunk.nbytes, job(chunk, first)))

    # -- execution --------------------------------------------------------------------------------

    def run(self, progress: bool) -> None:
        total, done = sum(size for size, _ in self._jobs), 0
        lanes: queue.SimpleQueue[StagingLane] = queue.SimpleQueue()
        threads = _THREADS if self.device.type == "cuda" else 1
        for _ in range(threads):
            lanes.put(StagingLane(self.device))

        def work(job: Job) -> None:
            lane = lanes.get()
            try:
                with torch.inference_mode(), lane.on_stream():
                    job(lane)
            finally:
                lanes.put(lane)

        show_bar = progress and total >= _MIN_PROGRESS_BYTES and sys.stderr.isatty()
        with (
            progress_bar(f"loading {self.path.name}", show=show_bar) as advance,
            ThreadPoolExecutor(threads, "unspool-load") as pool,
            _cancel_on_error(pool),
        ):
            futures = [pool.submit(work, job) for _, job in self._jobs]
            for (size, _), future in zip(self._jobs, futures, strict=True):
                future.result()
                done += size
                advance(done, total)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()  # staging memory
        self._check()

    def _check(self) -> None:
        results = torch.stack([is_finite for _, is_finite in self._finite]).tolist()
        for (name, _), is_finite in zip(self._finite, results, strict=True):
            if not is_finite:
                raise ModelFileError(
                    f"{self.path}: {name} contains NaN or infinite values; the file is damaged, or "
                    f"its values overflow {str(self.dtype).removeprefix('torch.')}"
                )


@contextmanager
def _cancel_on_error(pool: ThreadPoolExecutor) -> Iterator[None]:
    """Cancel pending jobs on an error."""
    try:
        yield
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise


CopyToDevice = Callable[[npt.NDArray[np.uint8]], Tensor]


def _expert_chunks(stored: FileTensor) -> Iterator[tuple[slice, slice]]:
    """Experts and rows of each chunk of a stack of matrices: several experts, or rows of one."""
    count, rows = stored.shape[:2]
    expert_bytes = max(1, stored.nbytes // count)
    step = max(1, _CHUNK_BYTES // expert_bytes)
    row_step = min(rows, max(1, _CHUNK_BYTES * rows // expert_bytes))
    for expert in range(0, count, step):
        for row in range(0, rows, row_step):
            yield slice(expert, min(expert + step, count)), slice(row, min(row + row_step, rows))


def _flatten_experts(chunk: FileTensor, experts: slice, part: slice) -> FileTensor:
    """Rows `part` of all matrices of a chunk as one matrix; reads the data.

    An NVFP4 chunk has the factors of all experts; the result has one per row.
    """
    count, num_rows = chunk.shape[0], part.stop - part.start
    data, scales, factor = chunk.data[:, part], chunk.scales, chunk.factor
    if factor is not None:
        factor = np.repeat(factor[experts], num_rows)
    return FileTensor(
        chunk.type,
        data.reshape(count * num_rows, -1),
        (count * num_rows, chunk.shape[2]),
        None if scales is None else scales[:, part].reshape(count * num_rows, -1),
        factor,
    )


def _packing_key(stored: FileTensor) -> Any:
    """Packing of a matrix; equal for matrices that can be stacked. None: cannot be packed."""
    if stored.type == FLOAT8 and stored.scales is not None and stored.shape[-1] % 16 == 0:
        return stored.type, stored.scales.shape[-1]
    return stored.type if stored.type in PACKINGS else None


def _copy_plain(chunk: FileTensor, copy_to_device: CopyToDevice) -> Tensor:
    data = np.ascontiguousarray(chunk.data).reshape(-1)
    return copy_to_device(data.view(np.uint8)).view(_DTYPES[chunk.type]).view(chunk.shape)


def _repack_chunk(
    chunk: FileTensor, copy_to_device: CopyToDevice, device: torch.device, bits: int | None = None
) -> tuple[PackedLayout, PackedTensors]:
    """Copy a chunk of a matrix to the device and repack it, or quantize it to `bits`."""
    if bits is not None:
        return quantize(_copy_plain(chunk, copy_to_device), bits)
    raw = copy_to_device(np.ascontiguousarray(chunk.data).reshape(-1)).view(len(chunk.data), -1)
    if chunk.scales is not None:
        scales = torch.from_numpy(np.array(chunk.scales)).to(device)
        return float8_packing(chunk.shape[1], scales.shape[1]), pack_float8(raw, scales)
    factors = None
    if chunk.factor is not None:
        row_factors = np.broadcast_to(chunk.factor, (len(raw),)).astype(np.float32)
        factors = torch.from_numpy(row_factors).to(device)
    return PACKINGS[chunk.type], repack(chunk.type, raw, factors)
