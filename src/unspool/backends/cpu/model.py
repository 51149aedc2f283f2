"""A model on the CPU: its weights in the native layout, and its execution plan.

    model = load_cpu(checkpoint)        # repacks in the background
    backend = model.backend(memory=None, context=2048)

Weights keep the values of their file: quantized blocks are only rearranged. The file is mapped into
memory, and its pages are released once they are repacked.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from unspool import native
from unspool.backends.cpu.packing import MatrixStruct, PackedMatrix, Packing, relative_error
from unspool.backends.cpu.plan import ExecutionPlan, build_plan
from unspool.backends.cpu.program import CompiledPlan
from unspool.backends.cpu.structures import address_of, native_functions
from unspool.backends.cpu.threads import FORKED, choose_threads
from unspool.errors import ModelFileError, UnspoolError
from unspool.model.config import ModelConfig, sinusoidal
from unspool.model.files.checkpoint import Checkpoint, hash_weights, sample_indices
from unspool.model.files.stored import FLOAT8, FileTensor
from unspool.model.weights import weight_shapes

if TYPE_CHECKING:
    from unspool.backends.cpu.backend import CpuBackend
    from unspool.backends.step import Floats, Ints

# How `precision` names a type, where that is not the type itself.
_PRECISIONS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", FLOAT8: "bfloat16"}
_PRECISIONS |= {"ZERO4": "4 bits", "ZERO8": "8 bits", "AFFINE8": "8 bits"}


def load_cpu(
    checkpoint: Checkpoint,
    *,
    store: str | None = None,
    threads: int | None = None,
    kv_bits: int = 16,
) -> CpuModel:
    """Start repacking a checkpoint in the background; the first use of the weights waits for it.

    Args:
        checkpoint: the model to load.
        store: None keeps the file's values; "4" and "8" quantize floats to 4 or 8 bits; "float32",
            "bfloat16" and "float16" convert to that type.
        threads: number of threads; None: the physical cores this process may use.
        kv_bits: bits per value in the KV cache: 8, 16 or 32.
    """
    return CpuModel(checkpoint, store=store, threads=choose_threads(threads), kv_bits=kv_bits)


class CpuModel:
    """A model on the native backend; created by `load_cpu`."""

    device = "cpu"

    def __init__(
        self, checkpoint: Checkpoint, *, store: str | None, threads: int, kv_bits: int
    ) -> None:
        self.config: ModelConfig = checkpoint.config
        self.threads, self.kv_bits = threads, kv_bits
        self.plan: ExecutionPlan = build_plan(self.config)
        self.packed: dict[str, PackedMatrix] = {}
        self.vectors: dict[str, Floats] = {}
        self._precision = ""
        self._fingerprint: str | None = None
        self._quantization_error: str | None = None
        self._fault: BaseException | None = None
        self._process = os.getpid()
        self._lens: Runner | None = None
        self._lens_lock = threading.Lock()
        packing: Iterator[None] = self._repack(checkpoint, store)
        self._advance(packing, checkpoint)  # in this thread: a new one would wait for the GIL
        # Not a daemon: a process that exits waits for it instead of freeing memory in use.
        self._loading = threading.Thread(
            target=self._advance, args=(packing, checkpoint), name="unspool-load"
        )
        self._loading.start()

    def wait(self) -> CpuModel:
        """Wait until the weights are loaded; raises what loading raised. Thread-safe."""
        if os.getpid() != self._process:  # a forked child does not have the loading thread
            raise UnspoolError(FORKED)
        self._loading.join()
        if self._fault is not None:
            raise self._fault
        return self

    def _advance(self, packing: Iterator[None], checkpoint: Checkpoint) -> None:
        """Run `_repack` up to its next yield or its end; keep what it raises for `wait`."""
        try:
            next(packing, None)
        except MemoryError:
            self._fault = UnspoolError(
                f"{checkpoint.path}: not enough memory for the weights; use a smaller model, or "
                "one with fewer bits per weight"
            )
        except RuntimeError as error:
            no_threads = UnspoolError("no thread could be started to load the model")
            self._fault = no_threads if "new thread" in str(error) else error
        except BaseException as error:
            self._fault = error

    def _repack(self, checkpoint: Checkpoint, store: str | None) -> Iterator[None]:
        """Start to repack all weights, yield, then wait for the end."""
        matrices: dict[str, FileTensor] = {}
        for name, stored in checkpoint.weights():
            is_conv = name.endswith(".conv.weight")
            if len(stored.shape) == 1 or is_conv or name == "position_embed.weight":
                self.vectors[name] = self._vector(name, stored, checkpoint)
            elif name.endswith(".bias"):  # one for each expert
                biases = self._vector(name, stored, checkpoint)
                self.vectors.update({f"{name}[{n}]": bias for n, bias in enumerate(biases)})
            elif len(stored.shape) == 3:
                parts = stored.slices()
                matrices.update({f"{name}[{n}]": part for n, part in enumerate(parts)})
            else:
                matrices[name] = stored
        if self.config.positions == "learned":
            self.vectors["positions"] = self.vectors.pop("position_embed.weight")
        elif self.config.positions == "sinusoidal":
            positions = np.arange(self.config.context)
            self.vectors["positions"] = sinusoidal(positions, self.config.width)
        self._round_embedding_scale(matrices["embed.weight"].type, store)
        packings = [
            Packing(items, store=kind, threads=self.threads)
            for kind, items in _by_store(matrices, store).items()
        ]
        yield
        for packing in packings:
            self.packed.update(packing.finish())
        kinds: Counter[str] = Counter()
        for name, stored in matrices.items():
            kinds[stored.type] += self.packed[name].nbytes
        self._precision = store or _main_precision(kinds)
        losses = [checkpoint.losses] if checkpoint.losses else []
        if FLOAT8 in kinds and store is None:
            losses.append("FP8 weights were rounded to bfloat16, which differs by 0.2% on average")
        self._quantization_error = "; ".join(losses) or None
        if store in ("4", "8"):
            already_quantized = all(stored.packed for stored in matrices.values())
            self._precision = _main_precision(kinds) if already_quantized else f"{store} bits"
            error = relative_error(self.packed.values())
            self._quantization_error = (
                "the file's weights are quantized already and were kept as they are"
                if already_quantized
                else f"weights were rounded to {store} bits; they differ by {error:.2%} on average"
            )

    def _vector(self, name: str, stored: FileTensor, checkpoint: Checkpoint) -> Floats:
        values = np.ascontiguousarray(stored.float32(), np.float32)
        if not np.isfinite(values).all():
            raise ModelFileError(
                f"{checkpoint.path}: {name} holds NaN or infinite numbers; the file is damaged"
            )
        return values

    def _round_embedding_scale(self, type: str, store: str | None) -> None:
        """Round the factor to the precision of the weights, as these models were trained."""
        stored_type = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}.get(
            store or "", type
        )
        scale = np.float32(self.config.embedding_scale)
        if stored_type == "BF16":
            bits = int(scale.view(np.uint32))
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            scale = np.uint32(rounded).view(np.float32)
        elif stored_type == "F16":
            scale = np.float32(np.float16(scale))
        if float(scale) != self.config.embedding_scale:
            self.plan = build_plan(self.config, embedding_scale=float(scale))

    @property
    def numerics(self) -> str:
        return f"native {native.instruction_set()} kv_bits={self.kv_bits}"

    @property
    def precision(self) -> str:
        """Type of most of the weights: Q4_1, bfloat16, ..."""
        return self.wait()._precision

    @property
    def quantization_error(self) -> str | None:
        """How far rounding changed the weights, as a message; None: nothing was rounded."""
        return self.wait()._quantization_error

    def backend(self, *, memory: int | None, context: int) -> CpuBackend:
        # Imported here, while the weights load in the background.
        from unspool.backends.cpu.backend import CpuBackend

        return CpuBackend(self.wait(), memory=memory, context=context)

    def new_runner(self) -> Runner:
        return Runner(self.wait())

    def effective_vector(self, name: str) -> Floats:
        """A vector of the plan, as the kernels use it."""
        vector = self.vector(name)
        assert vector is not None, name
        if name.endswith(".a_log"):  # the decay rate of a head
            vector = -native.exp(vector).astype(np.float32)
        return np.ascontiguousarray(vector)

    def logits(self, vectors: Floats) -> Floats:
        with self._lens_lock:  # the engine uses another runner
            if self._lens is None:
                self._lens = self.new_runner()
            return self._lens.head(np.ascontiguousarray(vectors, np.float32))

    def normed(self, vectors: Floats) -> Floats:
        weight, bias = self.vector("norm.weight"), self.vector("norm.bias")
        x = np.asarray(vectors, np.float32)
        if self.config.norm == "layer":
            x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self.config.norm_eps))
        x = x * weight
        return np.asarray(x if bias is None else x + bias, np.float32)

    def vector(self, name: str) -> Floats | None:
        """A vector as it is applied: 1 + w where the model stores a norm's weight as w."""
        if name == "head.bias" and self.config.tied:
            name = "head_bias"
        vector = self.wait().vectors.get(name)
        plus_one = self.config.norm_plus_one and name.endswith("norm.weight")
        return vector + 1 if vector is not None and plus_one else vector

    def rows(self, name: str, start: int, stop: int) -> Floats:
        self.wait()
        if name == "head.weight" and self.config.tied:
            name = "embed.weight"
        packed = self.packed[name]
        last = min(stop, packed.shape[0])
        return packed.float32(min(start, last), last)

    def fingerprint(self) -> str:
        """Hash of the names and shapes of all weights and of a few values of each: equal on every
        backend that stores them exactly."""
        if self._fingerprint is None:
            named = sorted(weight_shapes(self.wait().config).items())
            self._fingerprint = hash_weights(
                (name, shape, self._values_at(name, shape, sample_indices(shape)))
                for name, shape in named
            )
        return self._fingerprint

    def _values_at(self, name: str, shape: tuple[int, ...], indices: Ints) -> Floats:
        """Single values of a weight, by their index in the flattened tensor."""
        if name == "position_embed.weight":
            name = "positions"
        if name in self.vectors:
            return self.vectors[name].reshape(-1)[indices]
        if name.endswith(".bias"):
            biases = np.stack([self.vectors[f"{name}[{n}]"] for n in range(shape[0])])
            return biases.reshape(-1)[indices]
        rows, columns = np.divmod(indices, shape[-1])
        values = np.empty(len(indices), np.float32)
        for index, (row, column) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
            expert, inner = divmod(row, shape[-2])
            packed = self.packed[f"{name}[{expert}]" if len(shape) == 3 else name]
            values[index] = packed.float32(inner, inner + 1)[0, column]
        return values


class Runner(CompiledPlan):
    """The plan of a loaded model in the native library, with working memory for one thread."""

    def __init__(self, model: CpuModel) -> None:
        plan, config = model.plan, model.config
        _, names = plan.encode()
        bias_index = {name: index for index, name in enumerate(plan.vectors)}
        matrices = [MatrixStruct.from_buffer_copy(model.packed[name].matrix) for name in names]
        for name, matrix in zip(names, matrices, strict=True):
            matrix.bias = bias_index.get(plan.bias_name(name), -1)
        super().__init__(
            plan,
            matrices,
            [model.effective_vector(name) for name in plan.vectors],
            threads=model.threads,
            logits_buffer=list(plan.buffers).index("logits"),
            experts=config.experts,
            experts_per_token=config.experts_per_token,
            owner=model,
        )
        self._head, self._vocab_size = plan.head, config.vocab_size

    def head(self, vectors: Floats) -> Floats:
        """Apply the final norm and the head: [n, width] to [n, vocabulary]."""
        logits = np.empty((len(vectors), self._vocab_size), np.float32)
        status = native_functions().unspool_run_head(
            self.handle, address_of(vectors), len(vectors), self._head, address_of(logits)
        )
        if status:
            raise UnspoolError("not enough memory, or no thread could be started")
        return logits


def _by_store(
    matrices: dict[str, FileTensor], store: str | None
) -> dict[str | None, dict[str, FileTensor]]:
    """Group matrices by how they are stored: routers are too sensitive to be rounded, and the
    embedding and the head gain most from 8 bits."""
    groups: dict[str | None, dict[str, FileTensor]] = {}
    for name, stored in matrices.items():
        kind = store
        if store in ("4", "8") and (".router." in name or ".shared_gate." in name):
            kind = None
        elif store == "4" and name in ("embed.weight", "head.weight"):
            kind = "8"
        groups.setdefault(kind, {})[name] = stored
    return groups


def _main_precision(kinds: Counter[str]) -> str:
    """The type of most of the weights, by bytes."""
    most_common = kinds.most_common(1)[0][0]
    return _PRECISIONS.get(most_common, most_common)
