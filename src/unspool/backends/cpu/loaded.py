"""A checkpoint's weights in the native layout, and the plan that runs over them.

    model = load_cpu(checkpoint)        # repacks in the background
    backend = model.backend(memory=None, context=2048)

Weights keep the numbers of their file: quantized blocks are only moved. The file is mapped, and
its pages are given back once they are repacked.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from unspool.backends.cpu.layout import Matrix
from unspool.backends.cpu.packing import Packed, pack_all, relative_error
from unspool.backends.cpu.plan import Plan
from unspool.backends.cpu.plan_builder import build_plan
from unspool.backends.cpu.structures import ROWS, ModelSpec, Op, Vector, address, functions
from unspool.backends.cpu.threads import FORKED, choose_threads
from unspool.errors import ModelFileError, UnspoolError
from unspool.model.checkpoint import Checkpoint
from unspool.model.config import ModelConfig
from unspool.model.fingerprint import hashed, places
from unspool.model.float8 import FLOAT8
from unspool.model.positions import sinusoidal
from unspool.model.stored import Stored
from unspool.model.weights import shapes

if TYPE_CHECKING:
    from unspool.backends.cpu.backend import CpuBackend
    from unspool.backends.step import Floats, Ints

_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", FLOAT8: "bfloat16"}
_NAMES |= {"ZERO4": "4 bits", "ZERO8": "8 bits", "AFFINE8": "8 bits"}


def load_cpu(
    checkpoint: Checkpoint,
    *,
    store: str | None = None,
    threads: int | None = None,
    kv_bits: int = 16,
) -> CpuModel:
    """Begin to repack a checkpoint; whoever needs the weights first waits for the end.

    store     None keeps the file's numbers; "4" and "8" quantize floats to so many bits;
              "float32", "bfloat16" and "float16" keep them so.
    threads   how many to run on; None: as many as there are cores for us.
    kv_bits   of a number in the KV cache: 8, 16 or 32.
    """
    return CpuModel(checkpoint, store=store, threads=choose_threads(threads), kv_bits=kv_bits)


class CpuModel:
    """A model in the native backend; made by `load_cpu`."""

    device = "cpu"

    def __init__(
        self, checkpoint: Checkpoint, *, store: str | None, threads: int, kv_bits: int
    ) -> None:
        self.config: ModelConfig = checkpoint.config
        self.threads, self.kv_bits = threads, kv_bits
        self.plan: Plan = build_plan(self.config)
        self.packed: dict[str, Packed] = {}
        self.vectors: dict[str, Floats] = {}
        self._precision = ""
        self._fingerprint: str | None = None
        self._quantization_error: str | None = None
        self._fault: BaseException | None = None
        self._process = os.getpid()
        self._lens: Runner | None = None
        self._lens_turn = threading.Lock()
        # Not a daemon: a process that ends waits for it instead of pulling memory away under it.
        self._loading = threading.Thread(
            target=self._load, args=(checkpoint, store), name="unspool-load"
        )
        self._loading.start()

    # -- loading ------------------------------------------------------------------------------

    def wait(self) -> CpuModel:
        """Until the weights are there; whatever was wrong with them is raised here."""
        if os.getpid() != self._process:  # the thread that loads it may be there, but not here
            raise UnspoolError(FORKED)
        self._loading.join()  # returns at once when it has ended; any number of threads may wait
        if self._fault is not None:
            raise self._fault
        return self

    def _load(self, checkpoint: Checkpoint, store: str | None) -> None:
        try:
            self._repack(checkpoint, store)
        except MemoryError:
            self._fault = UnspoolError(
                f"{checkpoint.path}: there is not enough memory for the weights; use a smaller "
                "model, or one with fewer bits a weight"
            )
        except RuntimeError as error:
            no_threads = UnspoolError("the system gave no more threads to load the model with")
            self._fault = no_threads if "new thread" in str(error) else error
        except BaseException as error:
            self._fault = error

    def _repack(self, checkpoint: Checkpoint, store: str | None) -> None:
        matrices: dict[str, Stored] = {}
        for name, stored in checkpoint.weights():
            taps = name.endswith(".conv.weight")
            if len(stored.shape) == 1 or taps or name == "position_embed.weight":
                self.vectors[name] = self._vector(name, stored, checkpoint)
            elif name.endswith(".bias"):  # one for each expert
                every = self._vector(name, stored, checkpoint)
                self.vectors.update({f"{name}[{n}]": one for n, one in enumerate(every)})
            elif len(stored.shape) == 3:
                parts = stored.slices()
                matrices.update({f"{name}[{n}]": part for n, part in enumerate(parts)})
            else:
                matrices[name] = stored
        if self.config.positions == "learned":
            self.vectors["positions"] = self.vectors.pop("position_embed.weight")
        elif self.config.positions == "sinusoidal":
            everywhere = np.arange(self.config.context)
            self.vectors["positions"] = sinusoidal(everywhere, self.config.width)
        self._round_embedding_scale(matrices["embed.weight"].type, store)
        for kind, items in _by_store(matrices, store).items():
            self.packed.update(pack_all(items, store=kind, threads=self.threads))
        kinds: Counter[str] = Counter()
        for name, stored in matrices.items():
            kinds[stored.type] += self.packed[name].nbytes
        self._precision = store or _said(kinds)
        lost = [checkpoint.losses] if checkpoint.losses else []
        if FLOAT8 in kinds and store is None:
            lost.append("FP8 weights were rounded to bfloat16, which differs by 0.2% on average")
        self._quantization_error = "; ".join(lost) or None
        if store in ("4", "8"):
            already = all(stored.packed for stored in matrices.values())
            self._precision = _said(kinds) if already else f"{store} bits"
            error = relative_error(self.packed.values())
            self._quantization_error = (
                "the file's weights are quantized already and were kept as they are"
                if already
                else f"weights were rounded to {store} bits; they differ by {error:.2%} on average"
            )

    def _vector(self, name: str, stored: Stored, checkpoint: Checkpoint) -> Floats:
        values = np.ascontiguousarray(stored.float32(), np.float32)
        if not np.isfinite(values).all():
            raise ModelFileError(
                f"{checkpoint.path}: {name} holds NaN or infinite numbers; the file is damaged"
            )
        return values

    def _round_embedding_scale(self, type: str, store: str | None) -> None:
        """These models were trained with the factor rounded to the weights' own precision."""
        kept = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}.get(store or "", type)
        scale = np.float32(self.config.embedding_scale)
        if kept == "BF16":
            bits = int(scale.view(np.uint32))
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
            scale = np.uint32(rounded).view(np.float32)
        elif kept == "F16":
            scale = np.float32(np.float16(scale))
        if float(scale) != self.config.embedding_scale:
            self.plan = build_plan(self.config, embedding_scale=float(scale))

    @property
    def precision(self) -> str:
        """The type that most of the weights have: Q4_1, bfloat16, ..."""
        return self.wait()._precision

    @property
    def quantization_error(self) -> str | None:
        """What rounding to 4 or 8 bits did to the weights, in words; None if nothing was."""
        return self.wait()._quantization_error

    # -- running ------------------------------------------------------------------------------

    def backend(self, *, memory: int | None, context: int) -> CpuBackend:
        # Imported late: weights are on their way already while this is read.
        from unspool.backends.cpu.backend import CpuBackend

        return CpuBackend(self.wait(), memory=memory, context=context)

    def new_runner(self) -> Runner:
        return Runner(self.wait())

    def effective(self, name: str) -> Floats:
        found = self.vector(name)
        assert found is not None, name
        if name.endswith(".a_log"):  # the rate at which a head forgets
            found = -np.exp(found)
        return np.ascontiguousarray(found)

    # -- what the lens reads ------------------------------------------------------------------

    def logits(self, vectors: Floats) -> Floats:
        with self._lens_turn:  # an engine runs on its own runner
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
        """A vector as it is used: where a norm's weight w means 1 + w, that."""
        if name == "head.bias" and self.config.tied:
            name = "head_bias"
        found = self.wait().vectors.get(name)
        plus_one = self.config.norm_plus_one and name.endswith("norm.weight")
        return found + 1 if found is not None and plus_one else found

    def rows(self, name: str, start: int, stop: int) -> Floats:
        self.wait()
        if name == "head.weight" and self.config.tied:
            name = "embed.weight"
        packed = self.packed[name]
        last = min(stop, packed.shape[0])
        return packed.float32(min(start, last), last)

    def fingerprint(self) -> str:
        """Names and shapes of all weights, and a few numbers from all over each: the same for
        the same weights on every backend that keeps them exactly."""
        if self._fingerprint is None:
            named = sorted(shapes(self.wait().config).items())
            self._fingerprint = hashed(
                (name, shape, self._numbers(name, shape, places(shape))) for name, shape in named
            )
        return self._fingerprint

    def _numbers(self, name: str, shape: tuple[int, ...], spots: Ints) -> Floats:
        """Single numbers of a weight, by their place in it counted through."""
        if name == "position_embed.weight":
            name = "positions"
        if name in self.vectors:
            return self.vectors[name].reshape(-1)[spots]
        if name.endswith(".bias"):
            every = np.stack([self.vectors[f"{name}[{n}]"] for n in range(shape[0])])
            return every.reshape(-1)[spots]
        rows, columns = np.divmod(spots, shape[-1])
        found = np.empty(len(spots), np.float32)
        for place, (row, column) in enumerate(zip(rows.tolist(), columns.tolist(), strict=True)):
            expert, inner = divmod(row, shape[-2])
            packed = self.packed[f"{name}[{expert}]" if len(shape) == 3 else name]
            found[place] = packed.float32(inner, inner + 1)[0, column]
        return found


class Runner:
    """The library's own state of a model: its plan with addresses, and room to work in."""

    def __init__(self, model: CpuModel) -> None:
        plan, config = model.plan, model.config
        ops, names = plan.encoded()
        vectors = plan.vectors
        numbers = {name: number for number, name in enumerate(vectors)}
        matrices = (Matrix * len(names))()
        for number, name in enumerate(names):
            matrices[number] = model.packed[name].matrix
            matrices[number].bias = numbers.get(plan.bias(name), -1)
        arrays = [model.effective(name) for name in vectors]
        every = [Vector(address(array), array.size) for array in arrays]
        widths = np.array([width for width, _ in plan.buffers.values()], np.int64)
        rows = np.array([ROWS[kind] for _, kind in plan.buffers.values()], np.int32)
        self._spec = ModelSpec(
            ops=(Op * len(ops))(*ops),
            op_count=len(ops),
            matrices=matrices,
            matrix_count=len(names),
            vectors=(Vector * max(1, len(every)))(*every),
            vector_count=len(every),
            buffer_widths=address(widths),
            buffer_rows=address(rows),
            buffer_count=len(widths),
            logits_buffer=list(plan.buffers).index("logits"),
            experts=config.experts,
            chosen=config.experts_per_token,
            threads=model.threads,
        )
        self._kept: tuple[Any, ...] = (model, widths, rows, arrays)  # the library points at them
        self._head, self._vocab_size = plan.head, config.vocab_size
        self.handle = functions().unspool_model_new(ctypes.byref(self._spec))
        if not self.handle:
            raise UnspoolError("there is not enough memory to run the model")
        self._free = functions().unspool_model_free

    def head(self, vectors: Floats) -> Floats:
        logits = np.empty((len(vectors), self._vocab_size), np.float32)
        status = functions().unspool_run_head(
            self.handle, address(vectors), len(vectors), self._head, address(logits)
        )
        if status:
            raise UnspoolError("there is not enough memory, or no thread to be had")
        return logits

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._free(self.handle)
            self.handle = None


def _by_store(
    matrices: dict[str, Stored], store: str | None
) -> dict[str | None, dict[str, Stored]]:
    """Which matrices are kept how: routers decide too much to be rounded, and the table of
    tokens and the head gain most from 8 bits."""
    found: dict[str | None, dict[str, Stored]] = {}
    for name, stored in matrices.items():
        kind = store
        if store in ("4", "8") and (".router." in name or ".shared_gate." in name):
            kind = None
        elif store == "4" and name in ("embed.weight", "head.weight"):
            kind = "8"
        found.setdefault(kind, {})[name] = stored
    return found


def _said(kinds: Counter[str]) -> str:
    """The type that most of the weights have."""
    most = kinds.most_common(1)[0][0]
    return _NAMES.get(most, most)
