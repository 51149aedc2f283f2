"""Load a checkpoint's weights from the file to the device, in parallel."""

from __future__ import annotations

import math
import queue
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from unspool.backends.cuda.matmul import (
    PACKINGS,
    NormWeights,
    PackedLayout,
    PackedMatrix,
    PackedTensors,
    float8_packing,
    pack_float8,
    quantize,
    repack,
)
from unspool.backends.cuda.weights import (
    AttentionWeights,
    DenseWeights,
    ExpertWeights,
    FeedWeights,
    LayerWeights,
    MatrixParts,
    ParallelNorms,
    PlainMatrix,
    RecurrentWeights,
    StackedMatrix,
    TokenInputsWeights,
    TokenInputWeights,
    TransformWeights,
    WeightMatrix,
    Weights,
)
from unspool.errors import ModelFileError, UnspoolError
from unspool.model.files.checkpoint import Checkpoint
from unspool.model.files.stored import FLOAT8, FileTensor
from unspool.model.hub.download import progress_bar
from unspool.model.hub.inspect import PROCESS, plan_memory
from unspool.model.hub.memory import PLANNED_CONTEXT, format_bytes, free_memory

_THREADS = 8
_CHUNK_BYTES = 1 << 25  # of the file per job
_MIN_PROGRESS_BYTES = 1 << 30  # smaller models load without a progress bar
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_FORMAT_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", FLOAT8: "FP8"}
_QUANT_GROUP = 32  # columns per scale of weights that are quantized here
_QUANTIZE = "quantize"
_BITS_PER_WEIGHT = {8: 8.5, 4: 5.0}  # of weights that are quantized here, scales included
# Input projections of recurrent layers, in the order of the kernels; those with one row per head
# are not quantized.
_PROJECTIONS = {"conv": "bcx", "delta": ("qkv", "z", "b", "a"), "mamba2": ("vkq", "z", "dt")}
_HEAD_GATES = {"conv": (), "delta": ("b", "a"), "mamba2": ("dt",)}


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
    free = _free_bytes(device)
    if loader.device_bytes(quantize_bits) > free:
        raise UnspoolError(_too_large(loader, free))
    try:
        weights = loader.weights()
        loader.run(progress)
    except torch.OutOfMemoryError as error:
        raise UnspoolError(_too_large(loader, free)) from error
    return weights


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return free_memory()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _too_large(loader: WeightLoader, free: int) -> str:
    """Say what the weights need, what is free, and what would fit."""
    needed = loader.device_bytes(loader.bits)
    message = (
        f"{loader.path}: the weights need {format_bytes(needed)}, and {loader.device} has "
        f"{format_bytes(free)} free"
    )
    fitting = []
    for bits in _BITS_PER_WEIGHT:
        size = loader.device_bytes(bits)
        (plan,) = plan_memory(loader.config, gpus=1, memory=free + PROCESS, packed=size)
        if size < needed and plan.tokens >= PLANNED_CONTEXT:
            cache = f"{format_bytes(size)}, with a KV cache of {plan.tokens:,} tokens"
            fitting.append(f"quantize={bits} ({cache})")
    if fitting:
        return f"{message}; what fits: {' or '.join(fitting)}"
    return (
        f"{message}; use a smaller model, a GGUF file of fewer bits, several GPUs "
        "(devices='auto') or device='cpu'; see `unspool models plan`"
    )


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
        self.parts: dict[WeightMatrix, MatrixParts] = {}
        self.weights_by_format: Counter[str] = Counter()
        self._jobs: list[tuple[int, Job]] = []  # bytes to read, job
        self._finite: list[tuple[str, Tensor]] = []
        self._compile_lock = threading.Lock()  # Triton compiles one kernel at a time

    def device_bytes(self, bits: int | None) -> int:
        """Approximate bytes of the weights on the device; `bits`: see `load_weights`."""
        total = 0.0
        for tensor in self.stored.values():
            count = math.prod(tensor.shape)
            if self.keep and _packing_key(tensor):
                total += tensor.nbytes
            elif bits and len(tensor.shape) > 1 and tensor.type in _DTYPES:
                total += count * _BITS_PER_WEIGHT[bits] / 8
            else:
                total += count * self.dtype.itemsize
        return int(total)

    # -- allocation -------------------------------------------------------------------------------

    def weights(self) -> Weights:
        config = self.config
        embed = self._table("embed")
        position = None
        if "position_embed.weight" in self.stored:
            position = self._plain(("position_embed.weight",))
        layers = [self._layer(number) for number in range(config.layers)]
        if not config.tied:
            head = self._matrix(("head",), bits=8)
        else:
            head = embed if not config.head_bias else replace(embed, bias=self._head_bias())
        token_inputs = transform = None
        if config.token_width:
            token_inputs = TokenInputsWeights(
                self._table("token_inputs.embed"), self._matrix(("token_inputs.project",)),
                self._norm("token_inputs.norm", "rms"),
            )  # fmt: skip
        if config.head_transform:
            norm = self._norm("transform.norm") if config.norm_before else None
            transform = TransformWeights(norm, self._matrix(("transform.dense",)))
        weight_format = self.weights_by_format.most_common(1)[0][0]
        plain = str(self.dtype).removeprefix("torch.")
        is_plain = weight_format in _DTYPES
        return Weights(
            config=config,
            embed=embed,
            position_embed=position,
            embed_norm=self._norm("embed_norm") if config.embedding_norm else None,
            token_inputs=token_inputs,
            layers=layers,
            transform=transform,
            norm=self._norm("norm"),
            head=head,
            parts=self.parts,
            precision=plain if is_plain else _FORMAT_NAMES.get(weight_format, weight_format),
        )

    def _layer(self, number: int) -> LayerWeights:
        at, config = f"layers.{number}", self.config
        has_post_norms = config.norm_after or config.norm_sums
        token_input = None
        if config.token_width:
            token_input = TokenInputWeights(
                self._matrix((f"{at}.token_input.gate",)), self._matrix((f"{at}.token_input.out",)),
                self._norm(f"{at}.token_input.norm"),
            )  # fmt: skip

        def norm(name: str, exists: bool) -> NormWeights | None:
            return self._norm(f"{at}.{name}") if exists else None

        return LayerWeights(
            attention_norm=norm("attention_norm", config.has_attention_norm(number)),
            mixer=self._mixer(number),
            attention_post_norm=norm("attention_post_norm", has_post_norms),
            feed_norm=norm("feed_norm", config.has_feed_norm(number)),
            feed=self._feed(number) if config.has_feed(number) else None,
            feed_post_norm=norm("feed_post_norm", has_post_norms),
            token_input=token_input,
            scale=float(self.stored[f"{at}.scale"].float32()[0]) if config.layer_scale else 1.0,
        )

    def _mixer(self, number: int) -> AttentionWeights | RecurrentWeights | None:
        kind = self.config.mixer(number)
        if kind == "attention":
            return self._attention(number)
        return None if kind == "none" else self._recurrent(f"layers.{number}.mixer", kind)

    def _attention(self, number: int) -> AttentionWeights:
        config, at = self.config, f"layers.{number}.attention"
        has_keys = config.kv_source(number) == number
        has_norms = config.qk_norm != "none"
        names = ["q"] + ["k"] * has_keys + ["v"] * (has_keys and config.has_values(number))
        names += ["gate"] * config.attention_gate
        return AttentionWeights(
            qkv=self._matrix(tuple(f"{at}.{name}" for name in names)),
            out=self._matrix((f"{at}.out",)),
            q_norm=self._norm(f"{at}.q_norm", "rms") if has_norms else None,
            k_norm=self._norm(f"{at}.k_norm", "rms") if has_norms and has_keys else None,
            sinks=self._floats(f"{at}.sinks") if config.sinks else None,
        )

    def _recurrent(self, at: str, kind: str) -> RecurrentWeights:
        conv_weight = self._floats(f"{at}.conv.weight")
        assert conv_weight is not None
        rate = self._floats(f"{at}.a_log")
        return RecurrentWeights(
            kind=kind,
            projection=self._matrix(
                tuple(f"{at}.{name}" for name in _PROJECTIONS[kind]),
                unquantized=tuple(f"{at}.{name}.weight" for name in _HEAD_GATES[kind]),
            ),
            out=self._matrix((f"{at}.out",)),
            conv_weight=conv_weight,
            conv_bias=self._floats(f"{at}.conv.bias"),
            rate=None if rate is None else -rate.exp(),
            dt_bias=self._floats(f"{at}.dt_bias"),
            skip=self._floats(f"{at}.d"),
            norm_gain=self._floats(f"{at}.norm_weight"),
        )

    def _feed(self, number: int) -> FeedWeights:
        config, at = self.config, f"layers.{number}.feed"
        if not config.has_experts(number):
            return FeedWeights(self._dense(at), None, None, None)
        if config.has_dense_and_experts(number):
            router = self._norm(f"{at}.router_norm")
            router = replace(router, gain=router.gain * config.width**-0.5)
            norms = ParallelNorms(
                self._norm(f"{at}.dense_norm"), self._norm(f"{at}.dense_post_norm"),
                self._norm(f"{at}.experts_norm"), self._norm(f"{at}.experts_post_norm"), router,
            )  # fmt: skip
            experts = self._experts(f"{at}.experts", f"{at}.expert_scale")
            return FeedWeights(self._dense(f"{at}.dense"), experts, None, norms)
        shared = self._dense(f"{at}.shared") if config.shared_width else None
        gate = None
        if config.shared_width and config.shared_gated:
            gate = self._plain((f"{at}.shared_gate.weight",)).view(-1)
        return FeedWeights(shared, self._experts(at), gate, None)

    def _dense(self, at: str) -> DenseWeights:
        inner = (f"{at}.gate", f"{at}.up") if self.config.gated else (f"{at}.up",)
        gate_up = self._matrix(inner, gated=self.config.gated)
        return DenseWeights(gate_up, self._matrix((f"{at}.down",)))

    def _head_bias(self) -> Tensor:
        bias = self._vector(("head_bias",), self.dtype)
        assert bias is not None
        return bias

    def _table(self, name: str) -> PlainMatrix | PackedMatrix:
        """An embedding table."""
        table = self._matrix((name,), bits=8)
        assert isinstance(table, PlainMatrix | PackedMatrix)
        del self.parts[table]
        return table

    def _norm(self, name: str, kind: str | None = None) -> NormWeights:
        gain = self._vector((f"{name}.weight",), torch.float32)
        if gain is None:
            raise ModelFileError(f"{self.path}: has no tensor {name}.weight")
        bias = self._vector((f"{name}.bias",), torch.float32)
        if bias is None and (kind or self.config.norm) == "layer":
            bias = torch.zeros_like(gain)
        return NormWeights(1 + gain if self.config.norm_plus_one else gain, bias)

    def _floats(self, name: str) -> Tensor | None:
        return self._vector((name,), torch.float32)

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
        self,
        names: tuple[str, ...],
        *,
        gated: bool = False,
        bits: int = 4,
        unquantized: tuple[str, ...] = (),
    ) -> WeightMatrix:
        """Stack these matrices by rows.

        Args:
            gated: gate and up, which must have the same format.
            bits: lower bound of bits if they are quantized here.
            unquantized: names of matrices that stay as they are.
        """
        weights = tuple(f"{name}.weight" for name in names)
        bias = self._vector(tuple(f"{name}.bias" for name in names), self.dtype)
        formats = {name: self._format(name, name in unquantized, bits) for name in weights}
        if len(set(formats.values())) > 1 and (gated or bias is not None):
            formats = dict.fromkeys(weights)
        groups = [
            (key, tuple(group)) for key, group in groupby(weights, key=lambda name: formats[name])
        ]
        matrices = tuple(
            PlainMatrix(self._plain(group), bias)
            if key is None
            else self._packed(group, bias, key[1] if key[0] == _QUANTIZE else None)
            for key, group in groups
        )
        matrix = matrices[0] if len(matrices) == 1 else StackedMatrix(matrices)
        self.parts[matrix] = tuple((name, self.stored[name].shape[0]) for name in weights)
        return matrix

    def _format(self, name: str, unquantized: bool, bits: int) -> Any:
        """Format of a matrix on the device, equal for those that can be stacked; None: plain."""
        stored = self.stored[name]
        if self.bits and stored.type in _DTYPES:
            fits = stored.shape[1] % _QUANT_GROUP == 0
            return (_QUANTIZE, max(bits, self.bits)) if fits and not unquantized else None
        return _packing_key(stored) if self.keep else None

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
