"""A model loaded on a GPU, and the warm-up that compiles its kernels."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from time import perf_counter

import numpy as np
import torch
import triton
from torch import Tensor
from torch.nn import functional

from unspool.backends.cuda.backend import CudaBackend
from unspool.backends.cuda.kv_cache import allocate_kv_cache
from unspool.backends.cuda.observe import normed
from unspool.backends.cuda.weights import PlainMatrix, WeightMatrix, Weights
from unspool.backends.step import Floats, StepBatch
from unspool.backends.torch.backend import device_description
from unspool.model.config import ModelConfig
from unspool.model.layers.parts import activate
from unspool.sampling.picker import SamplingRows

# -- Warm-up of a backend: runs first steps, which compile its kernels
#
# Compiled kernels are cached on disk: half a minute the first time, a second or two afterwards.

_WARMUP_TOKENS = 32  # tokens of the prompt beyond those that fit into a graph
_MESSAGE_DELAY_S = 2.0  # seconds


def warm_up(backend: CudaBackend) -> None:
    """Run a prefill, a draft, and a next token, greedy and sampled, on the padding page."""
    with _progress("compiling GPU kernels (up to a minute the first time)"):
        prompt = backend.graph_tokens + _WARMUP_TOKENS
        for count, temperature in ((prompt, 0.0), (2, 0.0), (1, 0.0), (1, 1.0)):
            count = min(count, backend.context)
            backend.launch(_batch(count, temperature)).result()


def _batch(count: int, temperature: float) -> StepBatch:
    positions = np.arange(count)
    pick = SamplingRows(
        np.array([[temperature, 0.9, 0.0, 1.0, 0.0, 0.0]]),
        np.zeros((1, 6), np.int64),
        np.empty(0, np.int64),
    )
    return StepBatch(
        tokens=np.zeros(count, np.int64),
        positions=positions,
        visible_end=positions + 1,
        row_starts=np.array([0, count]),
        slots=np.zeros(1, np.int64),
        sample_indices=np.array([count - 1]),
        sampling=pick,
        state_slots=np.array([[-1, 0]]),
    )


@contextmanager
def _progress(task: str) -> Iterator[None]:
    """Print `task` to a terminal if it takes longer than `_MESSAGE_DELAY_S`."""
    if not sys.stderr.isatty():
        yield
        return
    start, printed = perf_counter(), threading.Event()

    def show() -> None:
        printed.set()
        print(f"{task} ...", end="", flush=True, file=sys.stderr)

    timer = threading.Timer(_MESSAGE_DELAY_S, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if printed.is_set():
            print(f" {perf_counter() - start:.0f} s", file=sys.stderr)


class CudaModel:
    """Model weights on a GPU. Makes backends that run them."""

    def __init__(
        self, weights: Weights, fingerprint: Callable[[], str], *, exact: bool = False
    ) -> None:
        """`fingerprint` hashes the file: here matrices are fused and may be quantized."""
        self.weights, self.exact = weights, exact
        self.fingerprint = cache(fingerprint)

    @property
    def config(self) -> ModelConfig:
        return self.weights.config

    @property
    def precision(self) -> str:
        return self.weights.precision

    @property
    def device(self) -> str:
        return str(self.weights.device)

    @property
    def numerics(self) -> str:
        dtype, name = self.weights.dtype, device_description(self.weights.device)
        return f"cuda {name} triton {triton.__version__} {dtype} exact={self.exact}"

    def backend(self, *, memory: int | None, context: int) -> CudaBackend:
        weights = self.weights
        pages = allocate_kv_cache(weights, memory, context)
        backend = CudaBackend(weights, pages=pages, context=context, exact=self.exact)
        if weights.device.type == "cuda":  # Triton's interpreter compiles nothing
            warm_up(backend)
        return backend

    @torch.inference_mode()
    def logits(self, vectors: Floats) -> Floats:
        weights, config = self.weights, self.config
        x, transform = self._on_device(vectors), weights.transform
        if transform is not None:
            x = normed(x, transform.norm, config.norm_eps)
            x = activate(config.activation, _product(transform.dense, x))
        return _to_numpy(self.project(normed(x, weights.norm, config.norm_eps)))

    def project(self, vectors: Tensor) -> Tensor:
        """Apply the head to normalized vectors on the device."""
        out, cap = _product(self.weights.head, vectors), self.config.logit_softcap
        if self.config.logit_scale != 1:
            out = out * self.config.logit_scale
        return torch.tanh(out / cap) * cap if cap else out

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of int32 tokens on the device, [n, width]."""
        table, scale = self.weights.embed, self.config.embedding_scale
        if isinstance(table, PlainMatrix):
            out = functional.embedding(tokens, table.weight)
        else:
            out = torch.empty(
                len(tokens), table.columns, dtype=self.weights.dtype, device=tokens.device
            )
            table.embed_tokens(tokens, tokens, out)
        return out if scale == 1 else out * scale

    @torch.inference_mode()
    def normed(self, vectors: Floats) -> Floats:
        return _to_numpy(normed(self._on_device(vectors), self.weights.norm, self.config.norm_eps))

    def vector(self, name: str) -> Floats | None:
        norm, head = self.weights.norm, self.weights.head
        vector = {"norm.weight": norm.gain, "norm.bias": norm.bias, "head.bias": head.bias}[name]
        return None if vector is None else _to_numpy(vector)

    def rows(self, name: str, start: int, stop: int) -> Floats:
        table = self.weights.head if name == "head.weight" else self.weights.embed
        return _to_numpy(table.float_rows(start, min(stop, table.rows)))

    def _on_device(self, vectors: Floats) -> Tensor:
        return torch.from_numpy(np.array(vectors)).to(self.weights.device, self.weights.dtype)


def _product(matrix: WeightMatrix, x: Tensor) -> Tensor:
    out = torch.empty(len(x), matrix.rows, dtype=x.dtype, device=x.device)
    matrix.gemm(x, out)
    return out


def _to_numpy(tensor: Tensor) -> Floats:
    return np.asarray(tensor.float().cpu().numpy())
