"""A model loaded on a GPU: the `Loaded` interface of the CUDA backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from unspool.backends.cuda.backend import CudaBackend
from unspool.backends.cuda.looks import normed
from unspool.backends.cuda.memory import allocate_kv_cache
from unspool.backends.cuda.warming import warm_up
from unspool.backends.cuda.weights import Weights
from unspool.backends.step import Floats
from unspool.model.config import ModelConfig


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
        return self.weights.precision or str(self.weights.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        return str(self.weights.device)

    def backend(self, *, memory: int | None, context: int) -> CudaBackend:
        weights = self.weights
        pages = allocate_kv_cache(weights, memory, context)
        backend = CudaBackend(weights, pages=pages, context=context, exact=self.exact)
        if weights.device.type == "cuda":  # Triton's interpreter compiles nothing
            warm_up(backend)
        return backend

    @torch.inference_mode()
    def logits(self, vectors: Floats) -> Floats:
        weights, cap = self.weights, self.config.logit_softcap
        x = self._apply_norm(vectors)
        out = torch.empty(len(x), weights.head.rows, dtype=x.dtype, device=x.device)
        weights.head.gemm(x, out)
        return _to_numpy(torch.tanh(out / cap) * cap if cap else out)

    @torch.inference_mode()
    def normed(self, vectors: Floats) -> Floats:
        return _to_numpy(self._apply_norm(vectors))

    def vector(self, name: str) -> Floats | None:
        norm, head = self.weights.norm, self.weights.head
        vector = {"norm.weight": norm.gain, "norm.bias": norm.bias, "head.bias": head.bias}[name]
        return None if vector is None else _to_numpy(vector)

    def rows(self, name: str, start: int, stop: int) -> Floats:
        table = self.weights.head if name == "head.weight" else self.weights.embed
        return _to_numpy(table.float_rows(start, min(stop, table.rows)))

    def _apply_norm(self, vectors: Floats) -> Tensor:
        x = torch.from_numpy(np.array(vectors)).to(self.weights.device, self.weights.dtype)
        return normed(x, self.weights.norm, self.config.norm_eps)


def _to_numpy(tensor: Tensor) -> Floats:
    return np.asarray(tensor.float().cpu().numpy())
